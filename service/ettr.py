"""ETTR, the effective training time ratio: useful time over wall time, and where the rest went.

ETTR as in MoEvement (arXiv:2412.15411), section 2.4. docs/ettr.md defines the parts; they add up to the wall time.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, Field

from cpsr.journal import Beginning, FailureRow, JournalReader, LifeRow, RecoveryRow, TotalsRow
from cpsr.service.health import LifeState

__all__ = ["ETTR_EXAMPLE", "HOUR_SECONDS", "PARTS", "Ettr", "TimeSpent", "ettr_of"]

HOUR_SECONDS = 3600.0
PARTS = ("useful", "checkpoint_stall", "memory_stall", "recompute", "restart", "other")  # of the wall time
IN_ORDER = ("clean", "sigterm")
DOWN = ("silent", "killed", "error")

_SPENT_EXAMPLE: dict[str, Any] = {
    "since_unix_seconds": 1763996000.0,
    "wall_seconds": 4000.0,
    "ettr": 0.925,
    "useful_seconds": 3700.0,
    "checkpoint_stall_seconds": 60.0,
    "memory_stall_seconds": 20.0,
    "overhead_seconds": None,
    "recompute_seconds": 100.0,
    "restart_seconds": 80.0,
    "other_seconds": 40.0,
    "paused_seconds": 0.0,
    "failures": 1,
    "predicted_recoveries": 0,
    "end_cost_iterations": 0.0,
}
ETTR_EXAMPLE: dict[str, Any] = {
    "state": "training",
    "until_unix_seconds": 1764000000.0,
    "lost_iterations": 0,
    "since_start": _SPENT_EXAMPLE,
    "last_hour": _SPENT_EXAMPLE
    | {"since_unix_seconds": 1763996400.0, "wall_seconds": 3600.0, "useful_seconds": 3300.0}
    | {"ettr": 3300 / 3600},
}


class TimeSpent(BaseModel):
    """What the run's time went into, from a moment on; all parts but the overhead add up to the wall time."""

    since_unix_seconds: float
    wall_seconds: float = Field(description="Without pauses.")
    ettr: float | None = Field(description="Useful time over wall time; null where no time has passed.")
    useful_seconds: float = Field(description="Of steps that were the first of their iteration, without stalls.")
    checkpoint_stall_seconds: float = Field(description="That training was kept from its work by checkpoints.")
    memory_stall_seconds: float = Field(description="That it was kept from its work by snapshots to host memory.")
    overhead_seconds: float | None = Field(
        description="That CPSR adds to other steps. null: not measured in a job, and contained in the useful time."
    )
    recompute_seconds: float = Field(description="Of steps of iterations that had been completed before.")
    restart_seconds: float = Field(description="From failures to the first step after each.")
    other_seconds: float = Field(description="First starts, ends, and what was not recorded.")
    paused_seconds: float = Field(description="Between lives that ended in good order and the next; no wall time.")
    failures: int
    predicted_recoveries: int = Field(description="Those whose predicted state was not given up.")
    end_cost_iterations: float = Field(description="Their expected end cost, in sum; below zero: the run ends better.")


class Ettr(BaseModel):
    """The effective training time ratio of the run, up to now."""

    state: Literal["training", "starting", "down", "ended"] = Field(
        description="`training`: the time ends with the newest reported step. `starting`: a life has begun and has not "
        "reported a step. `down`: killed, silent or ended by an error. In both the time goes on. `ended` in good order."
    )
    until_unix_seconds: float = Field(description="Where both spans of time end.")
    lost_iterations: int = Field(
        description="Completed once, lost, and not trained again yet; until then their time counts as useful."
    )
    since_start: TimeSpent = Field(description="In a journal of an older version: since the first life with totals.")
    last_hour: TimeSpent


def ettr_of(reader: JournalReader, lives: Sequence[LifeRow], state: LifeState | None, now: float) -> Ettr | None:
    """As the journal has it; None in a journal of an older version.

    Args:
        reader: of the journal.
        lives: of the run, oldest first.
        state: of the newest one.
        now: seconds since 1970.

    Raises:
        JournalError: the journal cannot be read.
    """
    found = reader.totals()
    if found is None or not lives:
        return None
    first, last = found
    end = _end(last, lives, state, now)
    hour_ago = max(first.created_unix_seconds, end.created_unix_seconds - HOUR_SECONDS)
    origin = TotalsRow(life=first.life, moment="start", created_unix_seconds=first.created_unix_seconds)
    return Ettr(
        state=_state(last, lives, state),
        until_unix_seconds=end.created_unix_seconds,
        lost_iterations=max(0, last.reached_iteration - last.iteration),
        since_start=_spent(reader, origin, end),
        last_hour=_spent(reader, _at(reader, hour_ago, last, end), end),
    )


