"""Activations in host memory: the same losses and gradients, within the limit, and nothing left behind."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from cpsr.demo.model import GPT, GPTConfig
from cpsr.engines import TorchAdapter, offload
from cpsr.engines.offload import ActivationOffload
from cpsr.journal import JournalReader
from cpsr.learning.learning import LIMIT_BYTES
from cpsr.life import opening
from cpsr.recovery import CPSRRecovery
from tests.device import DEVICE
from tests.recovery.job import Job

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


def twice_through_the_same_graph(model: GPT) -> Trained:
    loss = model(batches(1)[0])
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss.detach()], [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("limit_bytes", [60_000, ROOMY])
@pytest.mark.parametrize("train", [one_by_one, all_forwards_first, twice_through_the_same_graph])
def test_losses_and_gradients_are_bitwise_the_same(train: Callable[[GPT], Trained], limit_bytes: int) -> None:
    expected_losses, expected_gradients = train(gpt())
    model = gpt()
    with ActivationOffload(model, limit_bytes) as moved:
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


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_a_limit_above_what_the_machine_has_is_lowered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    predictor_bytes = LIMIT_BYTES
    monkeypatch.setattr(opening, "check_host_memory", lambda *_: predictor_bytes + room)
    model = gpt()
    adapter = TorchAdapter(model, torch.optim.AdamW(model.parameters()))
    settings = {"run_dir": tmp_path, "engines": {"offload_activations_bytes": 1 << 60}}
    with CPSRRecovery(adapter, settings):
        model(batches(1)[0])
    with JournalReader(tmp_path / "journal.db") as journal:
        (moved,) = [event.message for event in journal.events() if event.kind == "activations"]
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
