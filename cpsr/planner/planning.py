"""Makes a plan: one checkpoint interval, the mode of recovery, what failures then cost, and why."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy

from cpsr.journal import FailureScope, json_ready
from cpsr.planner.cost import Costs, cheapest
from cpsr.planner.inputs import (
    SECONDS_PER_HOUR,
    Array,
    Bound,
    Bounds,
    FailureClass,
    Limits,
    MemoryTier,
    Mode,
    PhaseInputs,
    PlannerInputs,
    bounds_of,
    plain,
)
from cpsr.planner.plan import Plan, exact_price, predicted_price
from cpsr.planner.policies import POLICIES, Choice, Rule
from cpsr.planner.recovery_curve import EndCostCurve

__all__ = [
    "LEAST_COST",
    "RecoveryMode",
    "make_plan",
    "optimum",
    "policy_names",
    "preview",
    "with_memory",
]

MODES: tuple[Mode, ...] = ("predict", "recompute")
RecoveryMode = Literal["auto", "predict", "exact"]
# The policy that takes the interval of least expected cost.
LEAST_COST = "cpsr"
RULES = {
    LEAST_COST: "the interval at which stalls and failures together are expected to cost least",
    "theorem1": "CPSR, Theorem 1 as printed: tau1 / (B + r)",
    "young": "Young 1974: sqrt(2 * stall_seconds * mtbf_seconds) / iteration_seconds",
    "daly": "Daly 2006, higher order",
}
_ALL: Mapping[FailureScope, FailureClass] = {"everything": FailureClass(1.0, 1.0)}


@dataclass(frozen=True)
class Optimum:
    """The interval that was chosen in one mode.

    Attributes:
        interval_iterations: inside the bounds.
        mode: how failures are recovered from.
        cost_per_second: seconds lost per second, without restarts; infinite if an input is unknown.
        bounds: of the mode.
        bound: the active one; without it another interval would be cheaper.
        memory_interval_iterations: between snapshots in host memory, at most the interval; None without any.
    """

    interval_iterations: int
    mode: Mode
    cost_per_second: float
    bounds: Bounds
    bound: Bound
    memory_interval_iterations: int | None = None


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
    modes = MODES
    if recovery_mode == "exact" or by_mode["predict"] is None:
        modes = ("recompute",)
    elif recovery_mode == "predict":
        modes = ("predict",)
    notes: list[str] = []
    if policy == LEAST_COST:
        options = [by_mode[mode] for mode in modes]
    else:
        choice = rules[policy](job)
        notes.append(choice.note)
        options = [_bounded(job, limits, mode, choice) for mode in modes]
    possible = [one for one in options if one is not None]  # recomputing always is
    chosen = min(possible, key=lambda one: (one.cost_per_second, one.mode == "predict"))
    if recovery_mode == "predict" and chosen.mode == "recompute":
        notes.append("prediction is not possible at any allowed interval; failures are recomputed")
    explanation = _explanation(job, limits, policy, recovery_mode, chosen, by_mode, rules, notes)
    return Plan(chosen.interval_iterations, policy, explanation, chosen.mode, chosen.memory_interval_iterations)


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
    every = planned.memory_interval_iterations
    if every is not None and job.memory is not None and not job.memory.window:
        every = min(every, interval)
    found = {name: planned.explanation[name] for name in ("expected", "classes")}
    return replace(plan, memory_interval_iterations=every, explanation={**plan.explanation, **found})


def preview(explanation: Mapping[str, Any], mtbf_hours: float, recovery_mode: RecoveryMode) -> Plan | None:
    """A plan of a running job at another failure rate; None if it was not made from measurements.

    Args:
        explanation: of the plan.
        mtbf_hours: mean time between failures of the job.
        recovery_mode: the configured one.
    """
    if "inputs" not in explanation:
        return None
    recorded, bounds = dict(explanation["inputs"]), explanation["bounds"]
    phase, memory, recovery = (recorded.pop(name) for name in ("phase", "memory", "recovery"))
    try:
        job = PlannerInputs(
            **recorded
            | {
                "failures_per_second": 1 / (mtbf_hours * SECONDS_PER_HOUR),
                "classes": {scope: FailureClass(**one) for scope, one in recorded["classes"].items()},
                "phase": None if phase is None else PhaseInputs(**phase),
                "memory": None if memory is None else MemoryTier(**memory),
                "recovery": None if recovery is None else EndCostCurve(**recovery),
            }
        )
    except TypeError:  # another version has written it, which has other inputs
        return None
    names = "interval_min_iterations", "interval_max_iterations", "predictable_interval_iterations"
    return make_plan(job, Limits(*(bounds[name] for name in names)), explanation["policy"], recovery_mode)


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
    below, at, above = costs.per_second(around, mode).tolist()
    bound: Bound = "none"  # or the one at which the cost still falls outwards
    if interval == bounds.minimum_iterations and interval > 1 and (below < at or not math.isfinite(at)):
        bound = bounds.minimum_by
    elif interval == bounds.maximum_iterations and above < at:
        bound = bounds.maximum_by
    return _optimum(costs, interval, mode, at, bounds, bound)


def _bounded(job: PlannerInputs, limits: Limits, mode: Mode, choice: Choice) -> Optimum | None:
    """A rule's interval, clamped to the bounds of a mode, with its cost there."""
    bounds, costs = bounds_of(job, limits, mode), Costs(job)
    if bounds is None:
        return None
    interval, bound = bounds.clamp(choice.interval_iterations)
    return _optimum(costs, interval, mode, float(costs.per_second(_array(interval), mode)[0]), bounds, bound)


