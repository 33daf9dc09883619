"""Activations in host memory: the same losses and gradients, within the limit, and nothing left behind."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cpsr.demo.model import GPT, GPTConfig
from cpsr.engines import TorchAdapter, offload
from cpsr.engines.offload import ActivationOffload
from cpsr.journal import JournalReader
from cpsr.learning.memory import LIMIT_BYTES
from cpsr.life import opening
from cpsr.recovery import CPSRRecovery
from tests.device import DEVICE, ON_CUDA
from tests.recovery.job import Job
from tests.stand_in_device import StandInDevice, stand_in_device

CONFIG = GPTConfig(layers=2, heads=2, width=32, context=32)
ROOMY = 1 << 30
Trained = tuple[list[torch.Tensor], list[torch.Tensor]]


@pytest.fixture(autouse=True)
def _small_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 1)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG).to(DEVICE)


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (2, CONFIG.context + 1)
    return [torch.randint(CONFIG.vocabulary, shape, generator=generator).to(DEVICE) for _ in range(count)]


def one_by_one(model: GPT) -> Trained:
    optimizer, losses, gradients = torch.optim.AdamW(model.parameters()), [], []
    for batch in batches(3):
        loss = model(batch)
        loss.backward()
        losses.append(loss.detach())
        gradients += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses, gradients


def all_forwards_first(model: GPT) -> Trained:
    """As in a pipeline, where micro-batches wait for their backward."""
    losses = [model(batch) for batch in batches(3)]
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses], [p.grad for p in model.parameters() if p.grad is not None]


def one_forward_one_backward(model: GPT) -> Trained:
    """As in a pipeline's first stage: the oldest micro-batch goes back while newer ones wait."""
    losses = []
    for batch in batches(4):
        losses.append(model(batch))
        if len(losses) > 1:
            losses[-2].backward()
    losses[-1].backward()
    return [loss.detach() for loss in losses], [p.grad for p in model.parameters() if p.grad is not None]


def twice_through_the_same_graph(model: GPT) -> Trained:
    loss = model(batches(1)[0])
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss.detach()], [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("limit_bytes", [60_000, ROOMY])
@pytest.mark.parametrize(
    "train", [one_by_one, all_forwards_first, one_forward_one_backward, twice_through_the_same_graph]
)
def test_losses_and_gradients_are_bitwise_the_same(train: Callable[[GPT], Trained], limit_bytes: int) -> None:
    expected_losses, expected_gradients = train(gpt())
    model = gpt()
    with ActivationOffload(model, limit_bytes, chunk_bytes=1000) as moved:
        losses, gradients = train(model)
    assert len(gradients) == len(expected_gradients) > 0
    for found, expected in zip([*losses, *gradients], [*expected_losses, *expected_gradients], strict=True):
        assert torch.equal(found, expected)
    assert moved.moved_bytes > 0


def test_no_more_than_the_limit_lies_in_host_memory_and_all_of_it_goes_with_the_graph() -> None:
    model = gpt()
    with ActivationOffload(model, 60_000) as moved:
        losses = [model(batch) for batch in batches(2)]
        assert 30_000 < moved.held_bytes <= 60_000
        losses[0].backward()
        del losses
        gc.collect()
        assert moved.held_bytes == 0
        model(batches(1)[0])  # dropped without a backward
        gc.collect()
        assert moved.held_bytes == 0


class Chain(nn.Module):
    """Six tensors are saved, one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = x.tanh()
        return x.sum()


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """(number of a moved tensor in the order in which they were saved, "sent back" or "asked for")."""
    found: list[tuple[int, str]] = []
    numbers: dict[int, int] = {}

    class Watched(offload.Moved):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            numbers[id(self)] = len(numbers)

        def bring_back(self) -> None:
            found.append((numbers[id(self)], "sent back"))
            super().bring_back()

        def returned(self) -> torch.Tensor:
            found.append((numbers[id(self)], "asked for"))
            return super().returned()

    monkeypatch.setattr(offload, "Moved", Watched)
    return found


def test_a_backward_brings_back_what_its_own_forward_moved_a_little_ahead(arrivals: list[tuple[int, str]]) -> None:
    chain, inputs = Chain(), [torch.randn(10, device=DEVICE, requires_grad=True) for _ in range(3)]
    with ActivationOffload(chain, limit_bytes=4 * inputs[0].nbytes) as moved:
        oldest = chain(inputs[0])  # its last two stay
        moved.limit_bytes = ROOMY
        newer = [chain(x) for x in inputs[1:]]
        assert arrivals == []
        oldest.backward()
        assert [number for number, what in arrivals if what == "asked for"] == [3, 2, 1, 0]
        assert {number for number, _ in arrivals} == {0, 1, 2, 3}
        for number in range(4):
            assert arrivals.index((number, "sent back")) < arrivals.index((number, "asked for"))
        arrivals.clear()
        newer[0].backward()
    assert {number for number, _ in arrivals} == set(range(4, 10))


COMPUTE, OUT, BACK = "default:0", "stream1:0", "stream2:0"
Call = tuple[str, str | None, Any]


class Saves(torch.autograd.Function):
    """Autograd cannot compute on a stand-in for a device, but it can save and ask for what lies there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: "Layers", saved: torch.Tensor) -> torch.Tensor:
        ctx.layers = layers
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        layers, begun = ctx.layers, len(ctx.layers.device.trace)
        (saved,) = ctx.saved_tensors
        layers.asked.append((saved, layers.device.trace[begun:]))
        layers.device.launch("backward", 0, lambda: None)
        return gradient, None, None


