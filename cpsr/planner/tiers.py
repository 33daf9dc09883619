"""The two tiers of a plan in its explanation: snapshots in host memory, and what each class of failures costs."""

from typing import Any

import numpy

from cpsr.journal import FailureScope
from cpsr.planner.inputs import FailureClass, PlannerInputs
from cpsr.planner.objective import Costs
from cpsr.planner.ranks import Optimum
from cpsr.planner.snapshots import Snapshots, closed_form, per_interval
from cpsr.planner.units import plain
from cpsr.planner.ways import WayName, explain_ways, in_order, ways_of

__all__ = ["explain_classes", "explain_memory", "recovery_per_second", "stall_per_second"]

_ALL: dict[FailureScope, FailureClass] = {"everything": FailureClass(1.0, 1.0)}
_PLACES: dict[WayName, str] = {"predicted": "disk"}  # whose checkpoints it is predicted from


def explain_memory(job: PlannerInputs, chosen: Optimum) -> dict[str, Any] | None:
    """The interval of snapshots in host memory, with its inputs and its cost; None if there are none.

    Args:
        job: the ranks together.
        chosen: interval and mode of the job.
    """
    memory, every = job.memory, chosen.memory_interval_iterations
    if memory is None or every is None:
        return None
    own, disk = numpy.array([[float(every)]]), numpy.array([[float(chosen.interval_iterations)]])
    closed = closed_form(job)
    return {
        "interval_iterations": every,
        "configured_iterations": memory.interval_iterations,
        "longest_iterations": memory.longest_iterations,
        "windows": memory.window,
        "snapshots_between_checkpoints": int(per_interval(own, disk)[0, 0]),
        "stall_seconds": plain(memory.stall_seconds),
        "disk_stall_seconds": plain(job.stall_seconds),
        "stall_per_second": plain(_stall_per_second(job, chosen)),
        "closed_form": None
        if closed is None
        else {"memory_interval_iterations": closed[0], "interval_iterations": closed[1]},
    }


def explain_classes(job: PlannerInputs, chosen: Optimum, predictable_iterations: int | None = None) -> dict[str, Any]:
    """Of each class of failures: how often it is expected, what one goes back to and costs, and its other ways.

    Args:
        job: the ranks together.
        chosen: interval and mode of the job.
        predictable_iterations: longest interval to predict from; None: no limit is known.
    """
    found: dict[str, Any] = {}
    for scope, one in (job.classes or _ALL).items():
        ways = in_order(ways_of(job, chosen, scope, predictable_iterations), predicts=chosen.mode == "predict")
        rate, seconds = one.share * job.failures_per_second, ways[0].loss_seconds
        found[scope] = {
            "failures_per_second": plain(rate),
            "share": plain(one.share),
            "prior_share": one.prior_share,
            "seen": one.seen,
            "back_to": _PLACES.get(ways[0].name, ways[0].name),
            "loss_iterations": plain(seconds / job.iteration_seconds if job.iteration_seconds > 0 else numpy.nan),
            "loss_per_second": plain(rate * seconds),
            "ways": explain_ways(ways, job),
        }
    return found


def stall_per_second(job: PlannerInputs, chosen: Optimum) -> float:
    """Share of the wall time in stalls, of both tiers.

    Args:
        job: the ranks together.
        chosen: interval and mode of the job.
    """
    disk = numpy.array([[float(chosen.interval_iterations)]])
    return float(Costs([job]).stall_per_second(disk, chosen.mode)[0, 0]) + _stall_per_second(job, chosen)


def recovery_per_second(job: PlannerInputs, chosen: Optimum) -> float:
    """Seconds lost to recoveries of all classes, per second of wall time.

    Args:
        job: the ranks together.
        chosen: interval and mode of the job.
    """
    predicts, classes = chosen.mode == "predict", (job.classes or _ALL).items()
    first = [(one.share, in_order(ways_of(job, chosen, scope), predicts=predicts)[0]) for scope, one in classes]
    return job.failures_per_second * sum(share * way.loss_seconds for share, way in first if share > 0)


def _stall_per_second(job: PlannerInputs, chosen: Optimum) -> float:
    """Of the snapshots in memory alone."""
    if job.memory is None or chosen.memory_interval_iterations is None:
        return 0.0
    own = numpy.array([[float(chosen.memory_interval_iterations)]])
    return float(Snapshots([job]).stall_per_second(own, numpy.array([[float(chosen.interval_iterations)]]))[0, 0])
