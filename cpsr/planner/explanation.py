"""The explanation of a plan: plain data for the journal, the service and the command line."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

from cpsr.journal import FailureScope
from cpsr.planner.cost import Costs
from cpsr.planner.inputs import (
    SECONDS_PER_HOUR,
    Bound,
    Bounds,
    FailureClass,
    Limits,
    Mode,
    PlannerInputs,
    in_iterations,
    plain,
)
from cpsr.planner.policies import SHORTEST_TAKEN, Rule, unusual_inputs
from cpsr.planner.recovery_curve import EndCostCurve
from cpsr.planner.snapshots import per_interval
from cpsr.planner.ways import Prices, Way, exact_price, explain_ways, in_order, predicted_price, ways_of

__all__ = ["INPUT_FIELDS", "RECOVERY_LINE", "Optimum", "explain"]

RULES = {
    "cpsr": "the interval at which stalls and failures together are expected to cost least",
    "theorem1": "CPSR, Theorem 1 as printed: tau1 / (B + r)",
    "young": "Young 1974: sqrt(2 * stall_seconds * mtbf_seconds) / iteration_seconds",
    "daly": "Daly 2006, higher order",
}
INPUT_FIELDS = (
    "iteration_seconds",
    "stall_seconds",
    "persist_seconds",
    "failures_per_second",
    "restart_seconds",
    "predict_seconds",
    "watch_iterations",
    "lead_after_iterations",
)
# The coefficients of an end-cost curve: with them a plan can be recomputed from its explanation.
RECOVERY_LINE = ("constant_iterations", "per_horizon_iteration", "per_interval_iteration")

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


def explain(
    job: PlannerInputs,
    limits: Limits,
    policy: str,
    chosen: Optimum,
    by_mode: Mapping[Mode, Optimum | None],
    rules: Mapping[str, Rule],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The explanation of a plan as JSON values; keys name their units.

    Args:
        job: its inputs.
        limits: of the user and the predictor.
        policy: that chose.
        chosen: interval and mode of the job.
        by_mode: the best of each mode; None for a mode that is not possible.
        rules: others' rules, by name.
        notes: unusual facts found so far.
    """
    ways = {
        scope: in_order(_ways(job, chosen, scope, limits), predicts=chosen.mode == "predict")
        for scope in job.classes or _ALL
    }
    unknown_persist = () if job.persist_seconds >= 0 else (f"persist_seconds is not known; {SHORTEST_TAKEN}",)
    all_notes = [*notes, *chosen.bounds.notes, *unusual_inputs(job).split("; "), *unknown_persist, *_refused(by_mode)]
    prices = Prices.of_job(job, chosen.interval_iterations)
    return {
        "rule": RULES.get(policy, policy),
        "mode": chosen.mode,
        "bound": chosen.bound,
        "bounds": _bounds(chosen, limits),
        "inputs": _inputs(job),
        "origins": {name: vars(origin).copy() for name, origin in job.origins.items()},
        "expected": _expected(job, chosen, ways),
        "memory": _memory(job, chosen),
        "classes": {scope: _class(job, scope, ordered) for scope, ordered in ways.items()},
        "prices": None if prices is None else prices.to_tree(),
        "modes": {mode: _option(job, best) for mode, best in by_mode.items()},
        "rivals": {name: _rival(job, name, rule) for name, rule in rules.items()},
        "notes": list(dict.fromkeys(note for note in all_notes if note)),
    }


def _ways(job: PlannerInputs, chosen: Optimum, scope: FailureScope, limits: Limits) -> list[Way]:
    longest = limits.predictable_interval_iterations
    return ways_of(job, chosen.interval_iterations, chosen.memory_interval_iterations, scope, longest)


def _inputs(job: PlannerInputs) -> dict[str, Any]:
    rate = job.failures_per_second
    figures: dict[str, Any] = {name: plain(getattr(job, name)) for name in INPUT_FIELDS}
    figures["mtbf_hours"] = plain(1 / rate / SECONDS_PER_HOUR) if rate > 0 else "inf" if rate == 0 else "nan"
    figures["persist_iterations"] = plain(in_iterations(job.persist_seconds, job.iteration_seconds))
    if job.memory is not None:
        figures["memory_stall_seconds"] = plain(job.memory.stall_seconds)
        if job.memory.replica_seconds is not None:
            figures["replica_seconds"] = plain(job.memory.replica_seconds)
    figures |= {f"{place}_load_seconds": plain(seconds) for place, seconds in job.load_seconds.items()}
    figures["recovery_curve"] = "none" if job.recovery is None else job.recovery.source
    if isinstance(job.recovery, EndCostCurve):
        figures["recovery_line"] = dict(zip(RECOVERY_LINE, job.recovery.coefficients, strict=True))
        figures["recovery_covariance"] = job.recovery.covariance.tolist()
    if job.phase is not None:
        figures["phase"] = {name: plain(value) for name, value in vars(job.phase).items()}
    return figures


