"""The history of ranks that own other slices than those who saved it."""

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.checkpoint.assembled import RankSlices
from cpsr.checkpoint.history import DiskHistory
from cpsr.checkpoint.manifest import file_name, step_name
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.state.shard import Shard
from tests.checkpoint.cuts import CUTS, SHAPES, shard, whole

NEVER = threading.Event()


def save(run_dir: Path, iteration: int, ranks: int, cuts: str) -> None:
    """A checkpoint whose weights are those of `whole`, plus the iteration."""
    stores = [CheckpointStore(run_dir, rank, ranks, "run", 1, fsync=False) for rank in range(ranks)]
    stores[0].prepare()
    scalars = {"cumulative_learning_rate": float(iteration), "learning_rate": 1.0, "origin": "trained"}
    for rank, store in enumerate(stores):
        part = shard(rank, ranks, cuts=cuts)
        for one in part.operators.values():
            one.parameter.values.add_(iteration)
        taken = {name: type(one)(name, one.parameter, one.moments, iteration) for name, one in part.operators.items()}
        store.write(Snapshot(iteration, Shard(taken, part.others), scalars))
    assert stores[0].commit(iteration, 10.0, NEVER).committed


def opened(run_dir: Path, rank: int, ranks: int, cuts: str, known: DiskHistory | None = None) -> DiskHistory:
    slices = RankSlices.of(rank, ranks, shard(rank, ranks, cuts=cuts))
    return DiskHistory(run_dir / "checkpoints", slices, known=None if known is None else known.known)


@settings(max_examples=25, deadline=None)
@given(
    lives=st.lists(st.tuples(st.integers(1, 5), st.sampled_from(CUTS)), min_size=1, max_size=4),
    ranks=st.integers(1, 5),
    cuts=st.sampled_from(CUTS),
    data=st.data(),
)
def test_each_rank_reads_its_slices_of_every_entry(
    tmp_path_factory: pytest.TempPathFactory,
    lives: list[tuple[int, str]],
    ranks: int,
    cuts: str,
    data: st.DataObject,
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    for place, (saved_by, cut) in enumerate(lives):
        if saved_by == ranks:
            cut = cuts  # as many ranks cut alike
        save(run_dir, 10 * (place + 1), saved_by, cut)
    for rank in range(ranks):
        history, own = opened(run_dir, rank, ranks, cuts), shard(rank, ranks, cuts=cuts)
        assert not history.excluded
        assert [entry.iteration for entry in history.entries] == [10 * (place + 1) for place in range(len(lives))]
        assert [entry.time for entry in history.entries] == [entry.iteration for entry in history.entries]
        assert set(history.operators) == set(own.operators)
        for name, one in own.operators.items():
            numel = one.parameter.numel
            assert history.numel(name) == numel
            start = data.draw(st.integers(0, numel))
            stop = data.draw(st.integers(start, numel))
            for place, entry in enumerate(history.entries):
                assert history.taken_at(name, place) == entry.iteration
                expected = one.parameter.values[start:stop] + entry.iteration
                assert torch.equal(history.read(name, place, start, stop), expected)
        history.close()


def test_a_slice_of_one_piece_is_a_view_of_the_file(tmp_path: Path) -> None:
    save(tmp_path, 10, 1, "whole")
    history = opened(tmp_path, 1, 2, "each")
    pieces = [history.read("c", 0, start, start + 4) for start in (0, 4)]
    assert pieces[0].untyped_storage().data_ptr() == pieces[1].untyped_storage().data_ptr()


def test_a_damaged_file_leaves_the_entry_out_where_a_part_of_it_is_needed(tmp_path: Path) -> None:
    for iteration in (10, 20):
        save(tmp_path, iteration, 2, "flat")
    path = tmp_path / "checkpoints" / step_name(10) / file_name(1, "params")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    kept = [[entry.iteration for entry in opened(tmp_path, rank, 4, "flat").entries] for rank in range(4)]
    assert kept == [[10, 20], [20], [20], [20]]  # the second quarter ends behind the first half


def test_what_was_read_before_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10, 3, "flat")
    first = opened(tmp_path, 0, 2, "flat")
    monkeypatch.setattr("cpsr.checkpoint.history.check_in_pieces", lambda *_: pytest.fail("it is hashed again"))
    again = opened(tmp_path, 0, 2, "flat", first)
    assert again.known == first.known
    name = next(iter(SHAPES))
    assert torch.equal(again.read(name, 0, 0, again.numel(name)), whole(name, "param")[: again.numel(name)] + 10)


def test_operators_that_the_entry_has_not_whole_are_left_out(tmp_path: Path) -> None:
    save(tmp_path, 10, 2, "whole")
    slices = RankSlices.of(0, 3, shard(0, 3, cuts="whole"))
    larger = {name: one.model_copy(update={"numel": one.numel + 1}) for name, one in slices.operators.items()}
    history = DiskHistory(tmp_path / "checkpoints", RankSlices(0, 3, {**slices.operators, "c": larger["c"]}))
    assert set(history.operators) == set(SHAPES) - {"c"}


def test_without_slices_another_number_of_ranks_is_left_out(tmp_path: Path) -> None:
    save(tmp_path, 10, 1, "whole")
    assert not DiskHistory(tmp_path / "checkpoints", 1).entries
