"""Snapshots and dumps of state on a GPU: their order, that nothing waits for what hangs, and memory that is pinned."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cpsr.checkpoint import boundary as boundaries
from cpsr.checkpoint import snapshot as snapshots
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.boundary import EarlierStep, WriteWatch
from cpsr.checkpoint.device import Pinning
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_states import SHARED_MEMORY, load_states
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.errors import SaveError, UnsupportedEngineError
from cpsr.state.device_values import DeviceNumber
from cpsr.state.shard import OperatorState, ParamSlice, Shard
from tests.checkpoint.conftest import assert_same_bits, make_shard
from tests.stand_in_device import OUT_OF_MEMORY, StandInDevice, StandInEvent, stand_in_device

WAITS = ("synchronize",)  # calls in which the host waits for the device
CUDA = torch.device("cuda", 1)


@pytest.fixture
def device() -> Iterator[StandInDevice]:
    with stand_in_device(2) as made:
        yield made


def shard_on(
    device: StandInDevice, seed: int = 3, index: int = 0, *, weights: bool = True, iteration: int = 0
) -> Shard:
    """`make_shard` in the memory of a device; with weights on the host, only its buffers."""
    host = make_shard(seed, iteration=iteration)
    operators = (
        host.operators
        if not weights
        else {
            name: OperatorState(
                name,
                ParamSlice(
                    device.tensor(one.parameter.values, index), one.parameter.global_shape, one.parameter.offset
                ),
                {moment: device.tensor(values, index) for moment, values in one.moments.items()},
                one.iteration,
            )
            for name, one in host.operators.items()
        }
    )
    return Shard(operators, {name: device.tensor(values, index) for name, values in host.others.items()})


def pool_of(device: StandInDevice, run_id: str, shard: Shard) -> SnapshotPool:
    pool = SnapshotPool(shard, memory=SharedMemory(run_id, 0, 0))
    assert pool.shared_memory_problem is None
    device.trace.clear()
    return pool


def overwrite(shard: Shard) -> None:
    """What the next step does."""
    for _, tensor in shard.tensors():
        tensor.zero_()


def names(device: StandInDevice, *kinds: str) -> list[tuple[str, str | None]]:
    return [(kind, stream) for kind, stream, _ in device.calls(*kinds)]


def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "BOUNDARY_SECONDS", 0.2)
    monkeypatch.setattr(snapshots, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr("cpsr.checkpoint.buffers.IDLE_SECONDS", 0.1)


def close(device: StandInDevice, pool: SnapshotPool) -> None:
    """Let the device do its work at once from here on: a pool that closes waits for it."""
    device.complete()
    device.at_once = True
    pool.close()


def test_a_snapshot_is_of_its_step_whatever_the_next_forward_does(device: StandInDevice, run_id: str) -> None:
    shard = shard_on(device)
    count = device.tensor(torch.tensor(7.0))
    pool = pool_of(device, run_id, shard)
    device.at_once = False
    begun = pool.begin(shard, 7, {"step": DeviceNumber(count), "rng": torch.arange(3)})
    assert device.calls(*WAITS) == [], "begin returns while the device has done nothing"
    for buffer in shard.others.values():
        buffer.zero_()
    count.add_(1)
    assert pool.finish() is begun
    assert begun is not None
    assert_same_bits(begun.shard, make_shard(3))
    assert begun.scalars["step"] == 7.0
    assert type(begun.scalars["step"]) is float
    close(device, pool)


def test_the_copy_follows_the_step_and_nothing_is_sealed_before_it(device: StandInDevice, run_id: str) -> None:
    shard = shard_on(device)
    pool = pool_of(device, run_id, shard)
    device.at_once = False
    pool.begin(shard, 7, {})
    copies = {stream for kind, stream, what in device.trace if what == "copy_d2h" and stream != "default:0"}
    assert len(copies) == 1
    first = next(i for i, (kind, stream, _) in enumerate(device.trace) if kind == "launch" and stream in copies)
    waited = next(i for i, (kind, stream, _) in enumerate(device.trace) if kind == "wait_event" and stream in copies)
    event = device.trace[waited][2]
    recorded = device.trace.index(("record", "default:0", event))
    assert recorded < waited < first
    assert Arena(run_id).list() == []
    pool.finish()
    device.complete()
    device.at_once = True
    pool.close(remove=False)
    (state,) = Arena(run_id).list()
    into = make_shard(0)
    load_states([state], into)
    assert_same_bits(into, make_shard(3))


def test_the_boundary_is_that_of_the_devices_own_stream(device: StandInDevice, run_id: str) -> None:
    """As in a script that never called `set_device`: the current device is another."""
    shard = shard_on(device, index=1)
    pool = pool_of(device, run_id, shard)
    assert torch.cuda.current_device() == 0
    pool.mark_boundary()
    assert {stream for kind, stream, _ in device.calls("record")} == {"default:1"}
    device.trace.clear()
    pool.begin(shard, 7, {"step": DeviceNumber(device.tensor(torch.tensor(7.0), 1))})
    pool.finish()
    assert {stream for _, stream in names(device, "record", "launch", "wait_event")} == {"default:1", "stream1:1"}
    close(device, pool)
    assert all(stream is None or stream.endswith(":1") for _, stream, _ in device.trace)


def test_state_on_two_devices_is_refused_by_name(device: StandInDevice) -> None:
    shard, other = shard_on(device), shard_on(device, index=1)
    last = list(shard.operators)[-1]
    shard.operators[last] = other.operators[last]
    with pytest.raises(UnsupportedEngineError, match=r"is on cuda:0 and 'param/layers.2/weight é' on cuda:1"):
        SnapshotPool(shard)


def test_a_dump_is_of_the_boundary_while_the_next_step_hangs(device: StandInDevice, run_id: str) -> None:
    shard = shard_on(device, iteration=20)
    count = device.tensor(torch.tensor(20.0))
    pool = pool_of(device, run_id, shard)
    pool.mark_boundary()
    device.hang()
    for buffer in shard.others.values():
        buffer.zero_()  # by the forward that hangs
    thread = threading.Thread(target=pool.dump, args=(lambda: shard, 20, lambda: {"step": DeviceNumber(count)}))
    thread.start()
    thread.join(30)
    (state,) = Arena(run_id).list()
    into = make_shard(0)
    assert load_states([state], into) == {"step": 20.0}
    assert_same_bits(into, make_shard(3))


def test_a_dump_of_a_step_that_hangs_is_refused_in_time_and_names_what_remains(
    device: StandInDevice, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short(monkeypatch)
    shard = shard_on(device)
    pool = pool_of(device, run_id, shard)
    assert pool.begin(shard, 12, {}) is not None
    kept = pool.finish()
    assert kept is not None
    pool.release(kept)
    device.hang()
    pool.mark_boundary()
    device.trace.clear()

    def never() -> Any:
        raise AssertionError("the state was read before the device was there")

    started = time.monotonic()
    with pytest.raises(SaveError, match=r"not finished the step within 0\.2 s; .* keeps the snapshot of iteration 12"):
        pool.dump(never, 20, never)
    assert time.monotonic() - started < 5.0
    assert device.calls(*WAITS) == []
    assert [state.iteration for state in Arena(run_id).list()] == [12]


@pytest.fixture(params=[boundaries.SMALL_BYTES, 0], ids=["small buffers", "large buffers"])
def small_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(boundaries, "SMALL_BYTES", request.param)
    given: int = request.param
    return given


def ahead(device: StandInDevice, pool: SnapshotPool, shard: Shard, count: torch.Tensor, changed: bool) -> None:
    """The host at step 24, the device in the backward of it: as where plain torch trains over NCCL."""
    for _ in range(2 if changed else 1):  # the first copy of a large buffer is that of its first change
        for buffer in shard.others.values():
            buffer.add_(0) if buffer.dtype != torch.bool else buffer.zero_()
        pool.mark_boundary()
    for (_, buffer), values in zip(shard.others.items(), make_shard(3).others.values(), strict=True):
        buffer.copy_(device.tensor(values))
    pool.mark_boundary()
    for buffer in shard.others.values():
        buffer.zero_()  # by the forward of step 24, which the device has run
    device.hang()
    overwrite(shard)
    count.zero_()
    pool.mark_boundary()
    for buffer in shard.others.values():
        buffer.fill_(1)


def test_a_dump_is_of_the_last_step_on_the_device_while_the_host_is_ahead(
    device: StandInDevice, run_id: str, small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    short(monkeypatch)
    shard = shard_on(device, iteration=24)
    count = device.tensor(torch.tensor(23.0))
    pool = pool_of(device, run_id, shard)
    ahead(device, pool, shard, count, changed=True)
    device.trace.clear()
    small = {"step": DeviceNumber(count), "iteration": 23}

    def newest() -> Any:
        raise AssertionError("the small state is of the step that hangs")

    assert pool.dump(lambda: shard, 24, newest, lambda: EarlierStep(23, 3, small, lambda: False)) == 23
    assert device.calls(*WAITS) == []
    (state,) = Arena(run_id).list()
    assert (state.iteration, state.kind) == (23, "departure")
    into = make_shard(0)
    assert load_states([state], into) == {"step": 23.0, "iteration": 23}
    assert_same_bits(into, make_shard(3))
    assert {one.iteration for one in into.operators.values()} == {23}


def test_a_snapshot_that_waits_behind_what_hangs_does_not_keep_its_step_from_the_dump(
    device: StandInDevice, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as an evaluation between the step and the next batch, where the snapshot begins."""
    short(monkeypatch)
    shard = shard_on(device, iteration=20)
    pool = pool_of(device, run_id, shard)
    pool.mark_boundary()
    device.hang()
    assert pool.begin(shard, 20, {"all": True}) is not None
    pool.dump(lambda: shard, 20, lambda: {"all": False})
    (state,) = Arena(run_id).list()
    assert (state.iteration, state.kind) == (20, "departure")


