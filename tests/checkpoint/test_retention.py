"""What stays and what goes, as rules and over random sequences of saves, roll-backs and damage."""

import errno
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpsr.checkpoint.catalogue as catalogue_module
from cpsr.benchmarks.harness.checkpoint_files import commit_file
from cpsr.checkpoint import saved
from cpsr.checkpoint.catalogue import Catalogue, Retention, plan_retention, scan
from cpsr.checkpoint.commit import SupersededError
from cpsr.checkpoint.files import remove_tree
from cpsr.checkpoint.manifest import COMMIT, SLABS, FileRecord, Manifest, RankRecord, Save, saved_at, slab_name
from cpsr.checkpoint.saved import SavedCheckpoint
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.checkpoint.verify import DamagedFileError, read_manifest
from cpsr.ranks.heartbeat import HeartbeatFiles
from tests.checkpoint.conftest import assert_same_bits, make_shard, make_snapshot, refuse_asking, save

FULL, THIN = 300, 100


def infos(iterations: list[int], full: int) -> list[SavedCheckpoint]:
    made: dict[str, Any] = {"run_id": "run", "life": 1, "attempt": 0, "world_size": 1, "label": None}
    made |= {"created_unix_seconds": 0.0}
    found = []
    for n, one in enumerate(iterations):
        sizes = {slab_name(0, "params", Save(one, 1, 0)): THIN, slab_name(0, "moments", Save(one, 1, 0)): FULL - THIN}
        files = {name: FileRecord(bytes=size, xxh3_128="0" * 32) for name, size in sizes.items()}
        ranks = {0: RankRecord(sha256="0" * 64, files=files)}
        thinned = n < len(iterations) - full
        manifest = Manifest(iteration=one, sequence=n, ranks=ranks, weights_only=thinned, **made)
        found.append(SavedCheckpoint(Path("x"), manifest))
    return found


def plan(
    iterations: list[int], full: int = 3, other_bytes: int = 0, stays: Sequence[int] = (), **config: int
) -> tuple[list[int], list[int]]:
    settings_ = Retention(**({"history_span_iterations": 100, "history_min_checkpoints": 2} | config))
    made = plan_retention(infos(iterations, full), settings_, {"other": other_bytes}, stays)
    return made.thin, made.delete


def test_rules() -> None:
    assert plan([10]) == ([], [])
    assert plan([10, 20, 30]) == ([10], [])
    assert plan([10, 20, 30, 120, 130]) == ([30], [10, 20])
    assert plan([10, 20, 300, 400], full_checkpoints=3) == ([], [10])
    assert plan([10, 200, 300, 400], history_min_checkpoints=4) == ([200], [])
    assert plan([10, 20, 30, 40], full=4) == ([10, 20], [])
    assert plan([10, 20, 30, 40], full=4, stays=[20]) == ([10], [])


def test_the_cap_drops_the_oldest_history_first_and_never_the_newest_full_one() -> None:
    steps = [10, 20, 30, 40, 50]
    assert plan(steps, disk_limit_bytes=900) == ([30], [])
    assert plan(steps, disk_limit_bytes=899) == ([30], [10])
    assert plan(steps, disk_limit_bytes=899, other_bytes=200) == ([], [10, 20, 30])
    assert plan(steps, disk_limit_bytes=350) == ([], [10, 20, 30, 40])
    assert plan(steps, disk_limit_bytes=1) == ([], [10, 20, 30, 40])


@given(
    steps=st.lists(st.integers(0, 1000), unique=True, min_size=1).map(sorted),
    span=st.integers(0, 500),
    minimum=st.integers(2, 6),
    full=st.integers(2, 4),
)
def test_the_newest_are_never_touched(steps: list[int], span: int, minimum: int, full: int) -> None:
    thin, delete = plan(
        steps, len(steps), history_span_iterations=span, history_min_checkpoints=minimum, full_checkpoints=full
    )
    assert not {*thin, *delete} & set(steps[-full:])
    assert not set(delete) & set(steps[-minimum:])
    assert not set(thin) & set(delete)
    assert all(steps[-1] - step > span for step in delete)


