"""A damaged checkpoint is named and refused, and the one before it is used; wrong values are never loaded."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpsr.benchmarks.faults.damage import NEWEST, damage_regions, files_of, holders, regions, step
from cpsr.benchmarks.faults.experts import write_sparse
from cpsr.benchmarks.faults.job import (
    COMMITTED,
    KEEP_ALL,
    RANKS,
    commit,
    copy_run,
    open_run,
    same_bits,
    shard_of,
    write_run,
)
from cpsr.benchmarks.faults.oracle import FOREIGN, restart
from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.checkpoint.manifest import commit_record
from cpsr.checkpoint.store import verify_run
from cpsr.config import CheckpointConfig
from cpsr.errors import CheckpointError
from tests.faults.conftest import require_good

SOME_EVERY = 25


@pytest.fixture(scope="module")
def run_dir(fast_directory: Path) -> Path:
    """A run that every test leaves as it found it."""
    directory = fast_directory / "damage-run"
    write_run(directory)
    return directory


@pytest.fixture(scope="module")
def some(fast_directory: Path) -> list[Outcome]:
    return list(damage_regions(fast_directory / "damage", SOME_EVERY, restart_every=10))


@pytest.mark.parametrize(
    ("scenario", "at_least"),
    [
        ("damage: flipped bit", 30),
        ("damage: cut off", 30),
        ("damage: longer", 10),
        ("damage: file gone", 10),
        ("damage: link in its place", 10),
        ("damage: directory in its place", 10),
        ("exchange: between checkpoints", 11),
        ("exchange: between ranks", 4),
        ("exchange: of another run", 13),
    ],
)
def test_damage_is_named_refused_and_survived(some: list[Outcome], scenario: str, at_least: int) -> None:
    require_good([outcome for outcome in some if outcome.scenario == scenario], at_least)


@pytest.fixture(scope="module")
def some_of_sparse(fast_directory: Path) -> list[Outcome]:
    return list(damage_regions(fast_directory / "damage-sparse", SOME_EVERY, 10, write_sparse, "rank-00001.experts"))


@pytest.mark.parametrize(
    ("scenario", "at_least"),
    [
        ("damage: flipped bit", 10),
        ("damage: cut off", 10),
        ("damage: longer", 6),
        ("damage: file gone", 6),
        ("exchange: of another run", 6),
        ("exchange: between ages", 6),
    ],
)
def test_damage_in_what_is_carried_along_is_found_in_each_checkpoint_that_holds_it(
    some_of_sparse: list[Outcome], scenario: str, at_least: int
) -> None:
    require_good([outcome for outcome in some_of_sparse if outcome.scenario == scenario], at_least)


def test_a_copy_of_a_run_shares_the_files_that_the_run_shares(fast_directory: Path) -> None:
    write_sparse(fast_directory / "shared")
    copy_run(fast_directory / "shared", fast_directory / "copy")
    for run_dir in (fast_directory / "shared", fast_directory / "copy"):
        carried = {path.name: holders(run_dir / "checkpoints", path.name) for path in experts_of(run_dir)}
        assert carried == {
            f"rank-{rank:05d}.experts-{age:010d}.{kind}.safetensors": frozenset(range(age, NEWEST + 1, 10))
            for rank in range(RANKS)
            for age in (20, 30, 40)
            for kind in ("params", "moments")
        }


def experts_of(run_dir: Path) -> list[Path]:
    """Files of experts in the newest checkpoint."""
    return list((run_dir / "checkpoints" / step(NEWEST)).glob("*.experts-*"))


@pytest.mark.slow
@pytest.mark.parametrize(("prepare", "at_least"), [(write_run, 1500), (write_sparse, 2500)])
def test_every_region_of_every_file(fast_directory: Path, prepare: Callable[[Path, str], None], at_least: int) -> None:
    require_good(list(damage_regions(fast_directory / "damage-all", 1, 20, prepare)), at_least)


def test_the_regions_are_all_of_every_file(run_dir: Path) -> None:
    for name in files_of(run_dir / "checkpoints"):
        path = run_dir / "checkpoints" / step(NEWEST) / name
        covered = [byte for region in regions(path) for byte in range(region.start, region.stop)]
        left = set(range(path.stat().st_size)) - set(covered)
        assert len(covered) == len(set(covered)), name
        # Header and tensors of a file of tensors are padded to eight bytes with spaces, which belong to nothing.
        assert {path.read_bytes()[byte : byte + 1] for byte in left} <= {b" "}, name


EDITS = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.integers(0, 1 << 16), st.integers(1, 255)),
        st.tuples(st.just("cut"), st.integers(0, 1 << 16), st.just(0)),
        st.tuples(st.just("zero"), st.integers(0, 1 << 16), st.integers(1, 64)),
        st.tuples(st.just("double"), st.integers(0, 1 << 16), st.integers(1, 64)),
        st.tuples(st.just("drop"), st.integers(0, 1 << 16), st.integers(1, 64)),
    ),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, edits: list[tuple[str, int, int]]) -> bytes:
    changed = bytearray(data)
    for kind, place, amount in edits:
        start = place % max(1, len(changed))
        if kind == "flip" and changed:
            changed[start] ^= amount
        elif kind == "cut":
            del changed[start:]
        elif kind == "zero":
            changed[start : start + amount] = bytes(len(changed[start : start + amount]))
        elif kind == "double":
            changed[start:start] = changed[start : start + amount]
        elif kind == "drop":
            del changed[start : start + amount]
    return bytes(changed)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), edits=EDITS)
def test_no_edit_of_any_file_is_ever_loaded(
    run_dir: Path, data: st.DataObject, edits: list[tuple[str, int, int]]
) -> None:
    name = data.draw(st.sampled_from(files_of(run_dir / "checkpoints")))
    path = run_dir / "checkpoints" / step(NEWEST) / name
    original = path.read_bytes()
    changed = edited(original, edits)
    path.write_bytes(changed)
    try:
        found = verify_run(run_dir)
        refused = []
        for store in open_run(run_dir, 2):
            shard = shard_of(store.rank, FOREIGN)
            try:
                store.load(NEWEST, shard)
            except CheckpointError:
                refused.append(store.rank)
                assert same_bits(shard, shard_of(store.rank, FOREIGN))
            else:
                assert same_bits(shard, shard_of(store.rank, NEWEST))
    finally:
        path.write_bytes(original)
    if changed == original:
        assert (found, refused) == ([], [])
    else:
        assert {problem.iteration for problem in found} == {NEWEST}
        # What belongs to one rank is that rank's to refuse; the others hear of it when they agree on a checkpoint.
        own = [rank for rank in range(RANKS) if name.startswith(f"rank-{rank:05d}")]
        assert refused == (own or list(range(RANKS)))


def test_everything_damaged_is_refused_and_a_new_save_is_committed(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    for iteration in COMMITTED:
        for rank in range(RANKS):
            path = tmp_path / "run" / "checkpoints" / step(iteration) / f"rank-{rank:05d}.params.safetensors"
            path.write_bytes(path.read_bytes()[:-1])
    verdict = restart(tmp_path / "run", newest=(), damaged=True)
    assert (verdict.survived, verdict.state_equal) == (True, True), verdict.what
    assert len(open_run(tmp_path / "run", 3)[0].remains()) == 1 + len(COMMITTED)  # the damaged ones are set aside


def test_a_thinned_checkpoint_is_no_place_to_restart_whatever_its_marker_says(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    store = open_run(tmp_path / "run", 2)[0]
    store.retain(CheckpointConfig(full_checkpoints=2))
    marker = tmp_path / "run" / "checkpoints" / step(COMMITTED[0]) / "THINNED"
    original = marker.read_bytes()
    for changed in (b"", original[:-1], original + b"\n", b"[]\n", original.replace(b"0", b"1", 1)):
        marker.write_bytes(changed)
        assert {problem.iteration for problem in verify_run(tmp_path / "run")} == {COMMITTED[0]}
        with pytest.raises(CheckpointError, match="THINNED"):
            store.load(COMMITTED[0], shard_of(0, FOREIGN))
    marker.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        store.load(COMMITTED[0], shard_of(0, FOREIGN))


@pytest.fixture
def own_run(run_dir: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(run_dir, tmp_path / "run"))


@pytest.mark.parametrize("name", ["rank-00000.params.safetensors", "rank-00000.json", "COMMIT"])
def test_a_pipe_in_the_place_of_a_file_does_not_hold_up_verifying(own_run: Path, name: str) -> None:
    path = own_run / "checkpoints" / step(NEWEST) / name
    path.unlink()
    os.mkfifo(path)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(p.file.name for p in verify_run(own_run)), daemon=True)
    thread.start()
    thread.join(5)
    assert found == [path.name]


def test_a_directory_in_an_uncommitted_save_does_not_stop_a_restart(own_run: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("not ours")
    nested = own_run / "checkpoints" / step(50) / "nested"
    nested.mkdir(parents=True)
    (nested / "link").symlink_to(tmp_path / "outside")
    store = open_run(own_run, 2)[0]
    assert store.prepare() == []
    assert [info.iteration for info in store.catalogue()] == list(COMMITTED)
    assert not nested.parent.exists()
    assert (tmp_path / "outside" / "file").exists()


def test_a_directory_that_cannot_be_removed_stays_and_is_said(
    own_run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nested = own_run / "checkpoints" / step(50) / "nested"
    nested.mkdir(parents=True)

    def refusing(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refusing)
    assert open_run(own_run, 2)[0].prepare() == []
    assert nested.is_dir()
    assert "nested stays: it cannot be removed" in caplog.text


def test_a_directory_in_what_was_set_aside_does_not_stop_retention(own_run: Path) -> None:
    stores = open_run(own_run, 2)
    (own_run / "checkpoints" / step(NEWEST) / "nested").mkdir()
    aside = stores[0].quarantine(NEWEST, "a test")
    assert aside is not None
    for iteration in (50, 60, 70):
        commit(stores, iteration)
    stores[0].retain(KEEP_ALL)
    assert not aside.exists()


@pytest.mark.parametrize("created", ["1e300", "NaN", "-1e12", "Infinity"])
def test_a_manifest_with_an_impossible_time_costs_that_checkpoint_alone(own_run: Path, created: str) -> None:
    directory = own_run / "checkpoints" / step(NEWEST)
    head, tail = (directory / "manifest.json").read_bytes().split(b'"created_unix_seconds":')
    changed = head + b'"created_unix_seconds":' + created.encode() + tail[tail.index(b",") :]
    (directory / "manifest.json").write_bytes(changed)
    (directory / "COMMIT").write_bytes(commit_record(changed))
    store = open_run(own_run, 2)[0]
    assert [problem.iteration for problem in store.problems()] == [NEWEST]
    assert [info.iteration for info in store.catalogue()] == list(COMMITTED[:-1])
