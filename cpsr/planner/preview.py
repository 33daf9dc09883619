"""What-if plans: recomputed from the explanation of another plan, with some inputs changed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy

from cpsr.planner.inputs import (
    SECONDS_PER_HOUR,
    FailureClass,
    Limits,
    MemoryTier,
    Origin,
    PhaseInputs,
    PlannerInputs,
)
from cpsr.planner.plan import Plan
from cpsr.planner.planning import INPUT_FIELDS, LEAST_COST, RECOVERY_LINE, RecoveryMode, make_plan, policy_names
from cpsr.planner.recovery_curve import EndCostCurve

__all__ = ["Basis", "Change", "basis_of", "preview"]

# No observation is added, and nothing uses the scatter.
SCATTER_ITERATIONS = 1.0


@dataclass(frozen=True)
class Change:
    """Inputs to change; None keeps the value.

    Attributes:
        mtbf_hours: mean time between failures of the job.
        state_bytes: of a checkpoint, all ranks together: the stall and the time to persist grow in proportion.
        snapshot_bytes_per_second: device to host, all ranks together, while training is stalled.
        persist_bytes_per_second: host to disk, all ranks together.
    """

    mtbf_hours: float | None = None
    state_bytes: float | None = None
    snapshot_bytes_per_second: float | None = None
    persist_bytes_per_second: float | None = None


@dataclass(frozen=True)
class Basis:
    """The inputs of a plan, read from its explanation.

    Attributes:
        inputs: of the job.
        limits: of the user and the predictor, without those of an override.
        policy: that chose.
    """

    inputs: PlannerInputs
    limits: Limits
    policy: str


def basis_of(explanation: Mapping[str, Any], policy: str) -> Basis | None:
    """The inputs of a plan; None if they were not measured, or its explanation lacks them.

    Args:
        explanation: of the plan.
        policy: named by the plan.
    """
    try:
        inputs, limits = _inputs(explanation), _limits(explanation)
        own = explanation.get("override", {}).get("policy", policy)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    if not inputs.iteration_seconds > 0:
        return None
    return Basis(inputs, limits, own if own in policy_names() else LEAST_COST)


def preview(
    basis: Basis, change: Change, state_bytes: float | None = None, recovery_mode: RecoveryMode = "auto"
) -> Plan:
    """The plan of the job for the same phase, with changed inputs.

    Args:
        basis: of the current plan.
        change: the changed inputs.
        state_bytes: of the job's current checkpoints; None if unknown.
        recovery_mode: the configured one.

    Raises:
        ValueError: bytes or bandwidths change, and the size of the checkpoints is unknown.
    """
    inputs = basis.inputs
    own = _changed(inputs, change, state_bytes)
    stall = own.pop("memory_stall_seconds", None)
    origins = {name: Origin("configured") for name, value in own.items() if value != getattr(inputs, name)}
    if inputs.memory is not None and stall is not None and stall != inputs.memory.stall_seconds:
        own["memory"] = replace(inputs.memory, stall_seconds=stall)
        origins["memory_stall_seconds"] = Origin("configured")
    job = replace(inputs, **own, origins={**inputs.origins, **origins})
    return make_plan(job, basis.limits, basis.policy, recovery_mode)


def _changed(inputs: PlannerInputs, change: Change, state_bytes: float | None) -> dict[str, Any]:
    """The changed times and rates by name; those of bytes need the size of the checkpoints."""
    changed: dict[str, Any] = {}
    if change.mtbf_hours is not None:
        changed["failures_per_second"] = 1 / (change.mtbf_hours * SECONDS_PER_HOUR)
    size = state_bytes if change.state_bytes is None else change.state_bytes
    snapshot, persist = change.snapshot_bytes_per_second, change.persist_bytes_per_second
    times = [
        ("stall_seconds", inputs.stall_seconds, snapshot),
        ("persist_seconds", inputs.persist_seconds, persist),
    ]
    if inputs.memory is not None:
        times.append(("memory_stall_seconds", inputs.memory.stall_seconds, snapshot))
    for name, seconds, bytes_per_second in times:
        if bytes_per_second is not None:
            if size is None:
                raise ValueError("the size of a checkpoint is not known yet, and without it bandwidths give no times")
            changed[name] = size / bytes_per_second
        elif change.state_bytes is not None:
            if not state_bytes:
                raise ValueError(f"the size of a checkpoint is not known yet, and {name} cannot be scaled with it")
            changed[name] = seconds * change.state_bytes / state_bytes
    return changed


def _inputs(explanation: Mapping[str, Any]) -> PlannerInputs:
    recorded = explanation["inputs"]
    # Numbers that JSON lacks (inf, nan) are stored by name, which `float` accepts too.
    figures: dict[str, Any] = {name: float(recorded[name]) for name in INPUT_FIELDS}
    figures |= {name: round(figures[name]) for name in ("watch_iterations", "lead_after_iterations")}
    if "phase" in recorded:
        phase: dict[str, Any] = {name: float(value) for name, value in recorded["phase"].items()}
        phase |= {name: round(phase[name]) for name in ("first_iteration", "last_iteration", "parameters")}
        figures["phase"] = PhaseInputs(**phase)
    if recorded["recovery_curve"] != "none":
        line = [float(recorded["recovery_line"][name]) for name in RECOVERY_LINE]
        covariance = numpy.array(recorded["recovery_covariance"], dtype=numpy.float64)
        figures["recovery"] = EndCostCurve.of_estimate(line, covariance, SCATTER_ITERATIONS, recorded["recovery_curve"])
    if (memory := explanation["memory"]) is not None:
        replica = recorded.get("replica_seconds")
        figures["memory"] = MemoryTier(
            float(recorded["memory_stall_seconds"]),
            memory["configured_iterations"],
            None if replica is None else float(replica),
            memory["windows"],
            memory["longest_iterations"],
        )
    loads = {place: recorded.get(f"{place}_load_seconds") for place in ("disk", "memory")}
    return PlannerInputs(
        **figures,
        origins={name: Origin(**origin) for name, origin in explanation["origins"].items()},
        classes={
            scope: FailureClass(float(one["share"]), float(one["prior_share"]), int(one["seen"]))
            for scope, one in explanation["classes"].items()
        },
        load_seconds={place: float(seconds) for place, seconds in loads.items() if seconds is not None},
        lost_share=float((explanation["prices"] or {}).get("lost_share", 1.0)),
    )


def _limits(explanation: Mapping[str, Any]) -> Limits:
    bounds = explanation["bounds"]
    own = explanation.get("override", {}).get("without", bounds)
    return Limits(
        own["interval_min_iterations"],
        own["interval_max_iterations"],
        bounds["predictable_interval_iterations"],
        bounds["predictable_by"],
    )
