"""The triple buffer: isolation, coalescing, exhaustion, pinning, experts that are taken over."""

import threading
import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from cpsr.checkpoint.buffers import HostBuffer, plan_spans
from cpsr.checkpoint.memory import HeldState, SharedMemory, held_states, load_held, remove_held
from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool
from cpsr.checkpoint.sparse import Sparse
from cpsr.errors import SaveError, UnsupportedEngineError
from cpsr.state import OperatorState, ParamSlice, Shard
from tests.checkpoint.conftest import assert_same_bits, make_shard


def test_a_snapshot_is_bitwise_and_isolated_from_later_changes() -> None:
    shard = make_shard(3, iteration=7)
    pool = SnapshotPool(make_shard(0))
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


def test_buffers_outside_the_optimizer_are_copied_before_begin_returns() -> None:
    shard, pool = make_shard(3), SnapshotPool(make_shard(0))
    assert pool.begin(shard, 1, None) is not None
    for tensor in shard.others.values():
        tensor.zero_()
    snapshot = pool.finish()
    assert snapshot is not None
    assert_same_bits(snapshot.shard, make_shard(3))


def test_operators_carry_the_iteration_they_were_taken_at() -> None:
    shard, pool = make_shard(3, iteration=5), SnapshotPool(make_shard(0))
    name = next(iter(shard.operators))
    old = shard.operators[name]
    shard.operators[name] = OperatorState(name, old.parameter, old.moments, 2)
    pool.begin(shard, 5, None)
    snapshot = pool.finish()
    assert snapshot is not None
    assert [operator.iteration for operator in snapshot.shard.operators.values()] == [2, 5, 5]


def test_flat_partitions_are_one_copy_each() -> None:
    shard = make_shard(1, sizes=(100,) * 50)
    buffer = HostBuffer(shard, pinned=False)
    assert len(plan_spans(buffer, shard)) == 3  # weights and two moments, not 150
    separate = Shard(
        {
            name: OperatorState(name, ParamSlice(torch.ones(100), (100,)), {"m": torch.ones(100)}, 0)
            for name in map(str, range(50))
        }
    )
    assert len(plan_spans(HostBuffer(separate, pinned=False), separate)) == 100


def test_a_shard_that_moved_in_memory_is_read_from_its_new_place() -> None:
    pool = SnapshotPool(make_shard(0))
    for seed in (1, 2, 3, 4):
        pool.begin(make_shard(seed), seed, None)
        snapshot = pool.finish()
        assert snapshot is not None
        assert_same_bits(snapshot.shard, make_shard(seed))
        pool.release(snapshot)


def test_mixed_types_strides_and_empty_tensors() -> None:
    flat = torch.randn(64)
    operators = {
        "strided": OperatorState("strided", ParamSlice(flat[::2], (32,)), {"exp_avg": flat[1::2]}, 0),
        "half": OperatorState("half", ParamSlice(torch.randn(3).half(), (3,)), {"n": torch.arange(3)}, 0),
        "empty": OperatorState("empty", ParamSlice(torch.empty(0), (9,), 9), {}, 0),
    }
    shard = Shard(operators, {"transposed": torch.randn(4, 5).t(), "flag": torch.tensor(True)})
    pool = SnapshotPool(shard)
    pool.begin(shard, 1, None)
    snapshot = pool.finish()
    assert snapshot is not None
    assert_same_bits(snapshot.shard, shard)


def test_no_free_buffer_is_none_and_does_not_block() -> None:
    shard, pool = make_shard(), SnapshotPool(make_shard(), buffers=2)
    held = []
    for iteration in (1, 2):
        assert pool.begin(shard, iteration, None) is not None
        held.append(pool.finish())
    assert pool.begin(shard, 3, None) is None
    assert pool.finish() is None
    assert pool.acquire(3) is None
    assert held[0] is not None
    pool.release(held[0])
    assert pool.begin(shard, 4, None) is not None