def _state(
    last: TotalsRow, lives: Sequence[LifeRow], state: LifeState | None
) -> Literal["training", "starting", "down", "ended"]:
    if state in DOWN:
        return "down"
    if state in IN_ORDER:
        return "ended"
    return "training" if last.life == lives[-1].life and last.moment == "step" else "starting"


def _end(last: TotalsRow, lives: Sequence[LifeRow], state: LifeState | None, now: float) -> TotalsRow:
    """The totals now: the newest ones, and the time since then where it goes on."""
    what, newest = _state(last, lives, state), lives[-1]
    if what == "training":
        return last
    ended = newest.ended_unix_seconds if what == "ended" else now
    until = max(last.created_unix_seconds, now if ended is None else ended)
    # Before its first step a life goes on with the restart after a failure.
    before = [life for life in lives if last.life <= life.life < newest.life]
    failed = what == "down" or any(life.ending not in IN_ORDER for life in before)
    restart = last.restart_seconds + (until - last.created_unix_seconds if failed else 0.0)
    return replace(last, restart_seconds=restart, created_unix_seconds=until)


def _at(reader: JournalReader, moment: float, last: TotalsRow, end: TotalsRow) -> TotalsRow:
    """The totals at an earlier moment; between two rows they grow evenly."""
    if moment >= last.created_unix_seconds:
        return _between(last, end, moment)
    around = reader.totals_around(moment)
    return _between(around[0], around[-1], moment)


def _between(before: TotalsRow, after: TotalsRow, moment: float) -> TotalsRow:
    seconds = after.created_unix_seconds - before.created_unix_seconds
    share = min(1.0, max(0.0, (moment - before.created_unix_seconds) / seconds)) if seconds > 0 else 0.0

    def grown(name: str) -> float:
        start, end = float(getattr(before, name)), float(getattr(after, name))
        return start + share * (end - start)

    sums = (
        "step_seconds",
        "repeated_seconds",
        "checkpoint_stall_seconds",
        "memory_stall_seconds",
        "repeated_stall_seconds",
        "restart_seconds",
        "paused_seconds",
    )
    values: dict[str, Any] = {name: grown(name) for name in sums}
    return replace(before, created_unix_seconds=moment, **values)


def _spent(reader: JournalReader, start: TotalsRow, end: TotalsRow) -> TimeSpent:
    """What the time between two totals went into."""

    def grown(name: str) -> float:
        return max(0.0, float(getattr(end, name)) - float(getattr(start, name)))

    steps, restart, paused = grown("step_seconds"), grown("restart_seconds"), grown("paused_seconds")
    repeated = min(steps, grown("repeated_seconds"))
    checkpoints, memory = grown("checkpoint_stall_seconds"), grown("memory_stall_seconds")
    # A stall may be recorded after its step: at the edge of a span there may be more of them than steps.
    stalls, again = checkpoints + memory, grown("repeated_stall_seconds")
    recompute_stall = min(again, repeated)
    useful_stall = min(max(0.0, stalls - again), steps - repeated)
    counted = (recompute_stall + useful_stall) / stalls if stalls > 0 else 0.0
    # A clock that was set back shows less time than the steps took.
    wall = max(grown("created_unix_seconds") - paused, steps + restart)
    useful = steps - repeated - useful_stall
    predicted, end_cost = _predicted(reader, start.created_unix_seconds)
    return TimeSpent(
        since_unix_seconds=start.created_unix_seconds,
        wall_seconds=wall,
        ettr=useful / wall if wall > 0 else None,
        useful_seconds=useful,
        checkpoint_stall_seconds=counted * checkpoints,
        memory_stall_seconds=counted * memory,
        overhead_seconds=None,
        recompute_seconds=repeated - recompute_stall,
        restart_seconds=restart,
        other_seconds=wall - steps - restart,
        paused_seconds=paused,
        failures=reader.count(FailureRow, start.created_unix_seconds),
        predicted_recoveries=predicted,
        end_cost_iterations=end_cost,
    )


def _predicted(reader: JournalReader, since: float) -> tuple[int, float]:
    """Predicted recoveries that were not given up, and their expected end costs in sum."""
    number, end_cost = 0, 0.0
    sums = ("expected_end_cost_iterations",)
    for method, outcome, count, cost in reader.tally(RecoveryRow, ("method", "outcome"), sums, since):
        if Beginning.of(method).predicted and outcome in ("kept", "watching"):
            number += count
            end_cost += cost
    return number, end_cost
