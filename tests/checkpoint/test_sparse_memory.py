"""Snapshots in host memory that leave out experts: what they hold of these is of the snapshot before, and says so."""

import pytest
import torch

from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.host_snapshot import Contents
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_states import MemoryState, load_states, verify_memory_state
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.state.shard import Shard
from tests.checkpoint.conftest import make_shard

NAMES = tuple(make_shard(0, SIZES := (700, 30, 5_000, 40_000)).operators)
EXPERTS = frozenset(NAMES[1:])
UNITS = {name: f"unit-{name}" for name in EXPERTS}


def only(*copied: str) -> Contents:
    """Everything that is no expert, and these experts."""
    return Contents.sparse(EXPERTS, frozenset(copied))


class Training:
    """A state that changes at every iteration, and its snapshots for host memory alone."""

    def __init__(self, run_id: str, buffers: int = 3) -> None:
        self.live = make_shard(0, SIZES)
        self.pool = SnapshotPool(self.live, buffers, SharedMemory(run_id, 0, 1), UNITS)
        self.history: dict[int, Shard] = {}
        self.seed = 0  # of this course of the training
        self.run_id = run_id

    def snapshot(self, iteration: int, contents: Contents | None = None) -> None:
        self.history[iteration] = make_shard(self.seed + iteration, SIZES, iteration)
        for (_, values), (_, wanted) in zip(self.live.tensors(), self.history[iteration].tensors(), strict=True):
            values.copy_(wanted)
        begun = self.pool.begin(self.live, iteration, {"at": iteration}, contents or Contents(), disk=contents is None)
        assert begun is not None
        assert self.pool.finish() is begun
        self.pool.settle()
        self.pool.release(begun)

    @property
    def newest(self) -> MemoryState:
        return max(Arena(self.run_id).list(), key=lambda state: state.iteration)

    def loaded(self) -> Shard:
        """What the newest state holds, once each operator is that of its own iteration, bit for bit."""
        state = self.newest
        assert verify_memory_state(state) is None
        found = make_shard(99, SIZES)
        assert load_states([state], found) == {"at": state.iteration}
        for name, operator in found.operators.items():
            wanted = self.history[operator.iteration].operators[name]
            assert torch.equal(operator.parameter.values, wanted.parameter.values), name
            for moment, values in operator.moments.items():
                assert torch.equal(values, wanted.moments[moment]), name
        for name, values in found.others.items():
            assert torch.equal(values, self.history[state.iteration].others[name])
        return found


def ages(shard: Shard) -> dict[str, int]:
    return {name: operator.iteration for name, operator in shard.operators.items()}


def test_each_snapshot_holds_the_newest_of_every_expert_whatever_buffer_it_takes(run_id: str) -> None:
    training, at = Training(run_id), dict.fromkeys(NAMES, 1)
    training.snapshot(1)
    for iteration in range(2, 12):
        copied = sorted(EXPERTS)[iteration % len(EXPERTS)]
        training.snapshot(iteration, only(copied))
        at |= {NAMES[0]: iteration, copied: iteration}
        assert ages(training.loaded()) == at
        assert training.newest.oldest_iteration == min(at.values())
    training.snapshot(12)
    assert set(ages(training.loaded()).values()) == {12}
    training.pool.close()


def test_a_second_snapshot_of_one_iteration_holds_it_too(run_id: str) -> None:
    """What it leaves out is of this iteration already, in another buffer."""
    training = Training(run_id)
    training.snapshot(1)
    training.snapshot(1, only(min(EXPERTS)))
    states = Arena(run_id).list()
    assert len(states) == 2
    for state in states:
        load_states([state], found := make_shard(99, SIZES))
        for name, operator in found.operators.items():
            assert torch.equal(operator.parameter.values, training.history[1].operators[name].parameter.values), name
    training.pool.close()


@pytest.mark.parametrize("buffers", [2, 3])
def test_after_a_rewind_no_expert_is_one_of_the_discarded_iterations(run_id: str, buffers: int) -> None:
    training = Training(run_id, buffers)
    training.snapshot(8)
    for iteration in (9, 10, 11):
        training.snapshot(iteration, only(*EXPERTS))
    training.pool.forget_after(8)
    training.seed = 100
    for iteration in (9, 10):
        training.snapshot(iteration, only(*EXPERTS))
    training.snapshot(11, only(min(EXPERTS)))
    assert ages(training.loaded()) == dict.fromkeys(NAMES, 10) | dict.fromkeys((NAMES[0], min(EXPERTS)), 11)
    training.pool.close()
