"""The measures of popularity against their formulas."""

from collections.abc import Callable

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.engines.moe.measures import CapacityAware, HardCount, Measure, Routed, SoftCount, TimeDecayed
from tests.engines.moe.mixtures import mixture

LAYERS = mixture(2, 3)
MEASURES: list[Callable[[], Measure]] = [
    lambda: HardCount(LAYERS),
    lambda: SoftCount(LAYERS),
    lambda: TimeDecayed(LAYERS, 0.9),
    lambda: CapacityAware(LAYERS, HardCount(LAYERS), [[1, 1], [1, 1, 1]]),
]


def scores(measure: Measure) -> list[list[float]]:
    return [layer.tolist() for layer in measure.scores]


def test_hard_count_adds_tokens() -> None:
    measure = HardCount(LAYERS)
    measure.observe(Routed([[3, 1], [0, 4, 0]]))
    measure.observe(Routed([[0, 4], [2, 1, 1]]))
    assert scores(measure) == [[3, 5], [2, 5, 1]]


def test_soft_count_adds_probabilities() -> None:
    measure = SoftCount(LAYERS)
    measure.observe(Routed([[1, 0], [0, 1, 0]], [[0.75, 0.25], [0.25, 0.5, 0.25]]))
    measure.observe(Routed([[1, 0], [0, 1, 0]], [[0.5, 0.5], [0.25, 0.75, 0]]))
    assert scores(measure) == [[1.25, 0.75], [0.5, 1.25, 0.25]]


def test_a_soft_count_of_gates_that_show_no_probabilities_is_refused() -> None:
    with pytest.raises(ValueError, match="use the hard count"):
        SoftCount(LAYERS).observe(Routed([[1, 0], [0, 1, 0]]))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20), st.floats(0, 0.99))
def test_decay_weighs_each_iteration_by_its_age(counts: list[int], decay: float) -> None:
    layers = mixture(2)
    measure = TimeDecayed(layers, decay)
    for count in counts:
        measure.observe(Routed([[count, 1]]))
    expected = sum((1 - decay) * decay**age * count for age, count in enumerate(reversed(counts)))
    assert measure.scores[0][0] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("decay", [-0.1, 1.0, numpy.nan])
def test_a_decay_that_forgets_nothing_or_too_much_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="decay must be"):
        TimeDecayed(LAYERS, decay)


def test_capacity_turns_the_order_round() -> None:
    measure = CapacityAware(LAYERS, HardCount(LAYERS), [[10, 2], [1, 1, 4]])
    measure.observe(Routed([[10, 4], [1, 2, 2]]))
    assert scores(measure) == [[1, 2], [1, 2, 0.5]]


def test_a_capacity_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'blocks.1' has capacity 0"):
        CapacityAware(LAYERS, HardCount(LAYERS), [[1, 1], [1, 0, 1]])


@pytest.mark.parametrize("make", MEASURES)
def test_experts_that_are_never_routed_to_have_no_score(make: Callable[[], Measure]) -> None:
    measure = make()
    assert scores(measure) == [[0, 0], [0, 0, 0]]
    measure.observe(Routed([[0, 0], [0, 0, 0]], [[0, 0], [0, 0, 0]]))
    assert scores(measure) == [[0, 0], [0, 0, 0]]
    measure.observe(Routed([[2, 0], [0, 0, 2]], [[2, 0], [0, 0, 2]]))
    assert [[bool(score) for score in layer] for layer in scores(measure)] == [[True, False], [False, False, True]]


@pytest.mark.parametrize("make", MEASURES)
def test_counts_of_another_model_are_refused(make: Callable[[], Measure]) -> None:
    with pytest.raises(ValueError, match="and the model has 2"):
        make().observe(Routed([[1, 1]], [[1, 1]]))
