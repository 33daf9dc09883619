import math
from dataclasses import replace

import numpy
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize_scalar

from cpsr.planner.choice import LONGEST, SHORTEST, Choice
from cpsr.planner.inputs import PhaseInputs, PlannerInputs
from cpsr.planner.pcip import (
    ROOT_TOLERANCE_ITERATIONS,
    Exact,
    PaperTerms,
    Theorem,
    Untruncated,
    exact_iterations,
    paper_terms,
)
from tests.planner.jobs import JOB, PHASE, any_job, job


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


def test_terms_are_in_iterations() -> None:
    found = paper_terms(JOB)
    assert isinstance(found, PaperTerms)
    assert found.stall_iterations == pytest.approx(1.5)
    assert found.failures_per_iteration == pytest.approx(0.6 / 43200)
    # xi N_p tau1 e^(tau2 - alpha2) / (2 alpha1)
    assert found.deviation_iterations == pytest.approx(1e-6 * 355e6 * 0.05 * math.exp(-9 - 1.8) / 6e-4)
    assert found.decay_per_iteration == pytest.approx(3e-4 - 0.6 / 43200)


@given(terms())
def test_the_exact_form_solves_the_stationarity_condition(these: PaperTerms) -> None:
    interval = exact_iterations(these)
    if interval is None:
        assert these.tau1 <= 2 * math.sqrt(these.deviation_iterations / these.stall_iterations) * math.sinh(
            these.failures_per_iteration * these.stall_iterations / 2
        ) * (1 + 1e-9)
        return
    half = these.failures_per_iteration * (interval + these.stall_iterations) / 2
    assume(half < 300)
    right = 2 * math.sqrt(these.deviation_iterations / these.stall_iterations) * math.sinh(half)
    left = these.tau1 - these.decay_per_iteration * interval
    # The left side is a difference: its error is one of the larger of its parts.
    assert left == pytest.approx(right, rel=1e-6, abs=1e-9 * (these.tau1 + abs(these.decay_per_iteration) * interval))


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


def test_the_exact_form_against_a_numerical_minimum() -> None:
    these = paper_terms(JOB)
    assert isinstance(these, PaperTerms)
    limit = these.tau1 / these.decay_per_iteration
    found = minimize_scalar(lambda x: total_cost(these, x), bounds=(1e-6, limit * 0.999), method="bounded")
    assert exact_iterations(these) == pytest.approx(found.x, rel=1e-3)


@given(terms())
def test_for_few_failures_the_exact_form_is_the_untruncated_one(these: PaperTerms) -> None:
    rate = these.rate_per_iteration
    assume(these.decay_per_iteration + rate > 0)
    interval = (these.tau1 - rate * these.stall_iterations) / (these.decay_per_iteration + rate)
    small = these.failures_per_iteration * (interval + these.stall_iterations)
    assume(interval > 1e-2 and small < 0.1)
    exact = exact_iterations(these)
    assert exact is not None
    # sinh(x) exceeds x by x^3 / 6: the exact interval is shorter, by a share of less than the condition's own error.
    assert exact <= interval * (1 + 1e-9) + ROOT_TOLERANCE_ITERATIONS
    error = rate * (interval + these.stall_iterations) * small**2 / 24 / (these.decay_per_iteration + rate)
    assert interval - exact <= error * (1 + small**2) + 2 * ROOT_TOLERANCE_ITERATIONS + 1e-12 * interval


@given(st.floats(0.05, 24.0), st.floats(0.01, 30.0), st.floats(1e-3, 5.0))
def test_the_theorem_is_too_long_by_what_it_truncates(hours: float, stall: float, tau1: float) -> None:
    inputs = job(hours, stall_seconds=stall, phase=replace(PHASE, tau1_per_checkpoint=tau1))
    these = paper_terms(inputs)
    assert isinstance(these, PaperTerms)
    printed, whole = Theorem().choose(inputs), Untruncated().choose(inputs)
    assume(not printed.note and not whole.note and printed.interval_iterations < LONGEST)
    rate = these.rate_per_iteration
    excess = rate * these.stall_iterations / (these.decay_per_iteration + rate)
    assert printed.interval_iterations - whole.interval_iterations == pytest.approx(excess, abs=1.0)


