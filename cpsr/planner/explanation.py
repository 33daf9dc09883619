"""The explanation of a plan: plain data for the journal, the service and the command line."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from cpsr.planner.baselines import Baseline
from cpsr.planner.bounds import Limits, Mode
from cpsr.planner.choice import SHORTEST_TAKEN, Rule
from cpsr.planner.inputs import PlannerInputs
from cpsr.planner.objective import Costs
from cpsr.planner.price import exact_price, predicted_price
from cpsr.planner.ranks import Optimum
from cpsr.planner.recovery_curve import EndCostCurve
from cpsr.planner.tiers import explain_classes, explain_memory, recovery_per_second, stall_per_second
from cpsr.planner.units import SECONDS_PER_HOUR, in_iterations, plain
from cpsr.planner.ways import Prices

__all__ = ["INPUT_FIELDS", "RECOVERY_LINE", "explain"]

RULES = {
    "cpsr": "the interval at which stalls and failures together are expected to cost least",
    "theorem1": "CPSR, Theorem 1 as printed: tau1 / (B + r)",
    "untruncated": "CPSR, Theorem 1 without its last truncation: (tau1 - lambda sqrt(A T_s)) / (B + r)",
    "sinh": "CPSR, exact stationarity of Eq. 17: tau1 - B T_c = 2 sqrt(A / T_s) sinh(lambda (T_c + T_s) / 2)",
    "fixed": "the interval that the user set",
    "young": "Young 1974: sqrt(2 * stall_seconds * mtbf_seconds) / iteration_seconds",
    "daly": "Daly 2006, higher order",
    "checkfreq": "CheckFreq: the persist time, then longer until the overhead is within its limit",
    "pccheck": "PCcheck: persist time over concurrent checkpoints and tolerated slowdown",
    "gemini": "Gemini: the interval of least cost of recomputing, known from an oracle",
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


def explain(
    job: PlannerInputs,
    limits: Limits,
    policy: str,
    chosen: Optimum,
    by_mode: Mapping[Mode, Optimum | None],
    forms: Mapping[str, Rule],
    baselines: Mapping[str, Baseline],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The explanation of a plan as JSON values; keys name their units.

    Args:
        job: the ranks together.
        limits: of the user and the predictor.
        policy: that chose.
        chosen: interval and mode of the job.
        by_mode: the best of each mode; None for a mode that is not possible.
        forms: the paper's answers, by name.
        baselines: others' rules, by name.
        notes: unusual facts found so far.
    """
    all_notes = [*notes, *chosen.bounds.notes, *_unusual(job), *_refused(by_mode)]
    return {
        "rule": RULES.get(policy, policy),
        "mode": chosen.mode,
        "bound": chosen.bound,
        "bounds": _bounds(chosen, limits),
        "inputs": _inputs(job),
        "origins": {name: vars(origin).copy() for name, origin in job.origins.items()},
        "expected": _expected(job, chosen),
        "memory": explain_memory(job, chosen),
        "classes": explain_classes(job, chosen, limits.predictable_interval_iterations),
        "prices": None if (prices := Prices.of(job, chosen.interval_iterations)) is None else prices.to_tree(),
        "modes": {mode: _option(job, best) for mode, best in by_mode.items()},
        "forms": _forms(job, forms),
        "rivals": {name: _baseline(job, rule) for name, rule in baselines.items()},
        "notes": list(dict.fromkeys(note for note in all_notes if note)),
    }


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


def _unusual(job: PlannerInputs) -> list[str]:
    notes = []
    for name in INPUT_FIELDS[:4]:
        value = getattr(job, name)
        if not value >= 0:
            notes.append(f"{name} is not known ({value}); {SHORTEST_TAKEN}")
    for name in ("stall_seconds", "iteration_seconds", "failures_per_second"):
        value = getattr(job, name)
        if value == 0 or math.isinf(value):
            notes.append(f"{name} is {value}: one end of the allowed intervals costs least")
    return notes


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
    return {
        "minimum_iterations": bounds.minimum_iterations,
        "minimum_by": bounds.minimum_by,
        "maximum_iterations": bounds.maximum_iterations,
        "maximum_by": bounds.maximum_by,
        "interval_min_iterations": limits.interval_min_iterations,
        "interval_max_iterations": limits.interval_max_iterations,
        "predictable_interval_iterations": limits.predictable_interval_iterations,
        "predictable_by": limits.predictable_by,
    }


def _expected(job: PlannerInputs, chosen: Optimum) -> dict[str, Any]:
    """The expected costs of the plan, in seconds per second of wall time and per failure."""
    interval = numpy.array([[float(chosen.interval_iterations)]])
    costs = Costs([job])
    recovery = recovery_per_second(job, chosen)
    rate = job.failures_per_second
    return {
        "cost_per_second": plain(chosen.cost_per_second),
        "stall_per_second": plain(stall_per_second(job, chosen)),
        "recovery_per_second": plain(recovery),
        "restart_per_second": plain(rate * job.restart_seconds),
        "recovery_seconds_per_failure": plain(recovery / rate if rate > 0 else math.nan),
        "lost_lead_iterations_per_failure": plain(float(costs.lost_lead_iterations(interval, chosen.mode)[0, 0])),
        "horizon_iterations": plain(float(costs.horizon_iterations(interval, chosen.mode)[0, 0])),
        "failure": _failure(job, chosen),
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
    horizon = float(Costs([job]).horizon_iterations(numpy.array([[interval]]), chosen.mode)[0, 0])
    if chosen.mode == "recompute" or job.recovery is None or not math.isfinite(horizon):
        return exact_price(horizon)
    cost = float(job.recovery.end_cost_iterations(numpy.array([horizon]), interval)[0])
    deviation = 0.0  # not known of other curves; of a given line there is none
    if isinstance(job.recovery, EndCostCurve):
        deviation = job.recovery.deviation_iterations(horizon, interval)
    return predicted_price(cost, deviation)


def _forms(job: PlannerInputs, forms: Mapping[str, Rule]) -> dict[str, Any]:
    """The paper's answers, unbounded, with their costs by the same measure as the plan."""
    choices = {name: rule.choose(job) for name, rule in forms.items()}
    intervals = numpy.array([[float(choice.interval_iterations) for choice in choices.values()]])
    costs = Costs([job]).per_second(intervals, "recompute" if job.recovery is None else "predict")[0]
    return {
        name: {
            "interval_iterations": choice.interval_iterations,
            "cost_per_second": plain(float(cost)),
            "note": choice.note,
        }
        for (name, choice), cost in zip(choices.items(), costs, strict=True)
    }


def _baseline(job: PlannerInputs, rule: Baseline) -> dict[str, Any]:
    choice = rule.choose(job)
    return {
        "interval_iterations": choice.interval_iterations,
        "cost_per_second": plain(rule.cost(job, choice.interval_iterations)),
        "note": choice.note,
    }
