"""The plan of a phase: one checkpoint interval, the mode of recovery, and why."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy

from cpsr.journal import PlanRow
from cpsr.planner.cost import Costs, cheapest
from cpsr.planner.explanation import Optimum, explain
from cpsr.planner.inputs import Bound, Bounds, Limits, Mode, PlannerInputs, bounds_of
from cpsr.planner.policies import POLICIES, Choice, Rule

__all__ = ["LEAST_COST", "Plan", "RecoveryMode", "fixed_plan", "make_plan", "optimum", "policy_names", "with_memory"]

MODES: tuple[Mode, ...] = ("predict", "recompute")
RecoveryMode = Literal["auto", "predict", "exact"]
# The policy that takes the interval of least expected cost.
LEAST_COST = "cpsr"


@dataclass(frozen=True, slots=True)
class Plan:
    """A checkpoint interval with its origin and its explanation (plain data, no NaN, units in the keys).

    Attributes:
        interval_iterations: between checkpoints.
        origin: the policy that chose it.
        explanation: inputs, rule, bounds, costs and the choices of other rules.
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


def with_memory(plan: Plan, job: PlannerInputs, limits: Limits, recovery_mode: RecoveryMode = "auto") -> Plan:
    """A plan of a fixed interval, with the best interval in memory beside it, and what failures then cost.

    Where the disk needs longer than the interval, the costs are those at the interval that it manages.

    Args:
        plan: of the fixed interval.
        job: its inputs.
        limits: of the predictor; the fixed interval takes the place of the user's.
        recovery_mode: the configured one.
    """
    interval = plan.interval_iterations
    fixed = replace(limits, interval_min_iterations=interval, interval_max_iterations=interval)
    planned = make_plan(job, fixed, recovery_mode=recovery_mode)
    memory = planned.explanation["memory"]
    if memory is not None and not memory["windows"] and memory["interval_iterations"] > interval:
        assert job.memory is not None  # it is what was explained
        within = replace(job, memory=replace(job.memory, interval_iterations=interval))
        planned = make_plan(within, fixed, recovery_mode=recovery_mode)
        memory = {**planned.explanation["memory"], "configured_iterations": memory["configured_iterations"]}
    found = {name: planned.explanation[name] for name in ("expected", "classes", "prices")}
    return replace(
        plan,
        memory_interval_iterations=planned.memory_interval_iterations,
        explanation={**plan.explanation, **found, "memory": memory},
    )


def policy_names(rules: Mapping[str, Rule] = POLICIES) -> list[str]:
    """Every policy of `make_plan`: the least cost, and the rules."""
    return [LEAST_COST, *rules]


def make_plan(
    job: PlannerInputs,
    limits: Limits,
    policy: str = LEAST_COST,
    recovery_mode: RecoveryMode = "auto",
    rules: Mapping[str, Rule] = POLICIES,
) -> Plan:
    """The interval and the mode for the coming phase.

    The policy of least cost finds the best interval of each mode inside its bounds, and takes the cheaper mode. Any
    other policy chooses one interval, which is clamped to the bounds, and the cheaper mode at that interval.

    Args:
        job: its inputs.
        limits: of the user and the predictor.
        policy: one of `policy_names(rules)`.
        recovery_mode: auto takes the cheaper mode; predict predicts if possible; exact always recomputes.
        rules: by name; other than the usual ones in simulations.

    Raises:
        ValueError: an unknown policy.
    """
    if policy != LEAST_COST and policy not in rules:
        raise ValueError(f"unknown policy {policy!r}; known: {', '.join(policy_names(rules))}")
    by_mode = {mode: optimum(job, limits, mode) for mode in MODES}
    modes = _allowed(recovery_mode, by_mode)
    notes: list[str] = []
    if policy == LEAST_COST:
        chosen = _cheaper([by_mode[mode] for mode in modes])
    else:
        choice = rules[policy].choose(job)
        notes.append(choice.note)
        chosen = _cheaper([_bounded(job, limits, mode, choice) for mode in modes])
    if recovery_mode == "predict" and chosen.mode == "recompute":
        notes.append("prediction is not possible at any allowed interval; failures are recomputed")
    explanation = explain(job, limits, policy, chosen, by_mode, rules, notes)
    return Plan(chosen.interval_iterations, policy, explanation, chosen.mode, chosen.memory_interval_iterations)


def optimum(job: PlannerInputs, limits: Limits, mode: Mode) -> Optimum | None:
    """The interval of least cost in one mode; None if prediction is not possible.

    Args:
        job: its inputs.
        limits: of the user and the predictor.
        mode: how failures are recovered from.
    """
    bounds = bounds_of(job, limits, mode)
    if bounds is None:
        return None
    costs = Costs(job)
    interval = cheapest(lambda grid: costs.per_second(grid, mode), bounds.minimum_iterations, bounds.maximum_iterations)
    around = numpy.maximum(numpy.array([interval - 1.0, interval, interval + 1.0]), 1.0)
    three: list[float] = costs.per_second(around, mode).tolist()
    return _optimum(costs, interval, mode, three[1], bounds, _active(interval, three, bounds))


def _allowed(recovery_mode: RecoveryMode, by_mode: Mapping[Mode, Optimum | None]) -> tuple[Mode, ...]:
    """The allowed and possible modes; recomputing is always possible."""
    if recovery_mode == "exact" or by_mode["predict"] is None:
        return ("recompute",)
    return ("predict",) if recovery_mode == "predict" else MODES


def _bounded(job: PlannerInputs, limits: Limits, mode: Mode, choice: Choice) -> Optimum | None:
    """A rule's interval, clamped to the bounds of a mode, with its cost there."""
    bounds, costs = bounds_of(job, limits, mode), Costs(job)
    if bounds is None:
        return None
    interval, bound = bounds.clamp(choice.interval_iterations)
    cost = float(costs.per_second(numpy.array([float(interval)]), mode)[0])
    return _optimum(costs, interval, mode, cost, bounds, bound)


def _optimum(costs: Costs, interval: int, mode: Mode, cost: float, bounds: Bounds, bound: Bound) -> Optimum:
    every = None if costs.snapshots is None else int(costs.snapshots.best(numpy.array([float(interval)]))[0])
    return Optimum(interval, mode, cost if math.isfinite(cost) else math.inf, bounds, bound, every)


def _cheaper(options: list[Optimum | None]) -> Optimum:
    """The option of least cost; recomputing if both cost the same. At least one option must be possible."""
    able = [option for option in options if option is not None]
    return min(able, key=lambda option: (option.cost_per_second, option.mode == "predict"))


def _active(interval: int, costs: list[float], bounds: Bounds) -> Bound:
    """The bound at which the cost still falls outwards; `costs` are those one below, at, and one above the interval."""
    below, at, above = costs
    if interval == bounds.minimum_iterations and interval > 1 and (below < at or not math.isfinite(at)):
        return bounds.minimum_by
    if interval == bounds.maximum_iterations and above < at:
        return bounds.maximum_by
    return "none"
