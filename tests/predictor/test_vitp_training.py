import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy
import pytest
import torch

from cpsr.predictor import examples as module
from cpsr.predictor.examples import Examples, Windows
from cpsr.predictor.protocol import HistoryEntry
from cpsr.predictor.statistics import OperatorMotion
from cpsr.predictor.vitp_network import PARAMETERS, coefficients, corrections, cosines, named, pretrained_parameters
from cpsr.predictor.vitp_training import Head, loss_slope
from cpsr.state import codec


def returned(work: Iterator[None]) -> Any:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def windows(operators: Mapping[str, OperatorMotion]) -> list[Windows]:
    found: list[Windows] = returned(module.windows(operators))
    return found


def turning(operator: int, first: int = 0, count: int = 9) -> OperatorMotion:
    """An operator on a circle of its own: its direction turns by 0.3 a checkpoint."""
    generator = torch.Generator().manual_seed(operator)
    plane = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    angles = 0.3 * torch.arange(first, first + count, dtype=torch.float64) + operator
    steps = (torch.stack([angles.cos(), angles.sin()], dim=1) @ plane).diff(dim=0)
    points = tuple(HistoryEntry(50 * k, 50.0 * k, 1.0) for k in range(first, first + count))
    return OperatorMotion(50, points, steps @ steps.T)


def circles(first: int = 0) -> Examples:
    examples = Examples()
    for taken in windows({f"w{k}": turning(k, first) for k in range(20)}):
        examples.add(taken)
    return examples


def trained(steps: int, head: Head | None = None) -> Head:
    head, examples = head or Head(), circles()
    for step in range(steps):
        returned(head.step(examples, torch.Generator().manual_seed(step)))
    return head


def test_it_learns_to_turn_and_untrained_it_starts_at_the_line() -> None:
    later = windows({f"w{k}": turning(k, first=30) for k in range(20, 40)})  # other planes, another time
    untrained = Head.untrained()
    before = returned(untrained.accuracy(later))
    assert before["vitp_cosine"] == pytest.approx(before["line_cosine"], abs=1e-6)
    after = returned(trained(250, untrained).accuracy(later))
    assert after["line_cosine"] == before["line_cosine"]
    assert after["line_cosine"] < 0.5
    assert after["vitp_cosine"] > 0.8


def test_it_starts_pretrained_and_counts_updates_from_there() -> None:
    head = Head()
    assert torch.equal(head.parameters, pretrained_parameters())
    assert not torch.equal(head.parameters, Head.untrained().parameters)
    state = head.state_dict()
    assert (state["steps"], bool(state["exp_avg"].any()), bool(state["exp_avg_sq"].any())) == (0, False, False)
    assert trained(2).steps == 2
    assert torch.equal(Head().parameters, pretrained_parameters()), "what one head learns reaches no other"


def test_the_slope_of_the_loss_is_that_of_autograd() -> None:
    examples, parameters = circles(), pretrained_parameters()
    for seed in range(5):
        question = examples.draw(torch.Generator().manual_seed(seed))
        question.products[0] = 0.0  # an operator that stood still
        answers = coefficients(named(parameters), question.geometry, question.seen_products).requires_grad_()
        corrected = (answers - answers.mean(dim=1, keepdim=True)) @ question.geometry.denoised
        assert torch.equal(corrected, corrections(parameters, question.geometry, question.seen_products))
        rows = question.over_window(question.geometry.line + corrected)
        agreed = (cosines(rows, question.later, question.products) * question.weights).sum() / question.weights.sum()
        (expected,) = torch.autograd.grad(1.0 - agreed, answers)
        assert expected[1:].abs().min() > 0.0
        torch.testing.assert_close(loss_slope(answers.detach(), question), expected, rtol=1e-3, atol=1e-7)


def test_the_same_examples_give_the_same_head() -> None:
    first, second = trained(5), trained(5)
    assert first.steps == 5
    assert torch.equal(first.parameters, second.parameters)


def test_it_goes_on_where_it_was_saved() -> None:
    data, tensors = codec.encode(trained(5).state_dict())
    later = Head()
    later.load_state_dict(codec.decode(json.loads(json.dumps(data)), tensors))
    once = Head()
    examples = circles()
    for step in range(8):
        returned(once.step(examples, torch.Generator().manual_seed(step)))
    for step in range(5, 8):
        returned(later.step(examples, torch.Generator().manual_seed(step)))
    assert later.steps == once.steps
    assert torch.equal(later.parameters, once.parameters)


def test_an_update_in_parts_is_that_of_one_piece_whatever_comes_between() -> None:
    expected, paused, examples = trained(1), Head(), circles()
    with torch.no_grad():
        for _ in paused.step(examples, torch.Generator().manual_seed(0)):
            assert paused.steps == 0
            assert not torch.is_grad_enabled()  # what training has set holds between any two
            torch.rand(3)
    assert paused.steps == 1
    assert torch.equal(paused.parameters, expected.parameters)


def test_no_step_asks_for_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the learner's thread that is device 0, whatever device this rank trains on."""
    asked: list[str] = []
    for name in ("current_accelerator", "current_stream", "current_device_index"):
        monkeypatch.setattr(
            torch.accelerator, name, lambda *given, name=name, **named: asked.append(name), raising=False
        )
    for name in ("is_available", "current_stream", "current_device", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda *given, name=name, **named: asked.append(name))
    assert trained(2).steps == 2
    assert asked == []


def test_a_copy_is_another() -> None:
    head = trained(2)
    before = head.parameters.detach().clone()
    trained(1, head.copy())
    assert torch.equal(head.parameters, before)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_modes_of_the_training_loop_do_not_reach_it(mode: str) -> None:
    examples, later_windows = circles(), windows({"w": turning(0)})
    expected, later = Head(), Head()
    returned(expected.step(examples, torch.Generator().manual_seed(0)))
    with MODES[mode]():
        head = Head()
        returned(head.step(examples, torch.Generator(device="cpu").manual_seed(0)))
        state = head.state_dict()
        later.load_state_dict(state)
        returned(later.step(examples, torch.Generator(device="cpu").manual_seed(1)))
        assert mode == "device" or returned(head.accuracy(later_windows))["line_cosine"] < 1.0
    returned(expected.step(examples, torch.Generator().manual_seed(1)))
    assert later.parameters.dtype == torch.float32
    assert torch.equal(later.parameters, expected.parameters)


def test_it_leaves_the_global_random_state_and_threads_alone() -> None:
    before, threads, numbers = torch.get_rng_state(), torch.get_num_threads(), repr(numpy.random.get_state())
    trained(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert repr(numpy.random.get_state()) == numbers


def test_a_network_that_began_at_the_line_gives_way_to_the_shipped_one() -> None:
    head = Head()
    head.load_state_dict({**Head.untrained().state_dict(), "version": 1, "steps": 64})
    assert head.steps == 0
    assert torch.equal(head.parameters, Head().parameters)


def test_another_version_or_network_is_refused() -> None:
    state = Head().state_dict()
    with pytest.raises(ValueError, match=f"this is version 2 with {PARAMETERS}"):
        Head().load_state_dict({**state, "version": 3})
    with pytest.raises(ValueError, match="with 7 weights"):
        Head().load_state_dict({**state, "parameters": torch.zeros(7)})
