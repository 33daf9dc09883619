from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from cpsr.predictor import training as module
from cpsr.predictor.network import DIMENSION, MIN_SNAPSHOTS, pretrained_parameters
from cpsr.predictor.protocol import HistoryEntry
from cpsr.predictor.statistics import OperatorMotion
from cpsr.predictor.training import LATER_ITERATIONS, MIN_LATER, Head, Windows


def returned(work: Generator[None, None, Any]) -> Any:
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


def circles() -> Windows:
    return windows({f"w{k}": turning(k) for k in range(20)})


def pretrained() -> Head:
    return Head.of(pretrained_parameters())


def turning_nothing() -> torch.Tensor:
    """Weights whose directions are the line's: their last layer is zero."""
    return torch.cat([pretrained_parameters()[:-DIMENSION], torch.zeros(DIMENSION)])


def trained(steps: int, head: Head) -> Head:
    taken = circles()
    for step in range(steps):
        head = head.trained(taken, torch.Generator().manual_seed(step))
    return head


def newest_cosine(taken: Windows, head: Head | None) -> float:
    """Of the direction, the line's without a head, with the motion over the newest snapshots; mean over operators."""
    seen = len(taken.points) - 2
    found = taken.agreement(None if head is None else head.parameters, list(range(seen)), [seen, seen + 1])
    return float(found)


def test_it_learns_to_turn_and_untrained_it_starts_at_the_line() -> None:
    later = windows({f"w{k}": turning(k, first=30) for k in range(20, 40)})  # other planes, another time
    untrained = Head.of(turning_nothing())
    line = newest_cosine(later, None)
    assert newest_cosine(later, untrained) == pytest.approx(line, abs=1e-6)
    assert line < 0.5
    assert newest_cosine(later, trained(250, untrained)) > 0.8


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
    taken, later_windows = circles(), windows({"w": turning(0)})
    seeds = [torch.Generator().manual_seed(seed) for seed in (0, 1, 0, 1)]
    expected = pretrained().trained(taken, seeds[0]).trained(taken, seeds[1])
    with MODES[mode]():
        once = pretrained().trained(taken, seeds[2])
        twice = once.trained(taken, seeds[3])
        assert mode == "device" or newest_cosine(later_windows, once) < 1.0
    assert once.steps == 1
    assert twice.parameters.dtype == torch.float32
    assert torch.equal(twice.parameters, expected.parameters)


def motion(count: int, interval: int = 50, seed: int = 0, size: float = 1.0, rate: float = 1.0) -> OperatorMotion:
    generator = torch.Generator().manual_seed(seed)
    steps = size * torch.randn(count - 1, 40, generator=generator, dtype=torch.float64) + size
    points = tuple(HistoryEntry(interval * k, interval * k * rate, rate) for k in range(count))
    return OperatorMotion(40, points, steps @ steps.T)


@pytest.mark.parametrize(("count", "interval"), [(6, 50), (9, 50), (20, 20), (7, 100)])
def test_draws_keep_past_and_future_apart(count: int, interval: int) -> None:
    taken = windows({"w": motion(count, interval)})
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        seen, later = taken.draw(generator)
        assert len(seen) >= MIN_SNAPSHOTS
        assert len(later) >= MIN_LATER
        assert seen == sorted(set(seen))
        assert later == list(range(seen[-1] + 1, seen[-1] + 1 + len(later)))
        reached = taken.points[later[-1]].iteration - taken.points[seen[-1]].iteration
        assert LATER_ITERATIONS[0] <= reached <= max(LATER_ITERATIONS[1], 2 * interval)
