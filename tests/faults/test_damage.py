"""A damaged checkpoint is named and refused, and the one before it is used; wrong values are never loaded."""

import math
import os
import re
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpsr.benchmarks.harness.checkpoint_files import (
    checkpoint_files,
    commit_file,
    edit_commit,
    rank_part,
    rest_file,
    slab_files,
    weights_file,
)
from cpsr.checkpoint.catalogue import Retention, scan
from cpsr.checkpoint.manifest import SLABS, step_name
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.errors import CheckpointError, CPSRError
from cpsr.state.shard import Shard
from tests.checkpoint.conftest import assert_same_bits, make_shard

RANKS = 2
COMMITTED = (10, 20, 30, 40)
NEWEST = COMMITTED[-1]
FOREIGN = 10_001  # an iteration that no test saves


def shard_of(rank: int, iteration: int) -> Shard:
    return make_shard(iteration * RANKS + rank, iteration=iteration)


def open_run(run_dir: Path, life: int) -> list[CheckpointStore]:
    """The store of each rank."""
    return [CheckpointStore(run_dir, rank, RANKS, "faults", life) for rank in range(RANKS)]


def write_run(run_dir: Path) -> None:
    """A run in its first life, with four whole checkpoints."""
    stores = open_run(run_dir, 1)
    stores[0].prepare()
    for iteration in COMMITTED:
        for store in reversed(stores):
            store.write(Snapshot(iteration, shard_of(store.rank, iteration), {"step": iteration, "origin": "trained"}))
        assert stores[0].commit(iteration, 20.0, threading.Event()).committed


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
    path = data.draw(st.sampled_from(checkpoint_files(run_dir / "checkpoints" / step_name(NEWEST))))
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
                assert_same_bits(shard, shard_of(store.rank, NEWEST))
    finally:
        path.write_bytes(original)
    if changed == original:
        assert (found, refused) == ([], [])
    else:
        assert {problem.iteration for problem in found} == {NEWEST}
        # What belongs to one rank is that rank's to refuse; the others hear of it when they agree on a checkpoint.
        own = [rank for rank in range(RANKS) if path.name.startswith(f"rank-{rank:05d}")]
        assert refused == (own or list(range(RANKS)))


@pytest.fixture
def own_run(run_dir: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(run_dir, tmp_path / "run"))


@pytest.fixture
def thinned(own_run: Path) -> Path:
    """Directory of a checkpoint there that retention has thinned to its weights."""
    open_run(own_run, 2)[0].retain(Retention(full_checkpoints=2))
    return own_run / "checkpoints" / step_name(COMMITTED[0])


@given(edits=EDITS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_thinned_checkpoint_is_no_place_to_restart_whatever_its_commit_says(
    thinned: Path, edits: list[tuple[str, int, int]]
) -> None:
    run_dir, path = thinned.parents[1], commit_file(thinned)
    original = path.read_bytes()
    changed = edited(original, edits)
    path.write_bytes(changed)
    try:
        found = {problem.iteration for problem in verify_run(run_dir)}
        for store in open_run(run_dir, 2):
            with pytest.raises(CheckpointError, match="keeps the weights only" if changed == original else "COMMIT"):
                store.load(COMMITTED[0], shard_of(store.rank, FOREIGN))
    finally:
        path.write_bytes(original)
    assert found == (set() if changed == original else {COMMITTED[0]})


def test_a_commit_that_lists_again_what_thinning_has_removed_names_what_is_missing(
    own_run: Path, tmp_path: Path
) -> None:
    """A backup that was put back, or whoever can write there and make all hashes fit."""
    directory = own_run / "checkpoints" / step_name(COMMITTED[0])
    whole, store = commit_file(directory).read_bytes(), open_run(own_run, 2)[0]
    store.retain(Retention(full_checkpoints=2))
    gone = rest_file(directory.parent / step_name(NEWEST)).name.replace(str(NEWEST), str(COMMITTED[0]))
    backup = partial(commit_file(directory).write_bytes, whole)
    edit = partial(edit_commit, directory, lambda commit: commit.update(weights_only=False))
    for put_back in (backup, edit):
        put_back()
        with pytest.raises(CheckpointError, match=f"{re.escape(gone)}: is missing"):
            store.load(COMMITTED[0], shard_of(0, FOREIGN))
        assert gone in {problem.file.name for problem in verify_run(own_run)}


def test_a_commit_that_is_gone_is_no_checkpoint_and_its_slabs_go_with_it(thinned: Path) -> None:
    commit_file(thinned).unlink()
    store = open_run(thinned.parents[1], 2)[0]
    with pytest.raises(CheckpointError, match="is not a committed checkpoint"):
        store.load(COMMITTED[0], shard_of(0, FOREIGN))
    assert store.prepare() == []
    listed = {path for iteration in COMMITTED[1:] for path in slab_files(store.directory / step_name(iteration))}
    assert set((store.directory / SLABS).iterdir()) == listed


@pytest.mark.parametrize("chosen", [weights_file, rank_part, commit_file])
def test_a_pipe_in_the_place_of_a_file_does_not_hold_up_verifying(
    own_run: Path, chosen: Callable[[Path], Path]
) -> None:
    path = chosen(own_run / "checkpoints" / step_name(NEWEST))
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


@pytest.mark.parametrize("created", [1e300, math.nan, -1e12, math.inf])
def test_a_manifest_with_an_impossible_time_costs_that_checkpoint_alone(own_run: Path, created: float) -> None:
    directory = own_run / "checkpoints" / step_name(NEWEST)
    edit_commit(directory, lambda commit: commit.update(created_unix_seconds=created))
    store = open_run(own_run, 2)[0]
    assert [problem.iteration for problem in scan(store.directory).problems] == [NEWEST]
    assert [info.iteration for info in store.catalogue()] == list(COMMITTED[:-1])


def test_what_strays_among_the_slabs_goes_and_where_it_leads_nothing_changes(own_run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("not ours")
    store = open_run(own_run, 2)[0]
    slabs = store.directory / SLABS
    there = set(slabs.iterdir())
    (slabs / "directory").symlink_to(outside)
    (slabs / "file").symlink_to(outside / "file")
    (slabs / "nested").mkdir()
    (slabs / "nested" / "link").symlink_to(outside)
    assert verify_run(own_run) == []
    assert store.prepare() == []
    assert set(slabs.iterdir()) == there
    assert [path.read_text() for path in outside.iterdir()] == ["not ours"]


def test_a_link_in_the_place_of_all_slabs_is_named_and_nothing_is_read_or_removed_through_it(
    own_run: Path, tmp_path: Path
) -> None:
    slabs = own_run / "checkpoints" / SLABS
    slabs.rename(tmp_path / "moved")
    slabs.symlink_to(tmp_path / "moved")
    there = set((tmp_path / "moved").iterdir())
    assert slabs in {problem.file for problem in verify_run(own_run)}
    store = open_run(own_run, 2)[0]
    with pytest.raises(CPSRError, match="is a symbolic link"):
        store.load(NEWEST, shard_of(0, FOREIGN))
    store.prepare()
    store.retain(Retention(full_checkpoints=2))
    assert set((tmp_path / "moved").iterdir()) == there
