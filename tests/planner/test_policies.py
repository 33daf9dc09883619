"""The rules of a running job: by hand, at the limits, and against what they approximate."""

import math
from dataclasses import replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.planner.inputs import PhaseInputs, PlannerInputs
from cpsr.planner.policies import LONGEST, SHORTEST, PaperTerms, Rule, daly, paper_terms, theorem1, young
from tests.planner.jobs import HOUR, JOB, PHASE, job


def chosen(rule: Rule, **fields: float) -> int:
    return rule(job(**fields)).interval_iterations


@pytest.mark.parametrize("rule", [young, daly])
def test_without_failures_or_stalls_the_bounds_decide(rule: Rule) -> None:
    assert chosen(rule, stall_seconds=0.0) == SHORTEST
    assert rule(replace(JOB, failures_per_second=0.0)).interval_iterations == LONGEST


@given(st.floats(0.1, 1000.0), st.floats(0.05, 100.0))
def test_daly_is_the_minimum_of_his_wall_time(stall: float, mtbf_hours: float) -> None:
    """`M exp(R / M) (exp((T_c + T_s) / M) - 1) / T_c` per second of work; the restart R moves nothing."""
    mtbf, seconds = mtbf_hours * HOUR, 0.01
    if stall > mtbf / 2:
        return  # his expansion is for T_s < M / 2

    def wall_time(interval: float) -> float:
        return mtbf * math.expm1((interval + stall) / mtbf) / interval

    by_daly = chosen(daly, mtbf_hours=mtbf_hours, stall_seconds=stall, iteration_seconds=seconds) * seconds
    every = numpy.geomspace(stall / 100, 10 * mtbf, 20_000)
    with numpy.errstate(over="ignore"):
        least = float(numpy.min(mtbf * numpy.expm1((every + stall) / mtbf) / every))
    assert wall_time(by_daly) <= least * 1.001
    by_young = chosen(young, mtbf_hours=mtbf_hours, stall_seconds=stall, iteration_seconds=seconds) * seconds
    assert wall_time(by_daly) <= wall_time(by_young) * (1 + 1e-6)


def test_terms_are_in_iterations() -> None:
    found = paper_terms(JOB)
    assert isinstance(found, PaperTerms)
    assert found.stall_iterations == pytest.approx(1.5)
    assert found.failures_per_iteration == pytest.approx(0.6 / 43200)
    # xi N_p tau1 e^(tau2 - alpha2) / (2 alpha1)
    assert found.deviation_iterations == pytest.approx(1e-6 * 355e6 * 0.05 * math.exp(-9 - 1.8) / 6e-4)
    assert found.decay_per_iteration == pytest.approx(3e-4 - 0.6 / 43200)


@pytest.mark.parametrize(
    ("inputs", "interval", "word"),
    [
        (replace(JOB, failures_per_second=0.0), LONGEST, "lambda = 0"),
        (replace(JOB, stall_seconds=0.0), SHORTEST, "T_s = 0"),
        (job(phase=replace(PHASE, xi=0.0)), LONGEST, "A = 0"),
        (job(phase=replace(PHASE, tau1_per_checkpoint=1e-9, tau2=0.0)), SHORTEST, "lambda sqrt"),
    ],
)
def test_where_the_theorem_has_no_solution_the_bounds_decide(inputs: PlannerInputs, interval: int, word: str) -> None:
    choice = theorem1(inputs)
    assert choice.interval_iterations == interval
    assert word in choice.note
    assert "allowed interval is taken" in choice.note


NOT_YET = st.floats(-1.0, 0.0)


@given(
    st.integers(1, 10_000),
    st.none()
    | st.builds(replace, st.just(PHASE), tau1_per_checkpoint=NOT_YET)
    | st.builds(replace, st.just(PHASE), tau1_low_per_checkpoint=NOT_YET, tau1_per_checkpoint=st.floats(-1.0, 1.0))
    | st.builds(replace, st.just(PHASE), alpha1_per_iteration=NOT_YET)
    | st.builds(replace, st.just(PHASE), tau2=st.floats(2000.0, 3000.0)),
)
def test_what_does_not_speak_for_another_interval_leaves_the_present_one(
    interval: int, phase: PhaseInputs | None
) -> None:
    choice = theorem1(replace(JOB, phase=phase, interval_iterations=interval))
    assert choice.interval_iterations == interval
    assert "stays as it is" in choice.note


def test_failures_that_outpace_the_loss_leave_the_present_interval() -> None:
    """Failures every 60 s at a decay of 3e-4: the printed interval would be negative."""
    often = job(mtbf_hours=1 / 60, interval_iterations=40)
    terms = paper_terms(often)
    assert isinstance(terms, PaperTerms)
    assert terms.decay_per_iteration + terms.rate_per_iteration < 0
    choice = theorem1(often)
    assert choice.interval_iterations == 40
    assert "B + r" in choice.note


@given(st.integers(1, 10_000), st.floats(1e-4, 0.5), st.floats(1e-6, 1.0))
def test_beyond_chance_the_theorem_chooses_whatever_the_present_interval(
    interval: int, tau1: float, share: float
) -> None:
    phase = replace(PHASE, tau1_per_checkpoint=tau1, tau1_low_per_checkpoint=share * tau1)
    certain = replace(phase, tau1_low_per_checkpoint=None)
    held = replace(JOB, phase=phase, interval_iterations=interval)
    assert theorem1(held) == theorem1(replace(JOB, phase=certain))
