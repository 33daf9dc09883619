"""The plan of a phase: one checkpoint interval, the mode of recovery, and why."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy

from cpsr.planner.bounds import Limits, Mode, bounds_of
from cpsr.planner.choice import Choice, Rule
from cpsr.planner.explanation import explain, explain_ranks
from cpsr.planner.inputs import PlannerInputs
from cpsr.planner.objective import cost_per_second
from cpsr.planner.pcip import Exact, Theorem, Untruncated
from cpsr.planner.ranks import Optimum, cheaper, job_of, multiples, optima
from cpsr.planner.rivals import Rival, rivals

__all__ = ["FORMS", "LEAST_COST", "Plan", "fixed_plan", "make_plan", "policy_names"]

MODES: tuple[Mode, ...] = ("predict", "recompute")
# The policy that takes the interval of least expected cost.
LEAST_COST = "cpsr"
# The paper's own answers to its problem.
FORMS: Mapping[str, Rule] = {"theorem1": Theorem(), "untruncated": Untruncated(), "sinh": Exact()}


@dataclass(frozen=True, slots=True)
class Plan:
    """A checkpoint interval with its origin and its explanation (plain data, no NaN, units in the keys).

    Attributes:
        interval_iterations: of the job; where ranks have their own, the base that all are multiples of.
        origin: the policy that chose it.
        explanation: inputs, rule, bounds, costs and what others would have chosen.
        mode: what a failure is expected to be recovered by; None where the plan did not choose.
        rank_interval_iterations: of every rank, the base times a power of two; empty where all take the job's.
    """

    interval_iterations: int
    origin: str
    explanation: Mapping[str, Any]
    mode: Mode | None = None
    rank_interval_iterations: tuple[int, ...] = ()

    @property
    def largest_multiple(self) -> int:
        """Base intervals between two checkpoints of all ranks."""
        return max(self.rank_interval_iterations, default=self.interval_iterations) // self.interval_iterations

    def multiple_of(self, rank: int) -> int:
        """Base intervals between two checkpoints of one rank."""
        if not self.rank_interval_iterations:
            return 1
        return self.rank_interval_iterations[rank] // self.interval_iterations


def fixed_plan(interval_iterations: int) -> Plan:
    """The interval that the user set; no bound and no measurement changes it.

    Raises:
        ValueError: it is less than 1.
    """
    if interval_iterations < 1:
        raise ValueError(f"interval_iterations must be at least 1, not {interval_iterations}")
    return Plan(
        interval_iterations,
        "fixed",
        {
            "rule": "fixed by the configuration key checkpoint.interval_iterations",
            "inputs": {"interval_iterations": interval_iterations},
            "bound": "none",
            "notes": [],
        },
    )


def policy_names(rules: Mapping[str, Rival] | None = None) -> list[str]:
    """Every policy that `make_plan` knows: the least cost, the paper's forms, the rivals."""
    return [LEAST_COST, *FORMS, *(rivals() if rules is None else rules)]


