import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpsr.fitter.phases import PHASES_KEPT, PhaseDetector

BETA2 = 0.999


def detector(**settings: float) -> PhaseDetector:
    """One that takes unbiased values, so that tests can say what they mean."""
    defaults = {"change_fraction": 0.05, "min_iterations": 50, "max_iterations": 1000, "beta2": 0.0}
    return PhaseDetector(**(defaults | settings))  # type: ignore[arg-type]


observations = st.lists(
    st.tuples(st.integers(1, 120), st.floats(allow_nan=True, allow_infinity=True)), min_size=1, max_size=80
)


@given(observations, st.integers(1, 90), st.integers(0, 400))
def test_no_observations_make_more_phases_than_the_shortest_allows(
    steps: list[tuple[int, float]], shortest: int, more: int
) -> None:
    phases = detector(min_iterations=shortest, max_iterations=shortest + more)
    iteration, ended = 0, []
    for gap, value in steps:
        iteration += gap
        phase = phases.observe(iteration, value)
        ended += [phase] if phase else []
    assert len(ended) == phases.ended <= iteration / shortest
    assert phases.phases == tuple(ended[-PHASES_KEPT:])
    assert all(phase.last_iteration - phase.first_iteration >= shortest for phase in ended)
    assert all(one.last_iteration == next_one.first_iteration for one, next_one in itertools.pairwise(ended))


@given(observations, st.data())
def test_after_a_roll_back_all_is_as_if_the_rest_had_never_been_seen(
    steps: list[tuple[int, float]], data: st.DataObject
) -> None:
    rolled, direct, iteration = detector(), detector(), 0
    places = [iteration := iteration + gap for gap, _ in steps]
    back = data.draw(st.integers(0, len(steps) - 1))
    for place, (_, value) in zip(places, steps, strict=True):
        rolled.observe(place, value)
    for place, (_, value) in zip(places[: back + 1], steps[: back + 1], strict=True):
        direct.observe(place, value)
    value = data.draw(st.floats(0, 1e3))
    after = places[back] + data.draw(st.integers(0, 200))
    # The run went back to a checkpoint at places[back] and is observed there again, with the same state.
    if rolled.ended - direct.ended < PHASES_KEPT and 0 <= steps[back][1] < math.inf:
        rolled.observe(places[back], steps[back][1])
        rolled.observe(after, value)
        direct.observe(after, value)
        assert {key: item for key, item in rolled.state_dict().items() if key != "phases"} == {
            key: item for key, item in direct.state_dict().items() if key != "phases"
        }
        assert rolled.phases == direct.phases[len(direct.phases) - len(rolled.phases) :]


def test_a_phase_ends_when_the_change_since_its_beginning_passes_the_fraction() -> None:
    phases = detector()
    for iteration in range(10, 511, 10):
        phase = phases.observe(iteration, 1e-6 * (1 - iteration / 10_000))
        assert (phase is not None) == (iteration == 510)  # from 0.999 the first that is 5% down is 0.949
    assert phase is not None
    assert (phase.first_iteration, phase.last_iteration, phase.ended_by) == (10, 510, "change")
    assert (phase.xi, phase.last_xi) == pytest.approx((0.999e-6, 0.949e-6))
    assert (phases.first_iteration, phases.xi) == (510, phase.last_xi)


def test_noise_that_comes_and_goes_ends_no_phase_however_often_it_is_seen() -> None:
    phases = detector()
    assert all(phases.observe(iteration, 1.0 + 0.04 * (iteration % 2)) is None for iteration in range(1, 1000))


def test_a_steep_beginning_makes_phases_of_the_shortest_length() -> None:
    phases = PhaseDetector(beta2=0.0, min_iterations=50)
    ends = [iteration for iteration in range(5, 1001, 5) if phases.observe(iteration, 0.98**iteration)]
    assert ends == list(range(55, 1001, 50))


def test_the_moments_of_a_real_optimizer_are_freed_of_their_bias() -> None:
    """Gradients of one size from the first step on: one phase, although `exp_avg_sq` grows a hundredfold."""
    weights = torch.nn.Parameter(torch.zeros(4000))
    optimizer = torch.optim.AdamW([weights], lr=1e-3, betas=(0.9, BETA2))
    corrected, as_it_is = PhaseDetector(beta2=BETA2), PhaseDetector(beta2=0.0)
    generator, means = torch.Generator().manual_seed(0), []
    for iteration in range(1, 801):
        weights.grad = 1e-3 * torch.randn(4000, generator=generator)
        optimizer.step()
        means.append(float(optimizer.state[weights]["exp_avg_sq"].mean()))
        corrected.observe(iteration, means[-1])
        as_it_is.observe(iteration, means[-1])
    assert means[-1] > 100 * means[0]
    assert corrected.ended == 0
    assert corrected.xi == pytest.approx(1e-6, rel=0.1)  # the mean square of the gradients
    assert as_it_is.ended > 3


def test_its_state_survives_json_and_goes_on_the_same() -> None:
    whole, first = detector(), detector()
    values = [(iteration, math.exp(-iteration / 700)) for iteration in range(5, 900, 5)]
    for iteration, value in values[:90]:
        whole.observe(iteration, value)
        first.observe(iteration, value)
    resumed = detector()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert resumed.state_dict() == first.state_dict()
    for iteration, value in values[90:]:
        assert resumed.observe(iteration, value) == whole.observe(iteration, value)
    assert resumed.ended == whole.ended > 10


def test_a_damaged_state_is_refused_and_changes_nothing() -> None:
    phases = detector()
    phases.observe(1, 1.0)
    before = phases.state_dict()
    for damaged in ({}, before | {"begun": [1]}, before | {"phases": [{"xi": 1.0}]}, before | {"ended": "many"}):
        with pytest.raises(ValueError, match="no state of a phase detector"):
            phases.load_state_dict(damaged)
    assert phases.state_dict() == before