class Layers(nn.Module):
    """Each saves what its kernel has just computed."""

    def __init__(self, device: StandInDevice) -> None:
        super().__init__()
        self.device = device
        self.asked: list[tuple[Any, list[Call]]] = []

    def forward(self, x: torch.Tensor, saved: torch.Tensor, count: int = 6) -> torch.Tensor:
        for _ in range(count):
            saved = saved + 1
            x = Saves.apply(x, self, saved)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return x


def waits(calls: list[Call], stream: str) -> list[Any]:
    """The events that a stream waits for."""
    return [about for call, on, about in calls if (call, on) == ("wait_event", stream)]


def records(calls: list[Call], stream: str) -> list[Any]:
    return [about for call, on, about in calls if (call, on) == ("record", stream)]


def test_on_a_device_only_streams_wait_and_only_for_what_they_need() -> None:
    values, x = torch.arange(4.0), torch.zeros(1, requires_grad=True)
    with stand_in_device() as device:
        device.at_once = False
        layers = Layers(device)
        with ActivationOffload(layers, ROOMY, chunk_bytes=8) as moved:
            output = layers(x, device.tensor(values))
            forward = list(device.trace)
            output.sum().backward()
        assert moved.moved_bytes == 6 * values.nbytes
        computed = [one for one in forward if one[0] == "record" or one[:2] == ("launch", COMPUTE)]
        # Each copy out waits for the kernel that has just computed the tensor.
        assert [one[:2] for one in computed] == [("launch", COMPUTE), ("record", COMPUTE), ("record", OUT)] * 6
        assert waits(forward, OUT) == records(forward, COMPUTE)
        out = records(forward, OUT)
        assert len(out) == 6
        arrivals = [event for _, calls in layers.asked for event in records(calls, BACK)]
        assert len(arrivals) == 6
        for number, (_, calls) in enumerate(layers.asked):
            assert waits(calls, COMPUTE) == [arrivals[number]]  # not for those that are on their way only
            own, queued = waits(calls, BACK)[::2], waits(calls, BACK)[1::2]
            assert own == [out[5 - place] for place in range(6) if arrivals[place] in records(calls, BACK)]
            assert queued == records(calls, COMPUTE)  # what may still use the memory that the copy goes to
        assert device.calls("synchronize", "query", "query_stream") == []
        device.complete()
        for number, (saved, _) in enumerate(layers.asked):
            assert torch.equal(saved.memory, values + 6 - number)
        # What was returned is freed in the order of the stream that computes; nothing delays that.
        assert [stream for _, stream, _ in device.calls("record_stream")] == [OUT] * 6


def test_what_returns_does_not_wait_for_what_a_newer_forward_still_moves() -> None:
    values, x = torch.arange(4.0), torch.zeros(1, requires_grad=True)
    with stand_in_device() as device:
        layers = Layers(device)
        with ActivationOffload(layers, ROOMY):
            oldest = layers(x, device.tensor(values))
            device.hang(device.stream(OUT))
            layers(x, device.tensor(values))
            oldest.sum().backward()
        for number, (saved, _) in enumerate(layers.asked):
            assert torch.equal(saved.memory, values + 6 - number)


def test_the_memory_of_a_copy_that_nobody_asks_for_outlives_it() -> None:
    with stand_in_device() as device:
        device.at_once = False
        layers = Layers(device)
        with ActivationOffload(layers, ROOMY):
            output = layers(torch.zeros(1, requires_grad=True), device.tensor(torch.arange(4.0)), count=3)
        assert output.grad_fn is not None
        begun, found = len(device.trace), output.grad_fn.saved_tensors  # the last one, and two more are sent for
        assert len(records(device.trace[begun:], BACK)) == 3
        del output, found
        gc.collect()
        assert [stream for _, stream, _ in device.calls("record_stream")] == [OUT] * 3 + [BACK] * 2


