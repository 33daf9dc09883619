"""How far training gets between two failures: positions, stalls and durable checkpoints, in closed form."""

import math
from dataclasses import dataclass

import numpy

from cpsr.planner.inputs import Array
from cpsr.simulate.system import Checkpoints

__all__ = ["Reach", "reach"]


@dataclass(frozen=True)
class Reach:
    """The state of each run after some seconds of training.

    Attributes:
        position_iterations: done, in part as well.
        durable_iterations: newest durable checkpoint; the one given where none became durable.
        trained_seconds: time in iterations.
        stalled_seconds: time in stalls, and waiting for a slot.
    """

    position_iterations: Array
    durable_iterations: Array
    trained_seconds: Array
    stalled_seconds: Array


@dataclass(frozen=True)
class _Rhythm:
    """Starts of checkpoints, in seconds after the first: `slots` in a row, then a wait until the first is durable.

    Let c be the `spacing_seconds` of two starts that nothing delays, and d the time until a checkpoint is durable.
    Start j is `max(start[j-1] + c, start[j-slots] + d)`: that is `(j mod slots) c + (j div slots) max(slots c, d)`.
    """

    interval_iterations: int
    stall_seconds: float
    durable_seconds: float
    spacing_seconds: float
    slots: int

    def started(self, seconds: Array) -> tuple[Array, Array]:
        """How many have started, and the seconds since the newest of them did; 0 and `seconds` before the first."""
        round_seconds = max(self.slots * self.spacing_seconds, self.durable_seconds)
        rounds = numpy.floor(seconds / round_seconds)
        rest = seconds - rounds * round_seconds
        in_round = numpy.minimum(numpy.floor(rest / self.spacing_seconds), self.slots - 1)
        count = numpy.where(seconds < 0, 0.0, rounds * self.slots + in_round + 1)
        return count, numpy.where(seconds < 0, seconds, rest - in_round * self.spacing_seconds)


def reach(
    checkpoints: Checkpoints, iteration_seconds: float, start: Array, durable: Array, first: Array, seconds: Array
) -> Reach:
    """Train for `seconds` from iteration `start`.

    A checkpoint on its way to the storage when this begins was lost with the failure before.

    Args:
        checkpoints: interval, stall, persist time.
        iteration_seconds: of one iteration.
        start: iteration of each run, a whole number.
        durable: newest durable checkpoint of each run, at most `start`.
        first: iteration after which the first checkpoint of each run is begun, later than `start`.
        seconds: of each run, at least 0.
    """
    rhythm = _rhythm(checkpoints, iteration_seconds)
    interval = rhythm.interval_iterations
    in_rhythm = seconds - (first - start) * iteration_seconds
    count, since = rhythm.started(in_rhythm)
    moved = numpy.clip((since - rhythm.stall_seconds) / iteration_seconds, 0.0, interval)
    position = numpy.where(count > 0, first + (count - 1) * interval + moved, start + seconds / iteration_seconds)
    done, _ = rhythm.started(in_rhythm - rhythm.durable_seconds)
    trained = (position - start) * iteration_seconds
    return Reach(
        position,
        numpy.where(done > 0, first + (done - 1) * interval, durable),
        trained,
        numpy.maximum(seconds - trained, 0.0),
    )


def _rhythm(checkpoints: Checkpoints, iteration_seconds: float) -> _Rhythm:
    interval = checkpoints.interval_iterations
    if checkpoints.contention == "skip":
        # The first multiple of the interval after the one before it at which that one is durable.
        interval *= max(math.ceil(checkpoints.persist_seconds / (interval * iteration_seconds)), 1)
    return _Rhythm(
        interval,
        checkpoints.stall_seconds,
        checkpoints.stall_seconds + checkpoints.persist_seconds,
        interval * iteration_seconds + checkpoints.stall_seconds,
        checkpoints.slots,
    )