@settings(max_examples=25, deadline=None)
@given(
    actions=st.lists(
        st.sampled_from(["save", "save", "save", "roll back", "damage", "cut off", "restart"]),
        min_size=3,
        max_size=12,
    ),
    limit=st.none() | st.integers(1, 40_000),
)
def test_after_any_sequence_the_newest_two_are_whole(actions: list[str], limit: int | None) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory)
        config = Retention(history_span_iterations=30, disk_limit_bytes=limit)
        life, iteration = 1, 0
        store = CheckpointStore(run_dir, 0, 1, "run", life)
        store.prepare()
        for action in actions:
            full = [info.iteration for info in store.catalogue() if info.full]
            if action == "save":
                iteration += 10
                save(store, iteration)
                store.retain(config)
                assert_nothing_unlisted(store)
                expected = [*full, iteration][-2:] if limit is None else [iteration]
            elif action == "roll back" and full:
                iteration = full[0]
                store.abandon_after(iteration, "a test")
                expected = [iteration]
            elif action == "damage" and full:
                store.quarantine(full[-1], "a test")
                expected = full[:-1]
            elif action == "cut off":
                store.write(make_snapshot(iteration + 10))
                expected = full
            else:
                life += 1
                store = CheckpointStore(run_dir, 0, 1, "run", life)
                store.prepare()
                assert_nothing_unlisted(store)
                expected = full
            now = [info.iteration for info in store.catalogue() if info.full]
            assert now[-len(expected) :] == expected if expected else not now
            for step in expected:
                shard = make_shard(1)
                assert store.load(step, shard)["step"] == step
                assert_same_bits(shard, make_shard(step))
            assert verify_run(run_dir) == []


def assert_nothing_unlisted(store: CheckpointStore) -> None:
    """Each slab is listed by a checkpoint, or by one that was set aside."""
    found = scan(store.directory)
    listed = {name for info in found.checkpoints for name in info.manifest.files}
    for aside in found.asides:
        listed |= Manifest.parse(commit_file(aside.directory).read_bytes()).files.keys()
    assert {path.name for path in (store.directory / SLABS).glob("*")} == listed


def test_what_was_set_aside_goes_after_two_more_commits(store: CheckpointStore) -> None:
    config = Retention()
    for iteration in (10, 20, 30):
        save(store, iteration)
    store.quarantine(30, "damaged")
    store.abandon_after(10, "rolled back")

    def aside() -> list[str]:
        return sorted(path.name for path in store.directory.iterdir() if not path.name.startswith(("step-", SLABS)))

    both = ["abandoned-step-0000000020-3-0", "damaged-step-0000000030-3-0"]
    store.retain(config)
    assert aside() == both
    save(store, 20)
    store.retain(config)
    assert aside() == both
    save(store, 30)
    store.retain(config)
    assert aside() == []


