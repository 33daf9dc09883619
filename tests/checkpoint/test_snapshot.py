"""The triple buffer: isolation, coalescing, exhaustion, pinning."""

import gc
import weakref
from contextlib import suppress

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool
from cpsr.errors import UnsupportedEngineError
from cpsr.state.shard import OperatorState, ParamSlice, Shard
from tests.checkpoint.conftest import assert_same_bits, live_shard, make_shard
from tests.device import DEVICE, cuda_only


def test_a_snapshot_is_bitwise_and_isolated_from_later_changes() -> None:
    shard = live_shard(3, iteration=7)
    pool = SnapshotPool(live_shard(0))
    rng = torch.arange(4)
    snapshot = pool.begin(shard, 7, {"rng": rng, "step": 7})
    rng.zero_()
    assert snapshot is not None
    assert pool.finish() is snapshot
    for _, tensor in shard.tensors():
        tensor.zero_()
    assert_same_bits(snapshot.shard, make_shard(3))
    assert snapshot.scalars["rng"].tolist() == [0, 1, 2, 3]
    assert {operator.iteration for operator in snapshot.shard.operators.values()} == {7}
    assert snapshot.stall_seconds > 0
    assert snapshot.copy_seconds > 0
    pool.close()


def test_mixed_types_strides_and_empty_tensors() -> None:
    flat, half, count = torch.randn(64).to(DEVICE), torch.randn(3).half().to(DEVICE), torch.arange(3).to(DEVICE)
    operators = {
        "strided": OperatorState("strided", ParamSlice(flat[::2], (32,)), {"exp_avg": flat[1::2]}, 0),
        "half": OperatorState("half", ParamSlice(half, (3,)), {"n": count}, 0),
        "empty": OperatorState("empty", ParamSlice(torch.empty(0, device=DEVICE), (9,), 9), {}, 0),
    }
    others = {"transposed": torch.randn(4, 5).to(DEVICE).t(), "flag": torch.tensor(True).to(DEVICE)}
    shard = Shard(operators, others)
    pool = SnapshotPool(shard)
    pool.begin(shard, 1, None)
    snapshot = pool.finish()
    assert snapshot is not None
    assert_same_bits(snapshot.shard, shard)


def copy_to_its_end(pool: SnapshotPool, shard: Shard, iteration: int) -> bool:
    """Whether a buffer was free. What differs from the template is an error of the begin on a GPU, else of the end."""
    begun = pool.begin(shard, iteration, None) is not None
    if begun:
        pool.finish()
    return begun


@pytest.mark.parametrize("change", ["missing", "new", "shape", "dtype"])
def test_a_shard_unlike_the_template_is_a_save_error_that_frees_the_buffer(change: str) -> None:
    pool, shard = SnapshotPool(live_shard(), buffers=1), live_shard()
    name = list(shard.operators)[2]
    operator = shard.operators.pop(name)
    if change == "new":
        shard.operators.update({name: operator, "new": OperatorState("new", operator.parameter, {}, 0)})
    elif change != "missing":
        values = operator.parameter.values
        values = values[:7] if change == "shape" else values.double()
        shard.operators[name] = OperatorState(name, ParamSlice(values, (9,)), operator.moments, 0)
    with pytest.raises(UnsupportedEngineError, match=r"has changed since .*: (param|moment/\w+)/"):
        copy_to_its_end(pool, shard, 1)
    assert pool.begin(live_shard(), 2, None) is not None
    pool.finish()


@cuda_only("a copy stream and pinned memory need a GPU")
def test_device_tensors_are_copied_on_their_own_stream_into_pinned_memory() -> None:
    values = torch.randn(1 << 20)
    shard = Shard({"w": OperatorState("w", ParamSlice(values.cuda(), (1 << 20,)), {}, 0)}, {"b": torch.ones(3).cuda()})
    pool = SnapshotPool(shard)
    pool.begin(shard, 1, None)
    shard.others["b"].zero_()
    snapshot = pool.finish()
    assert snapshot is not None
    assert snapshot.shard.operators["w"].parameter.values.is_pinned()
    assert torch.equal(snapshot.shard.operators["w"].parameter.values, values)
    assert snapshot.shard.others["b"].tolist() == [1, 1, 1]


def state(iteration: int) -> Shard:
    """The whole training state there; all else follows from it."""
    return live_shard(iteration, iteration=iteration)


class Snapshots(RuleBasedStateMachine):
    """Whatever comes, a snapshot that is in use stays as it was when it was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SnapshotPool(state(0))
        self.iteration = 0
        self.taken: list[Snapshot] = []

    @rule(then=st.sampled_from(["release", "hold"]))
    def snapshot(self, then: str) -> None:
        self.iteration += 1
        begun = self.pool.begin(state(self.iteration), self.iteration, None)
        if begun is None:
            self.pool.release(self.taken.pop(0))
            return
        assert self.pool.finish() is begun
        if then == "release":
            self.pool.release(begun)
        else:
            self.taken.append(begun)

    @rule()
    def failure(self) -> None:
        self.iteration += 1
        live = state(self.iteration)
        del next(iter(live.operators.values())).moments["exp_avg"]
        with suppress(UnsupportedEngineError):
            assert not copy_to_its_end(self.pool, live, self.iteration)

    @rule()
    def other_use(self) -> None:
        acquired = self.pool.acquire(0)
        if acquired is not None:
            for _, values in acquired.shard.tensors():
                values.zero_()
            self.pool.release(acquired)

    @invariant()
    def as_they_were(self) -> None:
        for one in self.taken:
            assert_same_bits(one.shard, state(one.iteration))
            assert {operator.iteration for operator in one.shard.operators.values()} == {one.iteration}

    def teardown(self) -> None:
        self.pool.close()


TestSnapshots = Snapshots.TestCase
TestSnapshots.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)


def test_no_buffer_keeps_the_moments_that_the_optimizer_has_replaced() -> None:
    pool = SnapshotPool(live_shard(0))

    def take(shard: Shard) -> list[weakref.ref[torch.Tensor]]:
        for iteration in (1, 2, 3):
            snapshot = pool.begin(shard, iteration, {})
            assert snapshot is not None
            pool.finish()
            pool.release(snapshot)
        return [weakref.ref(one) for operator in shard.operators.values() for one in operator.moments.values()]

    replaced = take(live_shard(1))
    snapshot = pool.begin(live_shard(2), 4, {})
    assert snapshot is not None
    pool.finish()
    gc.collect()
    assert all(moment() is None for moment in replaced)
    pool.close()
