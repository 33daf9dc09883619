import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from cpsr.predictor import training as module
from cpsr.predictor.network import MIN_SNAPSHOTS, corrections, cosines
from cpsr.predictor.protocol import HistoryEntry
from cpsr.predictor.statistics import MAX_SNAPSHOTS, OperatorMotion, merged
from cpsr.predictor.training import (
    LATER_ITERATIONS,
    MAX_EXAMPLES,
    Examples,
    Head,
    Windows,
)
from cpsr.state import codec


def returned(work: Iterator[None] | Generator[None, None, Any]) -> Any:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def windows(operators: Mapping[str, OperatorMotion]) -> Windows:
    found: Windows | None = returned(module.windows(operators))
    assert found is not None
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
    examples.add(windows({f"w{k}": turning(k, first) for k in range(20)}))
    return examples


def trained(steps: int, head: Head | None = None) -> Head:
    head, examples = head or Head(), circles()
    for step in range(steps):
        returned(head.step(examples.draw(torch.Generator().manual_seed(step))))
    return head


def newest_cosine(taken: Windows, head: Head | None) -> float:
    """Of the direction, the line's without a head, with the motion over the newest snapshots; mean over operators."""
    seen = len(taken.points) - 2
    question = taken.question(list(range(seen)), [seen, seen + 1])
    rows = question.geometry.line.expand(len(taken), -1)
    if head is not None:
        rows = rows + corrections(head.parameters, question.geometry, question.seen_products).detach()
    found = cosines(question.over_window(rows), question.later, question.products)
    return float((found * question.weights).sum() / question.weights.sum())


def test_it_learns_to_turn_and_untrained_it_starts_at_the_line() -> None:
    later = windows({f"w{k}": turning(k, first=30) for k in range(20, 40)})  # other planes, another time
    untrained = Head.untrained()
    line = newest_cosine(later, None)
    assert newest_cosine(later, untrained) == pytest.approx(line, abs=1e-6)
    assert line < 0.5
    assert newest_cosine(later, trained(250, untrained)) > 0.8


def test_an_update_in_parts_is_that_of_one_piece_whatever_comes_between() -> None:
    expected, paused, examples = trained(1), Head(), circles()
    with torch.no_grad():
        for _ in paused.step(examples.draw(torch.Generator().manual_seed(0))):
            assert paused.steps == 0
            assert not torch.is_grad_enabled()  # what training has set holds between any two
            torch.rand(3)
    assert paused.steps == 1
    assert torch.equal(paused.parameters, expected.parameters)


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
    first, second = (examples.draw(torch.Generator().manual_seed(seed)) for seed in (0, 1))
    expected, later = Head(), Head()
    returned(expected.step(first))
    with MODES[mode]():
        head = Head()
        returned(head.step(first))
        state = head.state_dict()
        later.load_state_dict(state)
        returned(later.step(second))
        assert mode == "device" or newest_cosine(later_windows, head) < 1.0
    returned(expected.step(second))
    assert later.parameters.dtype == torch.float32
    assert torch.equal(later.parameters, expected.parameters)


def motion(count: int, interval: int = 50, seed: int = 0, size: float = 1.0, rate: float = 1.0) -> OperatorMotion:
    generator = torch.Generator().manual_seed(seed)
    steps = size * torch.randn(count - 1, 40, generator=generator, dtype=torch.float64) + size
    points = tuple(HistoryEntry(interval * k, interval * k * rate, rate) for k in range(count))
    return OperatorMotion(40, points, steps @ steps.T)


@pytest.mark.parametrize(("count", "interval"), [(6, 50), (9, 50), (20, 20), (7, 100)])
def test_questions_keep_past_and_future_apart(count: int, interval: int) -> None:
    taken = windows({"w": motion(count, interval)})
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        question = taken.draw(generator)
        seen = question.seen.tolist()
        later = question.later.nonzero().flatten().tolist()
        assert len(seen) >= MIN_SNAPSHOTS
        assert seen == sorted(set(seen))
        assert min(later) > seen[-1]
        assert abs(float(question.later.sum())) < 1e-6
        reached = taken.points[max(later)].iteration - taken.points[seen[-1]].iteration
        assert LATER_ITERATIONS[0] <= reached <= max(LATER_ITERATIONS[1], 2 * interval)
        assert question.geometry.query > 0.0
        torch.testing.assert_close(question.seen_products, merged(taken.products, seen))


def filled(checkpoints: int) -> Examples:
    examples = Examples()
    for checkpoint in range(checkpoints):
        operators = {f"w{k}": motion(MAX_SNAPSHOTS, 20, seed=100 * checkpoint + k) for k in range(40)}
        examples.add(windows(operators))
    return examples


def test_examples_are_bounded_small_and_survive() -> None:
    examples = filled(MAX_EXAMPLES // 40 + 3)
    assert len(examples) <= MAX_EXAMPLES
    data, tensors = codec.encode(examples.state_dict())
    assert len(json.dumps(data)) + sum(tensor.nbytes for tensor in tensors.values()) < 0.35 * 2**20
    later = Examples()
    later.load_state_dict(codec.decode(json.loads(json.dumps(data)), tensors))
    questions = [kept.draw(torch.Generator().manual_seed(3)) for kept in (examples, later)]
    assert torch.equal(questions[0].products, questions[1].products)
    assert torch.equal(questions[0].later, questions[1].later)
    assert torch.equal(questions[0].weights, questions[1].weights)