def test_ten_minutes_between_failures_make_the_theorem_much_too_long() -> None:
    """B < 0 there: the part that the theorem drops is most of its answer. The example of docs/theorem.md."""
    phase = PhaseInputs(
        first_iteration=1000,
        last_iteration=3000,
        alpha1_per_iteration=3e-4,
        alpha2=1.8,
        tau1_per_checkpoint=0.05,
        tau2=-5.0,
        xi=1e-6,
        parameters=355_000_000,
    )
    inputs = PlannerInputs(0.6, stall_seconds=30.0, persist_seconds=5.0, failures_per_second=1 / 600, phase=phase)
    these = paper_terms(inputs)
    assert isinstance(these, PaperTerms)
    assert these.deviation_iterations == pytest.approx(32.9, abs=0.05)
    assert these.decay_per_iteration == pytest.approx(-7.0e-4)
    assert these.rate_per_iteration == pytest.approx(8.1e-4, abs=5e-6)
    chosen = [rule.choose(inputs) for rule in (Theorem(), Untruncated(), Exact())]
    assert [choice.interval_iterations for choice in chosen] == [447, 84, 83]
    assert not any(choice.note for choice in chosen)


@pytest.mark.parametrize(
    ("inputs", "interval", "word"),
    [
        (replace(JOB, phase=None), SHORTEST, "not known yet"),
        (replace(JOB, failures_per_second=0.0), LONGEST, "lambda = 0"),
        (replace(JOB, stall_seconds=0.0), SHORTEST, "T_s = 0"),
        (job(phase=replace(PHASE, tau1_per_checkpoint=0.0)), LONGEST, "tau1 <= 0"),
        (job(phase=replace(PHASE, tau1_per_checkpoint=-1.0)), LONGEST, "tau1 <= 0"),
        (job(phase=replace(PHASE, alpha1_per_iteration=0.0)), SHORTEST, "alpha1 <= 0"),
        (job(phase=replace(PHASE, xi=0.0)), LONGEST, "A = 0"),
        (job(phase=replace(PHASE, xi=-1.0)), SHORTEST, "xi"),
        (job(phase=replace(PHASE, tau2=2000.0)), SHORTEST, "not finite"),
        (replace(JOB, stall_seconds=math.nan), SHORTEST, "not known"),
        (job(phase=replace(PHASE, tau1_per_checkpoint=1e-9, tau2=0.0)), SHORTEST, "lambda sqrt"),
    ],
)
def test_where_the_theorem_has_no_solution_the_bounds_decide(inputs: PlannerInputs, interval: int, word: str) -> None:
    for rule in (Theorem(), Untruncated()):
        choice = rule.choose(inputs)
        assert choice.interval_iterations == interval
        assert word in choice.note
        assert "allowed interval is taken" in choice.note
    assert Exact().choose(inputs).interval_iterations == interval


def test_failures_that_outrun_the_loss_have_no_linear_solution_but_an_exact_one() -> None:
    """B + r < 0: the linear cost falls for ever, while the exact one has a minimum."""
    inputs = job(1 / 60, phase=replace(PHASE, tau1_per_checkpoint=1.0, tau2=-12.0), stall_seconds=2.0)
    for rule in (Theorem(), Untruncated()):
        assert rule.choose(inputs).interval_iterations == LONGEST
        assert "B + r <= 0" in rule.choose(inputs).note
    exact = Exact().choose(inputs)
    assert SHORTEST < exact.interval_iterations < LONGEST


@given(any_job())
def test_any_input_gives_an_interval(inputs: PlannerInputs) -> None:
    for rule in (Theorem(), Untruncated(), Exact()):
        choice = rule.choose(inputs)
        assert isinstance(choice, Choice)
        assert isinstance(choice.interval_iterations, int)
        assert SHORTEST <= choice.interval_iterations <= LONGEST


@given(st.floats(0.05, 24.0), st.floats(0.01, 30.0))
def test_more_failures_never_lengthen_the_exact_interval(hours: float, stall: float) -> None:
    """Where `A > T_s`: then the condition's right side grows faster with lambda than its left."""
    phase = replace(PHASE, tau2=-3.0)
    rare, frequent = (job(each, stall_seconds=stall, phase=phase) for each in (hours, hours / 2))
    these = paper_terms(rare)
    assert isinstance(these, PaperTerms)
    assert these.deviation_iterations > these.stall_iterations
    assert Exact().choose(frequent).interval_iterations <= Exact().choose(rare).interval_iterations
