"""ETTR, the effective training time ratio: useful time over wall time, and where the rest went.

ETTR as in MoEvement (arXiv:2412.15411), section 2.4. docs/ettr.md defines the parts; they add up to the wall time.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, Field

from cpsr.journal import Account, FailureRow, JournalReader, LifeRow, RecoveryRow
from cpsr.service.run import LifeState

__all__ = ["PARTS", "Ettr", "ettr_of", "read_ettr"]

PARTS = ("useful", "checkpoint_stall", "memory_stall", "recompute", "restart", "other")  # of the wall time
IN_ORDER = ("clean", "sigterm")
DOWN = ("silent", "killed", "error")


class Ettr(BaseModel):
    """The effective training time ratio of the run, up to now; all parts but the pauses add up to the wall time."""

    state: Literal["training", "starting", "down", "ended"] = Field(
        description="`training`: the time ends with the newest reported step. `starting`: a life has begun and has not "
        "reported a step. `down`: killed, silent or ended by an error. In both the time goes on. `ended` in good order."
    )
    since_unix_seconds: float
    until_unix_seconds: float
    lost_iterations: int = Field(
        description="Completed once, lost, and not trained again yet; until then their time counts as useful."
    )
    wall_seconds: float = Field(description="Without pauses.")
    ettr: float | None = Field(description="Useful time over wall time; null where no time has passed.")
    useful_seconds: float = Field(
        description="Of steps that were the first of their iteration, without stalls; with what CPSR adds to each, "
        "which is not measured in a job."
    )
    checkpoint_stall_seconds: float = Field(description="That training was kept from its work by checkpoints.")
    memory_stall_seconds: float = Field(description="That it was kept from its work by snapshots to host memory.")
    recompute_seconds: float = Field(description="Of steps of iterations that had been completed before.")
    restart_seconds: float = Field(description="From failures to the first step after each.")
    other_seconds: float = Field(description="First starts, ends, and what was not recorded.")
    paused_seconds: float = Field(description="Between lives that ended in good order and the next; no wall time.")
    failures: int
    predicted_recoveries: int = Field(description="Those whose predicted state was not given up.")
    end_cost_iterations: float = Field(description="Their expected end cost, in sum; below zero: the run ends better.")


def read_ettr(reader: JournalReader, lives: Sequence[LifeRow], state: LifeState | None) -> Ettr | None:
    """The ratio that the journal shows now; None before the first life.

    Args:
        reader: of the journal.
        lives: of the run, oldest first.
        state: of the newest one.

    Raises:
        JournalError: the journal cannot be read.
    """
    account = reader.account()
    if account is None or not lives:
        return None
    return ettr_of(account, lives[-1], state, time.time(), reader.recoveries(), reader.count(FailureRow))


def ettr_of(
    account: Account,
    newest: LifeRow,
    state: LifeState | None,
    now: float,
    recoveries: Sequence[RecoveryRow] = (),
    failures: int = 0,
) -> Ettr:
    """The ratio that an account shows.

    Args:
        account: of the run.
        newest: life.
        state: how that life stands.
        now: seconds since 1970.
        recoveries: of the run.
        failures: number of them.
    """
    stands = _state(account, newest, state)
    end = _up_to_now(account, stands, newest, now)
    steps, repeated = end.step_seconds, min(end.step_seconds, end.repeated_seconds)
    # A stall may be recorded after its step: there may be more of them than steps.
    stalls = end.checkpoint_stall_seconds + end.memory_stall_seconds
    recompute_stall = min(end.repeated_stall_seconds, repeated)
    useful_stall = min(max(0.0, stalls - end.repeated_stall_seconds), steps - repeated)
    counted = (recompute_stall + useful_stall) / stalls if stalls > 0 else 0.0
    # A clock that was set back shows less time than the steps took.
    passed = end.until_unix_seconds - end.began_unix_seconds - end.paused_seconds
    wall = max(passed, steps + end.restart_seconds)
    useful = steps - repeated - useful_stall
    predicted = [row for row in recoveries if row.beginning.predicted and row.outcome in ("kept", "watching")]
    return Ettr(
        state=stands,
        since_unix_seconds=end.began_unix_seconds,
        until_unix_seconds=end.until_unix_seconds,
        lost_iterations=max(0, end.reached_iteration - end.iteration),
        wall_seconds=wall,
        ettr=useful / wall if wall > 0 else None,
        useful_seconds=useful,
        checkpoint_stall_seconds=counted * end.checkpoint_stall_seconds,
        memory_stall_seconds=counted * end.memory_stall_seconds,
        recompute_seconds=repeated - recompute_stall,
        restart_seconds=end.restart_seconds,
        other_seconds=wall - steps - end.restart_seconds,
        paused_seconds=end.paused_seconds,
        failures=failures,
        predicted_recoveries=len(predicted),
        end_cost_iterations=sum(row.expected_end_cost_iterations or 0.0 for row in predicted),
    )


def _state(
    account: Account, newest: LifeRow, state: LifeState | None
) -> Literal["training", "starting", "down", "ended"]:
    if state in DOWN:
        return "down"
    if state in IN_ORDER:
        return "ended"
    return "training" if account.life == newest.life and account.training else "starting"


def _up_to_now(account: Account, stands: str, newest: LifeRow, now: float) -> Account:
    """The account with the time since its end, where that goes on."""
    if stands == "training":
        return account
    ended = newest.ended_unix_seconds if stands == "ended" else now
    until = max(account.until_unix_seconds, now if ended is None else ended)
    # Before its first step a life goes on with the restart after a failure.
    failed = stands == "down" or account.failed
    restart = account.restart_seconds + (until - account.until_unix_seconds if failed else 0.0)
    return replace(account, restart_seconds=restart, until_unix_seconds=until)
