"""Other rules for the interval, and the paper's theorem in its exact forms."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cpsr.benchmarks.simulate.rivals import RULES, checkfreq, exact_iterations, pccheck, sinh, untruncated
from cpsr.planner.inputs import PlannerInputs
from cpsr.planner.policies import LONGEST, SHORTEST, Choice, PaperTerms, paper_terms, theorem1
from tests.planner.jobs import PHASE, any_job, job


def test_checkfreq_by_hand() -> None:
    # 45 s to the disk are 30 iterations of 1.5 s; a stall of 1.2 s in 45 s is 2.67%, in 61.5 s (41) it is 1.95%.
    inputs = job(stall_seconds=1.2, iteration_seconds=1.5, persist_seconds=45.0)
    assert [checkfreq(inputs, limit).interval_iterations for limit in (0.02, 0.035)] == [40, 30]


def test_pcchecks_tolerance_is_a_factor() -> None:
    # 45 s to the disk, two at a time, between iterations of 1.02 * 1.5 s: 14.7.
    assert pccheck(job(persist_seconds=45.0, iteration_seconds=1.5)).interval_iterations == 15


@st.composite
def terms(draw: st.DrawFn) -> PaperTerms:
    """Failures every ten iterations to every million; `alpha1` on either side of them."""
    failures = 10 ** draw(st.floats(-6, -1))
    alpha1 = 10 ** draw(st.floats(-6, -2))
    return PaperTerms(
        tau1=10 ** draw(st.floats(-3, 1)),
        stall_iterations=10 ** draw(st.floats(-2, 1.5)),
        failures_per_iteration=failures,
        deviation_iterations=10 ** draw(st.floats(-3, 6)),
        decay_per_iteration=alpha1 - failures,
    )


def total_cost(these: PaperTerms, interval: float) -> float:
    """Eq. 17 without the term that the paper lets vanish, in iterations."""
    rate = these.failures_per_iteration
    stalls = these.stall_iterations / -math.expm1(-rate * (interval + these.stall_iterations))
    slack = these.tau1 - these.decay_per_iteration * interval
    return stalls + rate * these.deviation_iterations / these.tau1 * interval / slack


@given(terms())
def test_the_exact_form_is_a_minimum_of_eq_17(these: PaperTerms) -> None:
    interval = exact_iterations(these)
    assume(interval is not None and 1e-3 < interval < 1e6)
    assert interval is not None
    here = total_cost(these, interval)
    limit = these.tau1 / these.decay_per_iteration if these.decay_per_iteration > 0 else math.inf
    for factor in (0.9, 0.99, 1.01, 1.1):
        if factor * interval < limit:
            assert total_cost(these, factor * interval) >= here * (1 - 1e-9)


def test_ten_minutes_between_failures_make_the_theorem_much_too_long() -> None:
    """B < 0 there: the part that the theorem drops is most of its answer. The example of docs/papers/cpsr.md."""
    phase = replace(PHASE, tau2=-5.0)
    inputs = PlannerInputs(0.6, stall_seconds=30.0, persist_seconds=5.0, failures_per_second=1 / 600, phase=phase)
    these = paper_terms(inputs)
    assert isinstance(these, PaperTerms)
    assert these.deviation_iterations == pytest.approx(32.9, abs=0.05)
    assert these.decay_per_iteration == pytest.approx(-7.0e-4)
    assert these.rate_per_iteration == pytest.approx(8.1e-4, abs=5e-6)
    chosen = [rule(inputs) for rule in (theorem1, untruncated, sinh)]
    assert [choice.interval_iterations for choice in chosen] == [447, 84, 83]
    assert not any(choice.note for choice in chosen)


@given(any_job())
def test_any_input_gives_an_interval(inputs: PlannerInputs) -> None:
    for rule in RULES.values():
        choice = rule(inputs)
        assert isinstance(choice, Choice)
        assert isinstance(choice.interval_iterations, int)
        assert SHORTEST <= choice.interval_iterations <= LONGEST