def _optimum(costs: Costs, interval: int, mode: Mode, cost: float, bounds: Bounds, bound: Bound) -> Optimum:
    every = None if costs.snapshots is None else int(costs.snapshots.best(_array(interval))[0])
    return Optimum(interval, mode, cost if math.isfinite(cost) else math.inf, bounds, bound, every)


def _array(interval: float) -> Array:
    return numpy.array([float(interval)])


def _goes_back(job: PlannerInputs, chosen: Optimum, scope: FailureScope) -> tuple[str, float]:
    """What a failure of a class goes back to, and the seconds of training that it is expected to cost.

    Source: the ladder of docs/tiers.md; a restart takes its steps in the same order (`cpsr.restart.choice`).
    """
    costs, disk = Costs(job), _array(chosen.interval_iterations)
    recomputed = float(costs.recovery_seconds(disk, "recompute")[0])
    from_disk = "disk", recomputed
    if chosen.mode == "predict":
        predicted = float(costs.recovery_seconds(disk, "predict")[0])
        if math.isfinite(predicted):  # else no life lasts until a checkpoint is durable
            from_disk = "predicted", predicted
    memory, snapshots, every = job.memory, costs.snapshots, chosen.memory_interval_iterations
    if memory is None or snapshots is None or every is None:
        return from_disk
    if scope == "process":
        place, seconds = "memory", float(snapshots.process_seconds(_array(every))[0])
    elif scope == "machine" and memory.replica_seconds is not None:
        place, seconds = "replica", float(snapshots.machine_seconds(_array(every), disk)[0])
    else:
        return from_disk
    if not memory.window:
        return place, seconds
    # A window may be longer than the interval of the disk.
    return ("window", seconds) if seconds <= recomputed else from_disk


# The explanation: JSON values for the journal, the service and the command line, with units in the keys


def _explanation(
    job: PlannerInputs,
    limits: Limits,
    policy: str,
    recovery_mode: RecoveryMode,
    chosen: Optimum,
    by_mode: Mapping[Mode, Optimum | None],
    rules: Mapping[str, Rule],
    notes: Sequence[str],
) -> dict[str, Any]:
    classes = job.classes or _ALL
    # Mode `predict` predicts before it takes what is in memory.
    found = replace(job, memory=None) if recovery_mode == "predict" and chosen.mode == "predict" else job
    back = {scope: _goes_back(found, chosen, scope) for scope in classes}
    bounds = {name: value for name, value in vars(chosen.bounds).items() if name != "notes"}
    return {
        "rule": RULES.get(policy, policy),
        "policy": policy,
        "mode": chosen.mode,
        "bound": chosen.bound,
        "bounds": {**bounds, **vars(limits)},
        "inputs": _inputs(job),
        "expected": _expected(job, chosen, back),
        "classes": {scope: _class(job, classes[scope], *way) for scope, way in back.items()},
        "modes": {mode: _option(job, best) for mode, best in by_mode.items()},
        "rivals": {name: _rival(job, name, rule) for name, rule in rules.items()},
        "notes": [note for note in (*notes, *chosen.bounds.notes) if note],
    }


