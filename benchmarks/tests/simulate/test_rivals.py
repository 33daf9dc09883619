"""Other rules for the interval, and the paper's theorem in its exact forms."""

import math
from dataclasses import replace

import numpy
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.integrate import quad

from cpsr.benchmarks.simulate.rivals import RULES, checkfreq, exact_iterations, gemini, pccheck, sinh, untruncated
from cpsr.planner.inputs import PlannerInputs
from cpsr.planner.policies import LONGEST, SHORTEST, Choice, PaperTerms, paper_terms, theorem1
from tests.planner.jobs import PHASE, any_job, cost_per_second, job


def test_checkfreq_by_hand() -> None:
    # 45 s to the disk are 30 iterations of 1.5 s; a stall of 1.2 s in 45 s is 2.67%, in 61.5 s (41) it is 1.95%.
    inputs = job(stall_seconds=1.2, iteration_seconds=1.5, persist_seconds=45.0)
    assert [checkfreq(inputs, limit).interval_iterations for limit in (0.02, 0.035)] == [40, 30]


def test_pcchecks_tolerance_is_a_factor() -> None:
    # 45 s to the disk, two at a time, between iterations of 1.02 * 1.5 s: 14.7.
    assert pccheck(job(persist_seconds=45.0, iteration_seconds=1.5)).interval_iterations == 15


@given(st.floats(0.01, 100.0), st.floats(0.1, 100.0), st.floats(0.05, 100.0))
def test_no_interval_is_cheaper_than_the_oracles(stall: float, iteration: float, mtbf_hours: float) -> None:
    inputs = job(mtbf_hours, stall_seconds=stall, iteration_seconds=iteration)
    interval = gemini(inputs).interval_iterations
    every = numpy.unique(numpy.rint(numpy.geomspace(1, 1e6, 2000)))
    cost = cost_per_second(inputs, numpy.array([float(interval)]), "recompute")[0]
    assert cost <= cost_per_second(inputs, every, "recompute").min() * (1 + 1e-9)


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


def test_eq_17_is_the_integral_of_eq_15() -> None:
    """But for a constant T_s, which moves no optimum."""
    these = paper_terms(job(0.05))
    assert isinstance(these, PaperTerms)
    rate, interval = these.failures_per_iteration, 100.0
    period = interval + these.stall_iterations
    count = numpy.arange(2000)
    shares = numpy.exp(-rate * count * period) - numpy.exp(-rate * (count + 1) * period)
    stalls = float(numpy.sum(count * these.stall_iterations * shares))
    # lambda T_p of Eq. 14 times the survival, exp((alpha1 - tau1 / T_c - lambda) t), in the terms of the theorem.
    scale = rate * these.deviation_iterations / these.tau1
    theta = these.decay_per_iteration - these.tau1 / interval
    recoveries = quad(lambda t: scale * math.exp(theta * t), 0, math.inf)[0]
    assert stalls + recoveries == pytest.approx(total_cost(these, interval) - these.stall_iterations, rel=1e-6)


@given(st.floats(0.05, 24.0), st.floats(0.01, 30.0), st.floats(1e-3, 5.0))
def test_the_theorem_is_too_long_by_what_it_truncates(hours: float, stall: float, tau1: float) -> None:
    inputs = job(hours, stall_seconds=stall, phase=replace(PHASE, tau1_per_checkpoint=tau1))
    these = paper_terms(inputs)
    assert isinstance(these, PaperTerms)
    printed, whole = theorem1(inputs), untruncated(inputs)
    assume(not printed.note and not whole.note and printed.interval_iterations < LONGEST)
    rate = these.rate_per_iteration
    excess = rate * these.stall_iterations / (these.decay_per_iteration + rate)
    assert printed.interval_iterations - whole.interval_iterations == pytest.approx(excess, abs=1.0)


def test_ten_minutes_between_failures_make_the_theorem_much_too_long() -> None:
    """B < 0 there: the part that the theorem drops is most of its answer. The example of docs/theorem.md."""
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
