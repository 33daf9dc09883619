"""Snapshots to host memory: due by the plan, skipped without waiting, and never silent."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_reader import load_memory_state
from cpsr.checkpoint.memory_removal import remove_memory_states
from cpsr.checkpoint.memory_states import memory_states
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.config import CPSRConfig
from cpsr.engines.torch import TorchAdapter
from cpsr.journal import RankJournal, open_journal
from cpsr.journal.reader import JournalReader
from cpsr.life.memory_snapshots import MemorySnapshots, Turns
from cpsr.planner.live.job_planner import JobPlanner
from cpsr.ranks.group import Group
from cpsr.state.shard import OperatorState, ParamSlice, Shard


def copied(shard: Shard) -> Shard:
    """Tensors of its own, of the same names and shapes."""
    operators = {
        name: OperatorState(
            name,
            ParamSlice(one.parameter.values.detach().clone(), one.parameter.global_shape, one.parameter.offset),
            {key: moment.detach().clone() for key, moment in one.moments.items()},
            one.iteration,
        )
        for name, one in shard.operators.items()
    }
    return Shard(operators, {name: values.clone() for name, values in shard.others.items()})


class Rank:
    """One rank's pool, and the snapshots that go into it."""

    def __init__(self, run_dir: Path, run_id: str, *, shared: bool = True) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 4)
        self.adapter = TorchAdapter(self.model, torch.optim.AdamW(self.model.parameters()))
        memory = SharedMemory(run_id, 0, 0) if shared else None
        self.pool = SnapshotPool(self.adapter.shard(), memory=memory)
        run_dir.mkdir(exist_ok=True)
        self.path = run_dir / "journal.db"
        self.journal: RankJournal = open_journal(run_dir, Group(), "exact")
        config = CPSRConfig.load({"run_dir": str(run_dir)})
        planner = JobPlanner(config, 0, 20, 0.999, list, lambda: None)
        self.turns = Turns(self.pool.occupancy, lambda: False, self.pool.occupancy.replicated)
        self.snapshots = MemorySnapshots(self.adapter, self.pool, self.journal, planner, self.turns, 0)

    def take(self, iteration: int, scalars: Any = None) -> None:
        turn = self.snapshots.turn(iteration)
        if turn is None:
            return
        self.snapshots.capture(iteration, turn, lambda: scalars or {"iteration": iteration})
        snapshot = self.pool.finish()
        if snapshot is not None:
            self.snapshots.complete(snapshot)

    def events(self) -> list[str]:
        self.journal.flush(10)
        with JournalReader(self.path) as reader:
            return [event.kind for event in reader.events()]


@pytest.fixture
def run_id() -> Iterator[str]:
    run_id = uuid4().hex[:8]
    yield run_id
    remove_memory_states(run_id)


def test_one_is_due_every_interval_and_none_without_one_or_shared_memory(tmp_path: Path, run_id: str) -> None:
    rank = Rank(tmp_path, run_id)
    assert [iteration for iteration in range(1, 5) if rank.snapshots.is_due(iteration, 3)] == [3, 4]
    rank.take(3)
    assert [iteration for iteration in range(4, 8) if rank.snapshots.is_due(iteration, 3)] == [6, 7]
    assert not rank.snapshots.is_due(7, None)
    rank.snapshots.restart(5)
    assert not rank.snapshots.is_due(7, 3)
    assert not Rank(tmp_path / "other", run_id, shared=False).snapshots.is_due(100, 3)


def test_a_snapshot_stays_in_memory_and_its_buffer_is_free(tmp_path: Path, run_id: str) -> None:
    rank = Rank(tmp_path, run_id)
    for iteration in range(1, 7):
        with torch.no_grad():
            rank.model.weight.fill_(iteration)
        rank.take(iteration)
    rank.pool.settle()
    assert rank.pool.occupancy.sealed_iterations == [4, 5, 6]
    assert (rank.snapshots.taken, rank.snapshots.skipped) == (6, 0)
    assert len(rank.snapshots.stalls_seconds) == 6
    newest = max(memory_states(run_id), key=lambda state: state.iteration)
    into = copied(rank.adapter.shard())
    assert load_memory_state(newest, into) == {"iteration": 6}
    weights = dict(into.tensors())["param/weight"]
    assert torch.equal(weights, torch.full_like(weights, 6.0))


def test_where_the_disk_has_the_other_buffers_snapshots_are_skipped_and_that_is_reported_once(
    tmp_path: Path, run_id: str
) -> None:
    rank = Rank(tmp_path, run_id)
    written = [rank.pool.acquire(iteration) for iteration in (1, 2)]
    rank.take(3)
    rank.pool.settle()
    for iteration in (4, 5):
        rank.take(iteration)
    assert (rank.snapshots.taken, rank.snapshots.skipped) == (1, 2)
    assert rank.pool.occupancy.sealed_iterations == [3]
    for one in written:
        assert one is not None
        rank.pool.release(one)
    rank.take(6)
    rank.snapshots.close()
    assert rank.events() == ["memory snapshot skipped", "memory snapshots skipped"]


def test_a_state_that_cannot_be_saved_is_reported_once_and_training_goes_on(tmp_path: Path, run_id: str) -> None:
    rank = Rank(tmp_path, run_id)
    for iteration in (1, 2):
        rank.take(iteration, {"object": object()})
    rank.take(3)
    assert rank.snapshots.taken == 1
    assert rank.events() == ["memory snapshot failed"]


def test_where_any_rank_has_no_buffer_free_all_wait_and_the_snapshot_stays_due(tmp_path: Path, run_id: str) -> None:
    rank = Rank(tmp_path, run_id)
    rank.take(2)
    rank.turns.read(3, blocked=True, busy=False)
    for iteration in (4, 5):
        rank.take(iteration)
        assert rank.snapshots.is_due(iteration, 2)
    assert (rank.snapshots.taken, rank.snapshots.skipped) == (1, 1)
    rank.turns.read(5, blocked=False, busy=False)
    rank.take(6)
    assert (rank.snapshots.taken, rank.snapshots.skipped) == (2, 1)
    assert rank.events() == ["memory snapshot skipped"]
