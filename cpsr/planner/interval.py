"""The checkpoint interval: fixed by the user, or Young's rule inside bounds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cpsr.config import PlannerConfig

__all__ = ["Plan", "fixed_plan", "young_plan"]

SECONDS_PER_HOUR = 3600.0
# No run has more iterations; beyond it a persist time is taken for one that never ends.
ITERATIONS_MAX = 2**31

Bound = Literal["none", "minimum", "maximum", "persist"]


@dataclass(frozen=True, slots=True)
class Plan:
    """A checkpoint interval with its origin and its explanation (plain data, no NaN, units in the keys)."""

    interval_iterations: int
    origin: Literal["fixed", "young"]
    explanation: Mapping[str, Any]


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


def young_plan(stall_seconds: float, iteration_seconds: float, persist_seconds: float, config: PlannerConfig) -> Plan:
    """Young's interval, `sqrt(2 T_s M)` with T_s the stall of a checkpoint and M the mean time between failures.

    The result lies in [interval_min_iterations, interval_max_iterations], except that it is never shorter than the
    time a checkpoint takes to be durable, which no bound of the user can change. Where an input is zero or infinite
    the rule's own limit decides; where it is NaN or negative there is none, and the minimum holds: until the job is
    measured, lost work is the larger risk.

    Args:
        stall_seconds: extra time of the training thread per checkpoint.
        iteration_seconds: mean time of one iteration.
        persist_seconds: time from the snapshot to the commit record.
        config: mean time between failures and bounds.

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    notes: list[str] = []
    mtbf_seconds = config.mtbf_hours * SECONDS_PER_HOUR
    # The product of the roots cannot overflow where the root of the product would.
    unbounded_seconds = math.sqrt(2) * _root(stall_seconds) * _root(mtbf_seconds)
    unbounded_iterations = _ratio(unbounded_seconds, iteration_seconds)
    persist_iterations = _ratio(persist_seconds, iteration_seconds)
    _remark_inputs(notes, stall_seconds=stall_seconds, iteration_seconds=iteration_seconds)
    interval, bound = _clamp(unbounded_iterations, config)
    interval, bound = _wait_for_disk(interval, bound, persist_iterations, config, notes)
    inputs = {
        "stall_seconds": stall_seconds,
        "iteration_seconds": iteration_seconds,
        "persist_seconds": persist_seconds,
        "mtbf_hours": config.mtbf_hours,
    }
    explanation = {
        "rule": "Young 1974: sqrt(2 * stall_seconds * mtbf_seconds) / iteration_seconds",
        "inputs": {name: _plain(value) for name, value in inputs.items()}
        | {
            "interval_min_iterations": config.interval_min_iterations,
            "interval_max_iterations": config.interval_max_iterations,
        },
        "unbounded_seconds": _plain(unbounded_seconds),
        "unbounded_iterations": _plain(unbounded_iterations),
        "persist_iterations": _plain(persist_iterations),
        "bound": bound,
        "notes": notes,
    }
    return Plan(interval, "young", explanation)


def _clamp(unbounded_iterations: float, config: PlannerConfig) -> tuple[int, Bound]:
    if math.isnan(unbounded_iterations) or unbounded_iterations < config.interval_min_iterations:
        return config.interval_min_iterations, "minimum"
    if unbounded_iterations > config.interval_max_iterations:
        return config.interval_max_iterations, "maximum"
    return round(unbounded_iterations), "none"


def _wait_for_disk(
    interval: int, bound: Bound, persist_iterations: float, config: PlannerConfig, notes: list[str]
) -> tuple[int, Bound]:
    """Lengthen the interval until a checkpoint is durable before the next one is due."""
    if math.isnan(persist_iterations):
        notes.append("persist time in iterations is unknown, it bounds nothing")
        return interval, bound
    if persist_iterations > ITERATIONS_MAX:
        notes.append("a checkpoint is never durable before the next is due; the maximum holds and saves are skipped")
        return config.interval_max_iterations, "maximum"
    if persist_iterations <= interval:
        return interval, bound
    if persist_iterations > config.interval_max_iterations:
        notes.append("the persist time exceeds interval_max_iterations, which cannot be kept")
    return math.ceil(persist_iterations), "persist"


def _remark_inputs(notes: list[str], **inputs: float) -> None:
    for name, value in inputs.items():
        if math.isnan(value) or value < 0:
            notes.append(f"{name} is {value}: not measured, the minimum holds")
        elif value == 0 or math.isinf(value):
            notes.append(f"{name} is {value}: the rule has no interior optimum, a bound holds")


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0 else math.nan


def _ratio(seconds: float, iteration_seconds: float) -> float:
    """Seconds in iterations, in the limit where one of the two is 0 or infinite; NaN where there is no limit."""
    if not (seconds >= 0 and iteration_seconds >= 0) or seconds == iteration_seconds == 0:
        return math.nan
    if iteration_seconds == 0:
        return math.inf
    # inf / inf is NaN by itself; a quotient too large for a float is infinite.
    return seconds / iteration_seconds


def _plain(value: float) -> float | str:
    """The number, or its name where JSON has no number for it."""
    return float(value) if math.isfinite(value) else str(float(value))