def test_keep_moves_the_recovery_buffer_and_pin_holds_it() -> None:
    shard, pool = make_shard(), SnapshotPool(make_shard())
    first, second, third = (pool.acquire(iteration) for iteration in (1, 2, 3))
    assert first is not None
    assert second is not None
    assert third is not None
    pool.keep(first)
    assert pool.recovery is first
    pool.keep(second)
    assert pool.recovery is second
    assert pool.begin(shard, 4, None) is not None  # the first one's buffer is free again
    fourth = pool.finish()
    pool.pin()
    pool.keep(third)
    assert pool.recovery is second
    with pytest.raises(ValueError, match="pinned"):
        pool.release(second)
    with pytest.raises(ValueError, match="holds no buffer"):
        pool.release(third)  # keep() freed it
    pool.unpin()
    assert fourth is not None
    pool.keep(fourth)
    assert pool.recovery is fourth
    pool.release(fourth)
    assert pool.recovery is None
    with pytest.raises(ValueError, match=r"without pin\(\)"):
        pool.unpin()


def test_misuse_is_said() -> None:
    shard, pool = make_shard(), SnapshotPool(make_shard())
    snapshot = pool.begin(shard, 1, None)
    assert snapshot is not None
    with pytest.raises(ValueError, match="finish"):
        pool.release(snapshot)
    with pytest.raises(SaveError, match="iteration 1 was not finished"):
        pool.begin(shard, 2, None)
    pool.finish()
    pool.release(snapshot)
    with pytest.raises(ValueError, match="holds no buffer"):
        pool.release(snapshot)
    with pytest.raises(UnsupportedEngineError, match="set"):
        pool.begin(shard, 3, {"user": {1, 2}})
    assert len([pool.acquire(iteration) for iteration in range(3)]) == 3


@pytest.mark.parametrize("change", ["missing", "new", "shape", "dtype"])
def test_a_shard_unlike_the_template_is_a_save_error_that_frees_the_buffer(change: str) -> None:
    pool, shard = SnapshotPool(make_shard(), buffers=1), make_shard()
    name = list(shard.operators)[2]
    operator = shard.operators.pop(name)
    if change == "new":
        shard.operators.update({name: operator, "new": OperatorState("new", operator.parameter, {}, 0)})
    elif change != "missing":
        values = operator.parameter.values
        values = values[:7] if change == "shape" else values.double()
        shard.operators[name] = OperatorState(name, ParamSlice(values, (9,)), operator.moments, 0)
    assert pool.begin(shard, 1, None) is not None
    with pytest.raises(SaveError, match=r"iteration 1 failed.*(param|moment/\w+)/"):
        pool.finish()
    assert pool.begin(make_shard(), 2, None) is not None
    pool.finish()


def test_other_buffers_unlike_the_template_are_refused_at_once() -> None:
    pool, shard = SnapshotPool(make_shard(), buffers=1), make_shard()
    shard.others["mask"] = torch.ones(5)
    with pytest.raises(SaveError, match="other/mask"):
        pool.begin(shard, 1, None)
    del shard.others["mask"]
    with pytest.raises(SaveError, match="outside the optimizer"):
        pool.begin(shard, 1, None)
    assert pool.acquire(1) is not None


def test_required_bytes_is_what_the_buffers_take() -> None:
    shard = make_shard()
    assert 0 <= SnapshotPool.required_bytes(shard) - 3 * shard.state_bytes <= 3 * 64 * len(list(shard.tensors()))


def test_parameters_that_require_gradients_can_be_copied() -> None:
    parameter = torch.nn.Parameter(torch.randn(8))
    shard = Shard({"w": OperatorState("w", ParamSlice(parameter.view(-1), (8,)), {}, 0)}, {"p": parameter})
    pool = SnapshotPool(shard)
    pool.begin(shard, 1, None)
    snapshot = pool.finish()
    assert snapshot is not None
    assert torch.equal(snapshot.shard.operators["w"].parameter.values, parameter.detach())
    assert not snapshot.shard.others["p"].requires_grad