def _inputs(job: PlannerInputs) -> dict[str, Any]:
    """All of them as JSON values, from which `preview` makes a plan again; of a curve that is no line, its source."""
    curve = job.recovery
    recovery: dict[str, Any] | None = None if curve is None else {"source": curve.source}
    if isinstance(curve, EndCostCurve):
        recovery = asdict(curve)
    found: dict[str, Any] = json_ready(asdict(replace(job, recovery=None)) | {"recovery": recovery})
    return found


def _expected(job: PlannerInputs, chosen: Optimum, back: Mapping[FailureScope, tuple[str, float]]) -> dict[str, Any]:
    """The expected costs of the plan, in seconds per second of wall time and per failure."""
    interval, costs, rate = _array(chosen.interval_iterations), Costs(job), job.failures_per_second
    classes = (job.classes or _ALL).items()
    recovery = rate * sum(one.share * back[scope][1] for scope, one in classes if one.share > 0)
    stall = float(costs.stall_per_second(interval, chosen.mode)[0]) + _memory_stall_per_second(job, chosen)
    return {
        "cost_per_second": plain(chosen.cost_per_second),
        "stall_per_second": plain(stall),
        "recovery_per_second": plain(recovery),
        "restart_per_second": plain(rate * job.restart_seconds),
        "recovery_seconds_per_failure": plain(recovery / rate if rate > 0 else math.nan),
        "horizon_iterations": plain(float(costs.horizon_iterations(interval, chosen.mode)[0])),
        "failure": _failure(job, chosen),
    }


def _memory_stall_per_second(job: PlannerInputs, chosen: Optimum) -> float:
    """Share of the wall time in stalls of the snapshots in memory alone."""
    snapshots, every = Costs(job).snapshots, chosen.memory_interval_iterations
    if snapshots is None or every is None:
        return 0.0
    return float(snapshots.stall_per_second(_array(every), _array(chosen.interval_iterations))[0])


def _class(job: PlannerInputs, one: FailureClass, back_to: str, seconds: float) -> dict[str, Any]:
    """A class of failures: how often it is expected, what one goes back to, and what that costs."""
    rate = one.share * job.failures_per_second
    return {
        "failures_per_second": plain(rate),
        "share": plain(one.share),
        "prior_share": one.prior_share,
        "seen": one.seen,
        "back_to": back_to,
        "loss_iterations": plain(seconds / job.iteration_seconds),
        "loss_per_second": plain(rate * seconds),
    }


def _option(job: PlannerInputs, best: Optimum | None) -> dict[str, Any] | str:
    if best is None:
        return "not possible"
    return {
        "interval_iterations": best.interval_iterations,
        "cost_per_second": plain(best.cost_per_second),
        "bound": best.bound,
        "failure": _failure(job, best),
    }


def _failure(job: PlannerInputs, chosen: Optimum) -> str:
    """How a failure is paid for in the mode of the optimum, at the mean distance from its checkpoint."""
    interval = float(chosen.interval_iterations)
    horizon = float(Costs(job).horizon_iterations(_array(interval), chosen.mode)[0])
    if chosen.mode == "recompute" or job.recovery is None or not math.isfinite(horizon):
        return exact_price(horizon)
    cost = float(job.recovery.end_cost_iterations(_array(horizon), interval)[0])
    curve = job.recovery if isinstance(job.recovery, EndCostCurve) else None
    deviation = 0.0 if curve is None else curve.deviation_per_horizon_iteration * horizon  # else unknown
    return f"{predicted_price(cost, deviation)}, net of what a move gains"


def _rival(job: PlannerInputs, name: str, rule: Rule) -> dict[str, Any]:
    """What a rule would choose before any bound, and its cost in one tier: of its own kind of recovery."""
    choice = rule(job)
    mode: Mode = "predict" if name == "theorem1" and job.recovery is not None else "recompute"
    cost = Costs(replace(job, memory=None)).per_second(_array(choice.interval_iterations), mode)
    return {
        "interval_iterations": choice.interval_iterations,
        "cost_per_second": plain(float(cost[0])),
        "note": choice.note,
    }