def make_plan(
    ranks: Sequence[PlannerInputs],
    limits: Limits,
    policy: str = LEAST_COST,
    recovery_mode: Literal["auto", "predict", "exact"] = "auto",
    intervals: Literal["common", "per_rank"] = "common",
    rules: Mapping[str, Rival] | None = None,
) -> Plan:
    """The interval and the mode for the coming phase.

    With the policy of least cost, each mode has its own best interval inside its bounds, and the cheaper one is taken.
    Any other policy names one interval, which is moved inside the bounds, and the cheaper mode there is taken.

    Args:
        ranks: what is known of each rank, in their order; one entry where only the job is known.
        limits: of the user and the predictor.
        policy: one of `policy_names(rules)`.
        recovery_mode: auto is the cheaper of the two; predict where it is possible; exact is to recompute always.
        intervals: one for the job, or multiples of a common base where failures are to be predicted: between the
            checkpoints of all ranks there is none to recompute from.
        rules: rivals by name; by default all, at a tolerated overhead of 2%.

    Raises:
        ValueError: there is no rank, or the policy is unknown.
    """
    if not ranks:
        raise ValueError("a plan needs the inputs of at least one rank")
    others = rivals() if rules is None else rules
    known: dict[str, Rule] = {**FORMS, **others}
    if policy != LEAST_COST and policy not in known:
        raise ValueError(f"unknown policy {policy!r}; known: {', '.join(policy_names(others))}")
    job = job_of(ranks)
    modes = _modes(recovery_mode, job, limits)
    notes: list[str] = []
    by_mode = {mode: optima([job], limits, mode)[0] for mode in MODES}
    if policy == LEAST_COST:
        chosen = cheaper([by_mode[mode] for mode in modes])
    else:
        choice = known[policy].choose(job)
        notes.append(choice.note)
        chosen = cheaper([_bounded(job, limits, mode, choice) for mode in modes])
    if recovery_mode == "predict" and chosen.mode == "recompute":
        notes.append("prediction is not possible at any interval that is allowed; failures are recomputed")
    base, rank_intervals = chosen.interval_iterations, tuple[int, ...]()
    own = _own(ranks, limits, modes if intervals == "common" or chosen.mode == "recompute" else (chosen.mode,))
    if intervals == "per_rank" and chosen.mode == "recompute":
        notes.append("failures are recomputed, from checkpoints of all ranks: these have one interval")
    elif intervals == "per_rank":
        taken = own if policy == LEAST_COST else _ruled(ranks, limits, own, known[policy])
        rank_intervals = multiples(ranks, taken)
        base = min(best.interval_iterations for best in taken)
        notes.append(
            f"each rank has its own interval; the expected cost is that of {chosen.interval_iterations} for all of them"
        )
    explanation = explain(job, limits, policy, chosen, by_mode, FORMS, others, notes)
    if len(ranks) > 1:
        explanation["ranks"] = explain_ranks(own, rank_intervals)
    return Plan(base, policy, explanation, chosen.mode, rank_intervals)


def _modes(recovery_mode: str, job: PlannerInputs, limits: Limits) -> Sequence[Mode]:
    """The modes that are allowed and possible; recomputing always is."""
    possible = job.recovery is not None and bounds_of(job, limits, "predict") is not None
    if recovery_mode == "exact" or not possible:
        return ("recompute",)
    return ("predict",) if recovery_mode == "predict" else MODES


def _bounded(job: PlannerInputs, limits: Limits, mode: Mode, choice: Choice) -> Optimum | None:
    """A rule's interval inside the bounds of a mode, with its cost there."""
    bounds = bounds_of(job, limits, mode)
    if bounds is None:
        return None
    interval, bound = bounds.clamp(choice.interval_iterations)
    cost = float(cost_per_second(job, numpy.array([float(interval)]), mode)[0])
    return Optimum(interval, mode, cost if math.isfinite(cost) else math.inf, bounds, bound)


def _own(ranks: Sequence[PlannerInputs], limits: Limits, modes: Sequence[Mode]) -> list[Optimum]:
    """What each rank would take alone, in the cheaper of the job's modes."""
    columns = [optima(ranks, limits, mode) for mode in modes]
    if modes == ("predict",):
        columns.append(optima(ranks, limits, "recompute"))
        return [predicted or recomputed for predicted, recomputed in zip(*columns, strict=True)]
    return [cheaper(options) for options in zip(*columns, strict=True)]


def _ruled(ranks: Sequence[PlannerInputs], limits: Limits, own: Sequence[Optimum], rule: Rule) -> list[Optimum]:
    """A rule's interval for each rank, in the mode of its own optimum, which is possible."""
    found = [_bounded(rank, limits, best.mode, rule.choose(rank)) for rank, best in zip(ranks, own, strict=True)]
    return [one for one in found if one is not None]
