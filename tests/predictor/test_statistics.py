import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpsr.predictor.statistics import MAX_SNAPSHOTS, MotionStatistics, merged
from cpsr.predictor.weight_pieces import gram
from cpsr.state import codec

MakeHistory = Callable[..., Any]
ITERATIONS = [100, 150, 210, 220, 300, 350, 410]
SIZES = {"w": 700, "bias": 9, "scalar": 1}
Steps = list[dict[str, torch.Tensor]]


def walk(count: int, seed: int = 0, sizes: Mapping[str, int] = SIZES) -> Steps:
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    steps = []
    for _ in range(count):
        state = {name: values + 0.1 * torch.randn(len(values), generator=generator) for name, values in state.items()}
        steps.append(state)
    return steps


def take_in(statistics: MotionStatistics, history: Any) -> int:
    return sum(1 for _ in statistics.update(history))


def products(statistics: MotionStatistics, operator: str) -> torch.Tensor:
    return statistics.operators[operator].products


def one_by_one(make_history: MakeHistory, steps: Steps, span: int, statistics: MotionStatistics, **options: Any) -> Any:
    """Take in checkpoint after checkpoint, each time from a history of the newest `span`; returns the last one."""
    for end in range(1, len(steps) + 1):
        begin = max(0, end - span)
        history = make_history(ITERATIONS[begin:end], steps[begin:end], **options)
        take_in(statistics, history)
    return history


@pytest.mark.parametrize("span", [7, 4])
def test_checkpoint_by_checkpoint_gives_the_gram_matrix(make_history: MakeHistory, span: int) -> None:
    steps = walk(7)
    statistics = MotionStatistics()
    history = one_by_one(make_history, steps, span, statistics)
    assert statistics.seen == tuple(ITERATIONS[-span:])
    for operator in SIZES:
        motion = statistics.operators[operator]
        torch.testing.assert_close(motion.products, gram(history, operator), rtol=1e-12, atol=1e-12)
        assert torch.equal(motion.products, motion.products.T)
        assert motion.points == history.entries


def test_an_operator_counts_once_every_checkpoint_has_it_of_its_own_iteration(make_history: MakeHistory) -> None:
    steps, statistics = walk(7), MotionStatistics()
    rare = [*ITERATIONS[:2], ITERATIONS[1], *ITERATIONS[3:]]  # the third checkpoint has an older one
    for end in range(1, 8):
        begin = max(0, end - 4)
        take_in(statistics, make_history(ITERATIONS[begin:end], steps[begin:end], taken={"bias": rare[begin:end]}))
        assert ("bias" in statistics.operators) == (end < 3 or begin > 2)
    result = gram(make_history(ITERATIONS[3:], steps[3:]), "bias")
    torch.testing.assert_close(products(statistics, "bias"), result, rtol=1e-12, atol=1e-12)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=st.sets(st.integers(0, 6), min_size=2), seed=st.integers(0, 1000))
def test_matrices_of_fewer_snapshots_follow(make_history: MakeHistory, chosen: set[int], seed: int) -> None:
    history = make_history(ITERATIONS, walk(7, seed))
    statistics = MotionStatistics()
    take_in(statistics, history)
    places = sorted(chosen)
    expected = gram(history, "w", places)
    found = statistics.operators["w"].between([ITERATIONS[place] for place in places])
    assert found is not None
    # Differences over several checkpoints are rounded once in float32, sums of differences several times.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged(products(statistics, "w"), places), found, rtol=0, atol=0)


def test_a_checkpoint_that_is_not_finite_is_left_out_and_listed(make_history: MakeHistory) -> None:
    steps = walk(7)
    steps[3] = {name: values.clone() for name, values in steps[3].items()}
    steps[3]["bias"][4] = math.nan
    statistics = MotionStatistics()
    history = one_by_one(make_history, steps, 7, statistics)
    assert statistics.left_out == (220,)
    for operator in SIZES:
        expected = gram(history, operator, [0, 1, 2, 4, 5, 6])
        torch.testing.assert_close(products(statistics, operator), expected, rtol=1e-12, atol=1e-12)
    # Once the history has lost it nobody needs to know of it.
    take_in(statistics, make_history(ITERATIONS[4:], steps[4:]))
    assert not statistics.left_out


def test_what_is_kept_is_bounded_small_and_survives(make_history: MakeHistory) -> None:
    count = MAX_SNAPSHOTS + 9
    iterations = list(range(0, 20 * count, 20))
    steps = walk(count, sizes={f"layer.{place}.weight": 2 for place in range(300)})
    statistics = MotionStatistics()
    take_in(statistics, make_history(iterations, steps))
    assert len(statistics.operators["layer.0.weight"].points) == MAX_SNAPSHOTS
    data, tensors = codec.encode(statistics.state_dict())
    assert len(json.dumps(data)) + sum(tensor.nbytes for tensor in tensors.values()) < 0.5 * 2**20
    later = MotionStatistics()
    later.load_state_dict(codec.decode(json.loads(json.dumps(data)), tensors))
    assert (later.seen, later.left_out) == (statistics.seen, statistics.left_out)
    for operator, motion in statistics.operators.items():
        assert later.operators[operator].points == motion.points
        assert torch.equal(later.operators[operator].products, motion.products)
    more = make_history([*iterations, iterations[-1] + 20], [*steps, steps[0]])
    take_in(statistics, more)
    take_in(later, more)
    assert torch.equal(products(statistics, "layer.7.weight"), products(later, "layer.7.weight"))
