"""A damaged checkpoint is named and refused, and the one before it is used; wrong values are never loaded."""

import os
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpsr.checkpoint.catalogue import Retention
from cpsr.checkpoint.manifest import commit_record, step_name
from cpsr.checkpoint.store import verify_run
from cpsr.errors import CheckpointError
from tests.faults.stores import COMMITTED, FOREIGN, NEWEST, RANKS, commit, is_same, open_run, shard_of, write_run


@pytest.fixture(scope="module")
def run_dir(fast_directory: Path) -> Path:
    """A run that every test leaves as it found it."""
    directory = fast_directory / "damage-run"
    write_run(directory)
    return directory


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
    name = data.draw(
        st.sampled_from(sorted(path.name for path in (run_dir / "checkpoints" / step_name(NEWEST)).iterdir()))
    )
    path = run_dir / "checkpoints" / step_name(NEWEST) / name
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
            else:
                assert is_same(shard, shard_of(store.rank, NEWEST))
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
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    for iteration in COMMITTED:
        for rank in range(RANKS):
            path = copy / "checkpoints" / step_name(iteration) / f"rank-{rank:05d}.params.safetensors"
            path.write_bytes(path.read_bytes()[:-1])
    stores = open_run(copy, 2)
    stores[0].prepare()
    for info in stores[0].catalogue():
        with pytest.raises(CheckpointError):
            stores[0].load(info.iteration, shard_of(0, FOREIGN))
        stores[0].quarantine(info.iteration, "a test")
    commit(stores, NEWEST + 10)
    stores[0].retain(Retention(full_checkpoints=100))
    shard = shard_of(1, FOREIGN)
    stores[1].load(NEWEST + 10, shard)
    assert is_same(shard, shard_of(1, NEWEST + 10))
    assert len(open_run(copy, 3)[0].remains()) == 1 + len(COMMITTED)  # the damaged ones are set aside


def test_a_thinned_checkpoint_is_no_place_to_restart_whatever_its_marker_says(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    store = open_run(tmp_path / "run", 2)[0]
    store.retain(Retention(full_checkpoints=2))
    marker = tmp_path / "run" / "checkpoints" / step_name(COMMITTED[0]) / "THINNED"
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
    path = own_run / "checkpoints" / step_name(NEWEST) / name
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
    nested = own_run / "checkpoints" / step_name(50) / "nested"
    nested.mkdir(parents=True)
    (nested / "link").symlink_to(tmp_path / "outside")
    store = open_run(own_run, 2)[0]
    assert store.prepare() == []
    assert [info.iteration for info in store.catalogue()] == list(COMMITTED)
    assert not nested.parent.exists()
    assert (tmp_path / "outside" / "file").exists()


def test_a_directory_that_cannot_be_removed_stays_and_is_reported(
    own_run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nested = own_run / "checkpoints" / step_name(50) / "nested"
    nested.mkdir(parents=True)

    def refusing(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refusing)
    assert open_run(own_run, 2)[0].prepare() == []
    assert nested.is_dir()
    assert "nested stays: it cannot be removed" in caplog.text


def test_a_directory_in_what_was_set_aside_does_not_stop_retention(own_run: Path) -> None:
    stores = open_run(own_run, 2)
    (own_run / "checkpoints" / step_name(NEWEST) / "nested").mkdir()
    aside = stores[0].quarantine(NEWEST, "a test")
    assert aside is not None
    for iteration in (50, 60, 70):
        commit(stores, iteration)
    stores[0].retain(Retention(full_checkpoints=100))
    assert not aside.exists()


@pytest.mark.parametrize("created", ["1e300", "NaN", "-1e12", "Infinity"])
def test_a_manifest_with_an_impossible_time_costs_that_checkpoint_alone(own_run: Path, created: str) -> None:
    directory = own_run / "checkpoints" / step_name(NEWEST)
    head, tail = (directory / "manifest.json").read_bytes().split(b'"created_unix_seconds":')
    changed = head + b'"created_unix_seconds":' + created.encode() + tail[tail.index(b",") :]
    (directory / "manifest.json").write_bytes(changed)
    (directory / "COMMIT").write_bytes(commit_record(changed))
    store = open_run(own_run, 2)[0]
    assert [problem.iteration for problem in store.problems()] == [NEWEST]
    assert [info.iteration for info in store.catalogue()] == list(COMMITTED[:-1])