def test_buffers_are_freed_from_other_threads_while_snapshots_go_on() -> None:
    pool, shard = SnapshotPool(make_shard()), make_shard(5)
    threads = []
    taken = 0
    for iteration in range(200):
        if pool.begin(shard, iteration, None) is None:
            continue
        taken += 1
        snapshot = pool.finish()
        assert snapshot is not None
        threads.append(threading.Thread(target=pool.keep, args=(snapshot,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert taken > 0
    assert pool.recovery is not None
    assert_same_bits(pool.recovery.shard, make_shard(5))
    assert pool.acquire(1) is not None
    assert pool.acquire(2) is not None
    assert pool.acquire(3) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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


# Three experts beside one operator that every token passes.
SIZES = (5, 300, 7, 41)
DENSE, *EXPERTS = make_shard(sizes=SIZES).operators
FIRST, SECOND, THIRD = ([name] for name in EXPERTS)


def state(iteration: int) -> Shard:
    """The whole training state there; all else follows from it."""
    return make_shard(iteration, SIZES, iteration)


def taken(pool: SnapshotPool, iteration: int, copied: Iterable[str]) -> Snapshot:
    """A snapshot that copies these experts; none goes to the disk."""
    sparse = Sparse(frozenset(EXPERTS), frozenset(), frozenset(copied))
    assert pool.begin(state(iteration), iteration, {"step": iteration}, "whole", sparse) is not None
    snapshot = pool.finish()
    assert snapshot is not None
    return snapshot


def assert_as_it_was(shard: Shard, iteration: int, ages: dict[str, int]) -> None:
    """Every operator, with its moments, as it was when it says that it was taken."""
    assert {name: one.iteration for name, one in shard.operators.items()} == {DENSE: iteration, **ages}
    for name, one in shard.operators.items():
        assert_same_bits(Shard({name: one}), Shard({name: state(one.iteration).operators[name]}))
    assert_same_bits(Shard({}, shard.others), Shard({}, state(iteration).others))


def ages(*iterations: int) -> dict[str, int]:
    return dict(zip(EXPERTS, iterations, strict=True))


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    name = f"test-{uuid.uuid4().hex}"
    yield SharedMemory(name, 0, 1)
    remove_held(name)


def held(memory: SharedMemory, iteration: int) -> HeldState | None:
    found = [one for one in held_states(memory._run_id) if one.iteration == iteration]
    return found[0] if found else None


def test_experts_that_are_not_copied_are_taken_over_as_they_were(memory: SharedMemory) -> None:
    pool = SnapshotPool(state(0), memory=memory)
    first = taken(pool, 1, FIRST)  # there is nothing to take over from
    assert first.not_copied == frozenset()
    second = taken(pool, 2, FIRST)
    assert second.copied_bytes == sum(3 * 4 * SIZES[place] for place in (0, 1))
    pool.release(first)
    third = taken(pool, 3, [*SECOND])
    pool.close(remove=False)
    assert_as_it_was(first.shard, 1, ages(1, 1, 1))
    assert_as_it_was(second.shard, 2, ages(2, 1, 1))
    assert_as_it_was(third.shard, 3, ages(2, 3, 1))
    for iteration, kind, expected in (1, "snapshot", (1, 1, 1)), (2, "mixed", (2, 1, 1)), (3, "mixed", (2, 3, 1)):
        found, into = held(memory, iteration), state(0)
        assert found is not None
        assert found.kind == kind
        assert load_held(found, into)["step"] == iteration
        assert_as_it_was(into, iteration, ages(*expected))


def test_what_is_all_taken_over_is_not_of_its_iteration(memory: SharedMemory) -> None:
    """A rank that trains experts alone, none of which is copied now: they have one age, and it is another."""
    pool, everything = SnapshotPool(state(0), memory=memory), frozenset([DENSE, *EXPERTS])
    for iteration, copied in (1, None), (2, frozenset[str]()):
        pool.begin(state(iteration), iteration, {}, "whole", Sparse(everything, frozenset(), copied))
        pool.finish()
    pool.close(remove=False)
    kinds = [(found.iteration, found.kind) for found in map(partial(held, memory), (1, 2)) if found is not None]
    assert kinds == [(1, "snapshot"), (2, "mixed")]


def test_nobody_waits_until_they_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, may_go = SnapshotPool(state(0)), threading.Event()
    first = taken(pool, 1, EXPERTS)
    original = SnapshotPool._take_over

    def slow(pool: SnapshotPool, *arguments: Any) -> None:
        assert may_go.wait(10.0)
        original(pool, *arguments)

    monkeypatch.setattr(SnapshotPool, "_take_over", slow)
    second = taken(pool, 2, SECOND)
    assert second.shard.operators.keys() == {DENSE, *SECOND}
    assert pool.source_iteration == 2
    # Neither the buffer that they are in nor the one that they go to is taken for something else.
    pool.release(first)
    pool.release(second)
    assert pool.acquire(9) is not None
    assert pool.acquire(9) is None
    may_go.set()
    pool._settle()
    assert_as_it_was(second.shard, 2, ages(1, 2, 1))
    assert pool.acquire(9) is not None


def test_nothing_comes_from_a_state_that_was_given_up(memory: SharedMemory) -> None:
    pool = SnapshotPool(state(0), memory=memory)
    pool.release(taken(pool, 1, EXPERTS))
    pool.release(taken(pool, 5, FIRST))
    pool.forget_after(3)
    assert pool.source_iteration is None
    assert held(memory, 5) is None
    again = taken(pool, 4, FIRST)
    pool.close(remove=False)
    assert_as_it_was(again.shard, 4, ages(4, 4, 4))


def test_where_only_the_buffer_is_free_that_has_them_all_are_copied() -> None:
    pool = SnapshotPool(state(0), buffers=1)
    pool.release(taken(pool, 1, EXPERTS))
    assert_as_it_was(taken(pool, 2, FIRST).shard, 2, ages(2, 2, 2))


def test_a_copy_that_failed_is_no_source(memory: SharedMemory) -> None:
    pool, broken = SnapshotPool(state(0), memory=memory), state(2)
    pool.release(taken(pool, 1, EXPERTS))
    del broken.operators[EXPERTS[0]].moments["exp_avg"]
    sparse = Sparse(frozenset(EXPERTS), frozenset(), frozenset(FIRST))
    assert pool.begin(broken, 2, None, "whole", sparse) is not None
    with pytest.raises(SaveError, match="iteration 2 failed"):
        pool.finish()
    third = taken(pool, 3, FIRST)
    pool.close(remove=False)
    assert_as_it_was(third.shard, 3, ages(3, 1, 1))
    assert held(memory, 2) is None


def test_a_snapshot_that_stayed_without_them_does_not_count(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = SnapshotPool(state(0), memory=memory)
    first = taken(pool, 1, EXPERTS)
    pool._settle()
    first.shard.operators.pop(EXPERTS[2])
    second = taken(pool, 2, FIRST)
    third = taken(pool, 3, FIRST)  # perhaps begun before it showed; then it lacks them, too
    pool._settle()
    assert held(memory, 2) is None
    assert "experts could not be taken over: that of iteration 1 lacks" in caplog.text
    assert (held(memory, 3) is None) == (EXPERTS[2] not in third.shard.operators)
    pool.release(first)
    pool.release(second)
    fourth = taken(pool, 4, FIRST)
    pool.close()
    assert_as_it_was(fourth.shard, 4, ages(4, 4, 4) if third.not_copied else ages(4, 3, 3))


@pytest.mark.parametrize("finished", [False, True])
def test_what_a_rank_leaves_has_all_experts_of_its_own_iteration(memory: SharedMemory, finished: bool) -> None:
    """Also where a snapshot of the same iteration has older ones, and its source has the buffer that is needed."""
    live = Shard(state(2).operators, state(2).others)
    pool = SnapshotPool(live, memory=memory)
    pool.keep(taken(pool, 1, EXPERTS))
    assert pool.acquire(0) is not None
    sparse = Sparse(frozenset(EXPERTS), frozenset(), frozenset(FIRST))
    running = pool.begin(live, 2, {}, "whole", sparse)
    assert running is not None
    if finished:
        pool.finish()
        pool._settle()
    pool.mark_boundary()
    pool.dump(live, 2, {})
    if not finished:
        assert pool.finish() is running
        pool._settle()
        assert running.shard.operators.keys() == {DENSE, *FIRST}  # it goes to the disk, and is not whole
    kinds = {one.kind: one for one in held_states(memory._run_id) if one.iteration == 2}
    assert kinds.keys() == ({"departure", "mixed"} if finished else {"departure"})
    into = state(0)
    load_held(kinds["departure"], into)
    assert_as_it_was(into, 2, ages(2, 2, 2))
    pool.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_not_copied_from_a_device_is_taken_over_on_the_host(memory: SharedMemory) -> None:
    def on_device(shard: Shard) -> Shard:
        operators = {
            name: OperatorState(
                name,
                ParamSlice(one.parameter.values.cuda(), one.parameter.global_shape, one.parameter.offset),
                {moment: values.cuda() for moment, values in one.moments.items()},
                one.iteration,
            )
            for name, one in shard.operators.items()
        }
        return Shard(operators, {name: values.cuda() for name, values in shard.others.items()})

    pool = SnapshotPool(on_device(state(0)), memory=memory)
    for iteration, copied, expected in (1, EXPERTS, (1, 1, 1)), (2, FIRST, (2, 1, 1)), (3, SECOND, (2, 3, 1)):
        sparse = Sparse(frozenset(EXPERTS), frozenset(), frozenset(copied))
        assert pool.begin(on_device(state(iteration)), iteration, {"step": iteration}, "whole", sparse) is not None
        snapshot = pool.finish()
        assert snapshot is not None
        pool._settle()
        assert_as_it_was(snapshot.shard, iteration, ages(*expected))
        pool.release(snapshot)
    pool.close()


class Snapshots(RuleBasedStateMachine):
    """Whatever comes, each operator is as it was when it was taken, and none is of a state that was given up."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SnapshotPool(state(0))
        self.iteration = self.begins = 0
        self.held: list[Snapshot] = []

    def begin(self, live: Shard, copied: set[str]) -> Snapshot | None:
        sparse = Sparse(frozenset(EXPERTS), frozenset(), frozenset(copied))
        return self.pool.begin(live, self.iteration, None, "whole", sparse)

    @rule(copied=st.sets(st.sampled_from(EXPERTS)), then=st.sampled_from(["keep", "release", "hold"]))
    def snapshot(self, copied: set[str], then: str) -> None:
        self.iteration += 1
        begun = self.begin(state(self.iteration), copied)
        if begun is None:
            self.pool.release(self.held.pop(0))
            return
        assert self.pool.finish() is begun
        self.held.append(begun)
        self.check()
        if then == "keep":
            self.pool.keep(begun)
        elif then == "release":
            self.pool.release(begun)
        if then != "hold":
            self.held.remove(begun)

    @rule(copied=st.sets(st.sampled_from(EXPERTS)))
    def failure(self, copied: set[str]) -> None:
        self.iteration += 1
        live = state(self.iteration)
        del live.operators[DENSE].moments["exp_avg"]
        if self.begin(live, copied) is not None:
            with pytest.raises(SaveError):
                self.pool.finish()

    @rule()
    def other_use(self) -> None:
        acquired = self.pool.acquire(0)
        if acquired is not None:
            for _, values in acquired.shard.tensors():
                values.zero_()
            self.pool.release(acquired)

    @rule()
    def going_back(self) -> None:
        self.begins = self.iteration
        self.pool.forget_after(-1)

    def check(self) -> None:
        self.pool._settle()
        for one in self.held:
            assert_as_it_was(one.shard, one.iteration, {name: one.shard.operators[name].iteration for name in EXPERTS})
        newest = self.held[-1]
        assert all(self.begins < one.iteration <= newest.iteration for one in newest.shard.operators.values())
        assert newest.iteration == self.pool.source_iteration

    def teardown(self) -> None:
        self.pool.close()


TestSnapshots = Snapshots.TestCase
TestSnapshots.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)