def _refused(by_mode: Mapping[Mode, Optimum | None]) -> list[str]:
    """Modes that are possible, but chosen only if no mode has a known cost."""
    return [
        f"the cost of a failure in mode {mode!r} cannot be computed from these inputs; a mode whose cost is known is "
        f"preferred, and if there is none, {SHORTEST_TAKEN}"
        for mode, best in by_mode.items()
        if best is not None and not math.isfinite(best.cost_per_second)
    ]


def _bounds(chosen: Optimum, limits: Limits) -> dict[str, Any]:
    bounds = chosen.bounds
    own = {name: value for name, value in vars(bounds).items() if name != "notes"}
    return {**own, **vars(limits)}


def _expected(job: PlannerInputs, chosen: Optimum, ways: Mapping[FailureScope, Sequence[Way]]) -> dict[str, Any]:
    """The expected costs of the plan, in seconds per second of wall time and per failure."""
    interval, costs, rate = numpy.array([float(chosen.interval_iterations)]), Costs(job), job.failures_per_second
    classes = (job.classes or _ALL).items()
    recovery = rate * sum(one.share * ways[scope][0].loss_seconds for scope, one in classes if one.share > 0)
    stall = float(costs.stall_per_second(interval, chosen.mode)[0]) + _memory_stall_per_second(job, chosen)
    return {
        "cost_per_second": plain(chosen.cost_per_second),
        "stall_per_second": plain(stall),
        "recovery_per_second": plain(recovery),
        "restart_per_second": plain(rate * job.restart_seconds),
        "recovery_seconds_per_failure": plain(recovery / rate if rate > 0 else math.nan),
        "lost_lead_iterations_per_failure": plain(float(costs.lost_lead_iterations(interval, chosen.mode)[0])),
        "horizon_iterations": plain(float(costs.horizon_iterations(interval, chosen.mode)[0])),
        "failure": _failure(job, chosen),
    }


def _memory(job: PlannerInputs, chosen: Optimum) -> dict[str, Any] | None:
    """The interval of snapshots in host memory, with its inputs and its cost; None if there are none."""
    memory, every = job.memory, chosen.memory_interval_iterations
    if memory is None or every is None:
        return None
    own, disk = numpy.array([float(every)]), numpy.array([float(chosen.interval_iterations)])
    return {
        "interval_iterations": every,
        "configured_iterations": memory.interval_iterations,
        "longest_iterations": memory.longest_iterations,
        "windows": memory.window,
        "snapshots_between_checkpoints": int(per_interval(own, disk)[0]),
        "stall_seconds": plain(memory.stall_seconds),
        "disk_stall_seconds": plain(job.stall_seconds),
        "stall_per_second": plain(_memory_stall_per_second(job, chosen)),
    }


def _memory_stall_per_second(job: PlannerInputs, chosen: Optimum) -> float:
    """Share of the wall time in stalls of the snapshots in memory alone."""
    snapshots, every = Costs(job).snapshots, chosen.memory_interval_iterations
    if snapshots is None or every is None:
        return 0.0
    disk = numpy.array([float(chosen.interval_iterations)])
    return float(snapshots.stall_per_second(numpy.array([float(every)]), disk)[0])


def _class(job: PlannerInputs, scope: FailureScope, ways: Sequence[Way]) -> dict[str, Any]:
    """A class of failures: how often it is expected, what one goes back to and costs, and its other ways."""
    one = (job.classes or _ALL)[scope]
    rate, seconds = one.share * job.failures_per_second, ways[0].loss_seconds
    return {
        "failures_per_second": plain(rate),
        "share": plain(one.share),
        "prior_share": one.prior_share,
        "seen": one.seen,
        "back_to": "disk" if ways[0].name == "predicted" else ways[0].name,  # whose checkpoints it is predicted from
        "loss_iterations": plain(seconds / job.iteration_seconds if job.iteration_seconds > 0 else math.nan),
        "loss_per_second": plain(rate * seconds),
        "ways": explain_ways(ways, job),
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
    horizon = float(Costs(job).horizon_iterations(numpy.array([interval]), chosen.mode)[0])
    if chosen.mode == "recompute" or job.recovery is None or not math.isfinite(horizon):
        return exact_price(horizon)
    cost = float(job.recovery.end_cost_iterations(numpy.array([horizon]), interval)[0])
    deviation = 0.0  # not known of other curves; of a given line there is none
    if isinstance(job.recovery, EndCostCurve):
        deviation = job.recovery.deviation_iterations(horizon, interval)
    return predicted_price(cost, deviation)


def _rival(job: PlannerInputs, name: str, rule: Rule) -> dict[str, Any]:
    """What a rule would choose before any bound, and its cost in one tier: of its own kind of recovery."""
    choice = rule.choose(job)
    mode: Mode = "predict" if name == "theorem1" and job.recovery is not None else "recompute"
    cost = Costs(replace(job, memory=None)).per_second(numpy.array([float(choice.interval_iterations)]), mode)
    return {
        "interval_iterations": choice.interval_iterations,
        "cost_per_second": plain(float(cost[0])),
        "note": choice.note,
    }