def test_a_pass_with_nothing_to_do_forces_nothing_to_the_disk(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[str] = []
    monkeypatch.setattr(catalogue_module, "sync_directory", lambda path: forced.append(path.name))
    for iteration in (10, 20, 30):
        save(store, iteration)
    for _ in range(2):
        store.retain(Retention())
        assert forced == [SLABS]


def test_a_retention_pass_leaves_saves_under_way_alone(tmp_path: Path) -> None:
    """Their slabs, and those of frozen weights that they may list; what was cut off before goes."""
    stores = [CheckpointStore(tmp_path, rank, 2, "run", 1) for rank in (0, 1)]
    stores[0].prepare()
    stores[1].write(make_snapshot(10))  # rank 0 never writes its part
    for rank in (1, 0):
        stores[rank].write(make_snapshot(20))
    stores[1].write(make_snapshot(30))  # rank 1 is ahead
    frozen = stores[0].directory / SLABS / f"rank-00001.frozen-{'0' * 32}.safetensors"
    frozen.write_bytes(b"")
    assert stores[0].commit(20, 5.0, threading.Event()).committed
    stores[0].retain(Retention())
    left = {saved_at(path.name) for path in (stores[0].directory / SLABS).iterdir()}
    assert left == {20, 30, None}
    stores[0].write(make_snapshot(30))
    assert stores[0].commit(30, 5.0, threading.Event()).committed
    stores[0].retain(Retention())
    assert not frozen.exists()
    assert_nothing_unlisted(stores[0])


def test_nothing_is_dropped_while_a_commit_record_cannot_be_read(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (10, 20, 30):
        save(store, iteration)
    refuse_asking(monkeypatch, store.directory / "step-0000000020" / COMMIT, 1_000)
    store.retain(Retention(full_checkpoints=1, history_min_checkpoints=1, history_span_iterations=0))
    refuse_asking(monkeypatch, store.directory / "step-0000000020" / COMMIT, 0)
    assert verify_run(store.directory.parent) == []
    assert [info.iteration for info in store.catalogue()] == [20, 30]
    assert store.load(20, make_shard(1))["step"] == 20


def test_what_a_user_has_renamed_stays(store: CheckpointStore) -> None:
    for iteration in (10, 20):
        save(store, iteration)
    aside = store.directory / "mine"
    (store.directory / "step-0000000010").rename(aside)
    for iteration in range(30, 90, 10):
        save(store, iteration)
        store.retain(Retention(full_checkpoints=1, history_min_checkpoints=1, history_span_iterations=0))
    store.prepare()
    aside.rename(store.directory / "step-0000000010")
    assert verify_run(store.directory.parent) == []
    assert store.load(10, make_shard(1))["step"] == 10


def test_what_a_damaged_commit_record_listed_stays_until_two_more_commits(store: CheckpointStore) -> None:
    for iteration in (10, 20):
        save(store, iteration)
    commit_file(store.directory / "step-0000000020").write_bytes(b"torn")
    assert [problem.iteration for problem in store.prepare()] == [20]
    slabs = [path for path in (store.directory / SLABS).iterdir() if saved_at(path.name) == 20]
    assert len(slabs) == 3
    for iteration in (30, 40):
        assert all(path.exists() for path in slabs)
        save(store, iteration)
        store.retain(Retention())
    assert not any(path.exists() for path in slabs)


def test_what_was_set_aside_and_cannot_be_removed_keeps_nothing_else(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 10)
    store.quarantine(10, "a test")
    real = remove_tree

    def refusing(directory: Path) -> None:
        if directory.name.startswith("damaged-"):
            raise OSError(errno.EACCES, "Permission denied", str(directory))
        real(directory)

    monkeypatch.setattr(catalogue_module, "remove_tree", refusing)
    for iteration in range(20, 70, 10):
        save(store, iteration)
        store.retain(Retention(full_checkpoints=1, history_min_checkpoints=1, history_span_iterations=0))
    assert [info.iteration for info in store.catalogue()] == [60]
    assert caplog.text.count("cannot be removed") == 1


def test_a_save_that_begins_during_a_pass_keeps_its_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [CheckpointStore(tmp_path, rank, 2, "run", 1) for rank in (0, 1)]
    stores[0].prepare()
    for rank in (1, 0):
        stores[rank].write(make_snapshot(10))
    assert stores[0].commit(10, 5.0, threading.Event()).committed

    def then_a_save(checkpoints: Path) -> Catalogue:
        found = scan(checkpoints)
        stores[1].write(make_snapshot(20))
        return found

    monkeypatch.setattr(catalogue_module, "scan", then_a_save)
    stores[0].retain(Retention())
    monkeypatch.undo()
    stores[0].write(make_snapshot(20))
    assert stores[0].commit(20, 5.0, threading.Event()).committed


def test_what_cannot_be_removed_or_thinned_keeps_nothing_else(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk, and a slab that another machine has open."""
    for iteration in range(10, 60, 10):
        save(store, iteration)
    busy = min((store.directory / SLABS).iterdir())

    def refusing(path: Path) -> None:
        if path == busy:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        path.unlink()

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(catalogue_module, "remove_entry", refusing)
    monkeypatch.setattr(catalogue_module, "write_bytes", full)
    (store.directory / "lost+found").mkdir(mode=0)
    with pytest.raises(OSError, match=r"No space|busy"):
        store.retain(Retention(full_checkpoints=1, history_min_checkpoints=2, history_span_iterations=0))
    left = [path for path in (store.directory / SLABS).iterdir() if saved_at(path.name) in (10, 20, 30)]
    assert left == [busy]
    assert store.prepare() == []
    assert caplog.text.count("which no checkpoint lists, cannot be removed") == 1


def test_one_whose_commit_record_is_damaged_by_now_keeps_no_other_whole(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (10, 20, 30, 40):
        save(store, iteration)
    torn = store.directory / "step-0000000010"
    monkeypatch.setattr("time.time", lambda: commit_file(torn).stat().st_ctime + 60)
    scan(store.directory)

    def reading(directory: Path) -> Manifest:
        if directory == torn:
            raise DamagedFileError(torn / COMMIT, "is torn")
        return read_manifest(directory)

    monkeypatch.setattr(saved, "read_manifest", reading)
    slabs = set((store.directory / SLABS).glob("*-0000000010-*"))
    for _ in range(2):
        store.retain(Retention(full_checkpoints=2))
        found = scan(store.directory)
        assert [(info.iteration, info.full) for info in found.checkpoints] == [(20, False), (30, True), (40, True)]
        assert [problem.iteration for problem in found.problems] == [10]
        assert slabs == set((store.directory / SLABS).glob("*-0000000010-*"))


def test_a_newer_life_is_left_alone(store: CheckpointStore, tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        save(store, iteration)
    HeartbeatFiles(tmp_path, 2).claim()
    with pytest.raises(SupersededError):
        store.retain(Retention(full_checkpoints=1))
    assert all(info.full for info in store.catalogue())
