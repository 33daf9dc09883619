"""The plan of a phase: one checkpoint interval, the mode of recovery, and why."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy

from cpsr.journal import PlanRow
from cpsr.planner.baselines import Baseline, baselines
from cpsr.planner.bounds import Limits, Mode, bounds_of
from cpsr.planner.choice import Choice, Rule
from cpsr.planner.explanation import explain
from cpsr.planner.inputs import PlannerInputs
from cpsr.planner.objective import cost_per_second
from cpsr.planner.pcip import Exact, Theorem, Untruncated
from cpsr.planner.ranks import Optimum, cheaper, job_of, memory_interval, optimum

__all__ = ["FORMS", "LEAST_COST", "Plan", "fixed_plan", "make_plan", "policy_names", "with_memory"]

MODES: tuple[Mode, ...] = ("predict", "recompute")
# The policy that takes the interval of least expected cost.
LEAST_COST = "cpsr"
# The paper's own answers to its problem.
FORMS: Mapping[str, Rule] = {"theorem1": Theorem(), "untruncated": Untruncated(), "sinh": Exact()}


@dataclass(frozen=True, slots=True)
class Plan:
    """A checkpoint interval with its origin and its explanation (plain data, no NaN, units in the keys).

    Attributes:
        interval_iterations: between checkpoints.
        origin: the policy that chose it.
        explanation: inputs, rule, bounds, costs and the choices of the baselines.
        mode: how a failure is expected to be recovered; None if the plan did not choose.
        memory_interval_iterations: between snapshots in host memory, from 1 to the interval between checkpoints; of
            windows their length; None: there are none.
    """

    interval_iterations: int
    origin: str
    explanation: Mapping[str, Any]
    mode: Mode | None = None
    memory_interval_iterations: int | None = None

    def row(self, life: int, from_iteration: int) -> PlanRow:
        """Its row in the journal."""
        return PlanRow(
            life=life,
            from_iteration=from_iteration,
            interval_iterations=self.interval_iterations,
            origin=self.origin,
            memory_interval_iterations=self.memory_interval_iterations,
            mode=self.mode,
            explanation=self.explanation,
        )


def fixed_plan(interval_iterations: int, memory_interval_iterations: int | None = None) -> Plan:
    """The interval that the user set; no bound and no measurement changes it.

    Args:
        interval_iterations: of the checkpoints.
        memory_interval_iterations: between snapshots in host memory, as long as it is not planned.

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
        memory_interval_iterations=memory_interval_iterations,
    )


def with_memory(
    plan: Plan,
    ranks: Sequence[PlannerInputs],
    limits: Limits,
    recovery_mode: Literal["auto", "predict", "exact"] = "auto",
) -> Plan:
    """A plan of a fixed interval, with the best interval in memory beside it, and what failures then cost.

    Where the disk needs longer than the interval, the costs are those at the interval that it manages.

    Args:
        plan: of the fixed interval.
        ranks: inputs of each.
        limits: of the predictor; the fixed interval takes the place of the user's.
        recovery_mode: the configured one.
    """
    interval = plan.interval_iterations
    fixed = replace(limits, interval_min_iterations=interval, interval_max_iterations=interval)
    planned = make_plan(ranks, fixed, recovery_mode=recovery_mode)
    memory = planned.explanation["memory"]
    if memory is not None and not memory["windows"] and memory["interval_iterations"] > interval:
        planned = make_plan([_with_snapshots(rank, interval) for rank in ranks], fixed, recovery_mode=recovery_mode)
        memory = {**planned.explanation["memory"], "configured_iterations": memory["configured_iterations"]}
    found = {name: planned.explanation[name] for name in ("expected", "classes", "prices")}
    return replace(
        plan,
        memory_interval_iterations=planned.memory_interval_iterations,
        explanation={**plan.explanation, **found, "memory": memory},
    )


def policy_names(rules: Mapping[str, Baseline] | None = None) -> list[str]:
    """Every policy of `make_plan`: the least cost, the paper's forms, the baselines."""
    return [LEAST_COST, *FORMS, *(baselines() if rules is None else rules)]


def make_plan(
    ranks: Sequence[PlannerInputs],
    limits: Limits,
    policy: str = LEAST_COST,
    recovery_mode: Literal["auto", "predict", "exact"] = "auto",
    rules: Mapping[str, Baseline] | None = None,
) -> Plan:
    """The interval and the mode for the coming phase.

    The policy of least cost finds the best interval of each mode inside its bounds, and takes the cheaper mode. Any
    other policy chooses one interval, which is clamped to the bounds, and the cheaper mode at that interval.

    Args:
        ranks: inputs of each rank, in their order; one entry if only the job is known.
        limits: of the user and the predictor.
        policy: one of `policy_names(rules)`.
        recovery_mode: auto takes the cheaper mode; predict predicts if possible; exact always recomputes.
        rules: baselines by name; by default all, at a tolerated overhead of 2%.

    Raises:
        ValueError: no ranks, or an unknown policy.
    """
    if not ranks:
        raise ValueError("a plan needs the inputs of at least one rank")
    others = baselines() if rules is None else rules
    known: dict[str, Rule] = {**FORMS, **others}
    if policy != LEAST_COST and policy not in known:
        raise ValueError(f"unknown policy {policy!r}; known: {', '.join(policy_names(others))}")
    job = job_of(ranks)
    modes = _modes(recovery_mode, job, limits)
    notes: list[str] = []
    by_mode = {mode: optimum(job, limits, mode) for mode in MODES}
    if policy == LEAST_COST:
        chosen = cheaper([by_mode[mode] for mode in modes])
    else:
        choice = known[policy].choose(job)
        notes.append(choice.note)
        chosen = cheaper([_bounded(job, limits, mode, choice) for mode in modes])
    if recovery_mode == "predict" and chosen.mode == "recompute":
        notes.append("prediction is not possible at any allowed interval; failures are recomputed")
    every = memory_interval(job, chosen.interval_iterations)
    explanation = explain(job, limits, policy, chosen, by_mode, FORMS, others, notes)
    return Plan(chosen.interval_iterations, policy, explanation, chosen.mode, every)


def _with_snapshots(rank: PlannerInputs, every: int) -> PlannerInputs:
    """With so many iterations between snapshots, where there are any."""
    return rank if rank.memory is None else replace(rank, memory=replace(rank.memory, interval_iterations=every))


def _modes(recovery_mode: str, job: PlannerInputs, limits: Limits) -> Sequence[Mode]:
    """The allowed and possible modes; recomputing is always possible."""
    possible = job.recovery is not None and bounds_of(job, limits, "predict") is not None
    if recovery_mode == "exact" or not possible:
        return ("recompute",)
    return ("predict",) if recovery_mode == "predict" else MODES


def _bounded(job: PlannerInputs, limits: Limits, mode: Mode, choice: Choice) -> Optimum | None:
    """A rule's interval, clamped to the bounds of a mode, with its cost there."""
    bounds = bounds_of(job, limits, mode)
    if bounds is None:
        return None
    interval, bound = bounds.clamp(choice.interval_iterations)
    cost = float(cost_per_second(job, numpy.array([float(interval)]), mode)[0])
    cost = cost if math.isfinite(cost) else math.inf
    return Optimum(interval, mode, cost, bounds, bound, memory_interval(job, interval))