def test_weights_and_evaluations_are_left_alone() -> None:
    linear, inputs = nn.Linear(50, 40).to(DEVICE), torch.ones(3, 50, device=DEVICE)
    with ActivationOffload(linear, ROOMY) as moved:
        with torch.no_grad():
            linear(inputs)
        linear.eval()
        linear(inputs)
        assert moved.moved_bytes == 0
        linear.train()
        linear(inputs)
        assert moved.moved_bytes == 3 * 50 * 4  # the input; its weights, 2000 of them, stay


def test_the_layout_of_a_tensor_is_kept() -> None:
    class Transposed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.T.exp()

    x = torch.randn(5, 7, device=DEVICE, requires_grad=True)
    module = Transposed()
    with ActivationOffload(module, ROOMY) as moved:
        y = module(x)
    saved = y.grad_fn._saved_result
    assert (saved.stride(), moved.moved_bytes) == (y.stride(), 5 * 7 * 4)
    assert torch.equal(saved, y)


def test_a_forward_that_raises_leaves_no_hook_behind() -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such layer")

    module = Raises()
    with ActivationOffload(module, ROOMY) as moved, pytest.raises(ValueError, match="no such layer"):
        module(torch.ones(3))
    torch.ones(1000, requires_grad=True).exp()  # saves its result
    assert moved.moved_bytes == 0


def test_outside_nothing_is_moved() -> None:
    model = gpt()
    with ActivationOffload(model, ROOMY) as moved:
        pass
    model(batches(1)[0])
    assert moved.moved_bytes == 0


# Between the stages of a pipeline gloo sends no CUDA tensors.
PIPELINES = {} if ON_CUDA else {"pipeline": {"zero": 0, "micro_batches": 2, "stages": 2}}
ENGINES: dict[str, dict[str, Any]] = {
    "zero 0": {"zero": 0},
    "zero 1 bf16": {"zero": 1, "precision": "bf16"},
    "zero 2 accumulating": {"zero": 2, "micro_batches": 2},
    **PIPELINES,  # last: no other engine is made in its process
}


def test_jobs_of_two_ranks_train_alike_with_their_activations_in_host_memory(tmp_path: Path) -> None:
    offloading = {"engines": {"offload_activations_bytes": ROOMY}}
    runs: dict[str, dict[str, Any]] = {}
    for name, engine in ENGINES.items():
        runs[name] = {"engine": engine, "settings": {}}
        runs[f"{name}, offloading"] = {"engine": engine, "settings": offloading}
    job = Job(tmp_path)
    ended = job.launch(worker="tests.engines.offload_worker", iterations=8, runs=runs)
    assert ended.statuses == [0, 0], ended.output[0][-3000:]
    for rank in range(2):
        for name in ENGINES:
            assert ended.result(rank)[f"{name}, offloading"] == ended.result(rank)[name]
    for name in ENGINES:
        with JournalReader(job.run_dir / f"{name}, offloading" / "journal.db") as journal:
            messages = [event.message for event in journal.events() if event.kind == "activations"]
        assert len(messages) == 2  # of each rank
        assert not any(message.startswith("0 bytes") for message in messages)


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_a_limit_above_what_the_machine_has_is_lowered_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """It is a limit: the job may never come near it."""
    predictor_bytes = LIMIT_BYTES
    monkeypatch.setattr(opening, "check_host_memory", lambda *_: predictor_bytes + room)
    model = gpt()
    adapter = TorchAdapter(model, torch.optim.AdamW(model.parameters()))
    settings = {"run_dir": tmp_path, "engines": {"offload_activations_bytes": 1 << 60}}
    with CPSRRecovery(adapter, settings):
        model(batches(1)[0])
    with JournalReader(tmp_path / "journal.db") as journal:
        warned, moved = [event.message for event in journal.events() if event.kind == "activations"]
    assert f"has {room} bytes for each rank" in warned
    assert 0 <= int(moved.split()[0]) <= room // 2
    assert bool(int(moved.split()[0])) == bool(room)


def test_zero_3_is_refused_by_name(tmp_path: Path) -> None:
    ended = Job(tmp_path).launch(settings={"engines": {"offload_activations_bytes": 1}}, iterations=2, zero=3)
    assert ended.statuses == [1, 1]
    for output in ended.output:
        assert "ConfigError: engines.offload_activations_bytes: ZeRO-3 gathers the weights" in output


def test_a_saved_tensor_that_changes_in_place_is_refused_as_without_offloading() -> None:
    class Changing(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            saved = inputs.exp()
            loss = (saved * saved).sum()
            saved.add_(1.0)
            return loss

    inputs = torch.ones(4, device=DEVICE, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Changing()(inputs).backward()
    model = Changing()
    with ActivationOffload(model, limit_bytes=0), pytest.raises(RuntimeError, match="changed in place"):
        model(inputs).backward()