def test_closing_leaves_alone_what_the_device_may_still_write(
    device: StandInDevice, run_id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    short(monkeypatch)
    shard = shard_on(device)
    pool = pool_of(device, run_id, shard)
    device.hang()
    assert pool.begin(shard, 7, {}) is not None
    registered = dict(device.runtime.registered)
    assert len(registered) == 3
    pool.close()
    assert device.runtime.registered == registered, "what is registered stays mapped"
    assert device.calls(*WAITS) == []
    assert "1 of 3 buffers stay locked" in caplog.text
    again = SnapshotPool(make_shard(0), memory=SharedMemory(run_id, 0, 1, wait_seconds=0.1))
    assert again.shared_memory_problem is not None, "no other life gets the memory"


def test_after_a_kernel_has_failed_a_dump_says_so(
    device: StandInDevice, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = shard_on(device)
    pool = pool_of(device, run_id, shard)

    def failed(event: Any) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(StandInEvent, "query", failed)
    with pytest.raises(SaveError, match="illegal memory access was encountered; host memory has no snapshot"):
        pool.dump(lambda: shard, 20, dict)
    pool.close()
    assert device.calls(*WAITS) == []


def test_a_refusal_leaves_no_error_for_the_next_kernel(device: StandInDevice) -> None:
    device.runtime.refuse = OUT_OF_MEMORY
    with pytest.raises(SaveError, match=r"4096 bytes of shared memory could not be pinned \(CUDA error 2\)"):
        Pinning(torch.zeros(4096, dtype=torch.uint8), CUDA)
    device.tensor(torch.ones(3)).mul_(2)
    assert {stream for _, stream, _ in device.calls("launch")} == {"default:1", "default:0"}, "the error is the state's"


def test_a_registration_that_outlived_its_mapping_gives_way(device: StandInDevice) -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    device.runtime.registered[memory.data_ptr()] = 8192  # of pages that were unmapped: not these
    Pinning(memory, CUDA)
    assert device.runtime.registered == {memory.data_ptr(): 4096}
    device.tensor(torch.ones(3)).mul_(2)


def test_each_pool_of_a_process_registers_its_own_and_lets_it_go(device: StandInDevice, run_id: str) -> None:
    shard = shard_on(device)
    for life in range(3):
        pool = SnapshotPool(shard, memory=SharedMemory(run_id, 0, life))
        assert pool.shared_memory_problem is None
        assert len(device.runtime.registered) == 3
        assert all(size > 0 for size in device.runtime.registered.values())
        pool.close(remove=False)
        assert device.runtime.registered == {}
    assert len(device.calls("register")) == len(device.calls("unregister")) == 9


def test_where_it_is_refused_the_buffers_are_pinned_memory_of_the_process(device: StandInDevice, run_id: str) -> None:
    shard = shard_on(device)
    device.runtime.refuse = OUT_OF_MEMORY
    pool = SnapshotPool(shard, memory=SharedMemory(run_id, 0, 0))
    assert pool.shared_memory_problem is not None
    assert "could not be pinned" in pool.shared_memory_problem
    assert list(SHARED_MEMORY.glob(f"cpsr-{run_id}*")) == [], "what holds nothing takes no memory"
    assert len(device.calls("pin")) == 3
    device.tensor(torch.ones(3)).mul_(2)
    assert pool.begin(shard, 7, {}) is not None
    assert pool.finish() is not None
    pool.close()


@pytest.mark.parametrize("stride", [1, 2])
def test_a_device_is_not_waited_for_before_the_copy_must_be_complete(stride: int) -> None:
    with stand_in_device() as device:
        weights = device.tensor(torch.zeros(64 * stride))[::stride]
        shard = Shard({"w": OperatorState("w", ParamSlice(weights, (64,)), {}, 0)})
        watch = WriteWatch()
        device.at_once = False
        watch.begin("a snapshot", shard, thorough=True, on_change=lambda: None)
        for undone in (1.0, -1.0):
            weights.data.add_(undone)
            assert not watch.look()
        assert not watch.look(forward=False, wait=False), "what is not here is not compared"
        assert not [call for call in device.trace if call[0] == "synchronize"]
        assert watch.look(forward=False)


def test_all_that_asks_or_waits_for_the_device_is_allowed_while_a_graph_is_captured(
    device: StandInDevice, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth, seen = threading.local(), []

    class Runtime:
        """Knows whether the calling thread has suspended the mode."""

        def cudaThreadExchangeStreamCaptureMode(self, _: object) -> None:  # noqa: N802 - CUDA's name
            depth.suspended = not getattr(depth, "suspended", False)

    monkeypatch.setattr("cpsr.state.device_values._runtime", Runtime)
    for name in ("query", "synchronize", "elapsed_time"):
        call = getattr(StandInEvent, name)

        def watched(event: StandInEvent, *given: Any, name: str = name, call: Any = call) -> Any:
            seen.append((name, getattr(depth, "suspended", False)))
            return call(event, *given)

        monkeypatch.setattr(StandInEvent, name, watched)
    shard = shard_on(device)
    pool = pool_of(device, run_id, shard)
    pool.begin(shard, 7, {"step": DeviceNumber(device.tensor(torch.tensor(7.0)))})
    pool.finish()
    assert set(seen) == {("query", True), ("synchronize", True), ("elapsed_time", True)}
    close(device, pool)
