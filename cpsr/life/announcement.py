"""How a life began, for people: warnings, and one line on the recovery."""

import logging

from cpsr.job import Job
from cpsr.life.message import recovery_message
from cpsr.ranks.exits import BEGAN, cause_of, exits_of, forget_exits
from cpsr.ranks.link import report, restart_obstacle
from cpsr.restart.restore import Restored

__all__ = ["announce", "cause_of_failure"]

logger = logging.getLogger(__name__)


def cause_of_failure(job: Job) -> str | None:
    """How the last life ended, if it failed (rank 0); also removes its exit records."""
    if job.group.rank != 0 or job.journal.life == 0 or job.run.ended is not None:
        return None
    cause = cause_of(exits_of(job.run.path, job.journal.life - 1), job.run.previous_ranks)
    forget_exits(job.run.path, job.journal.life)
    return cause


def announce(
    job: Job,
    restored: Restored,
    cause: str | None,
    damaged: list[str],
    outlook: str,
) -> None:
    """Report problems of the job, and how it recovered.

    Args:
        job: this rank's.
        restored: how this life began.
        cause: how the last life ended.
        damaged: checkpoints that could not be used, one sentence each.
        outlook: whether repeated steps are checked, one clause.
    """
    obstacle = restart_obstacle() if job.group.rank == 0 and job.group.size > 1 else None
    if obstacle is not None:
        job.journal.event("launcher", obstacle, level=logging.WARNING)
    for problem in damaged:
        job.journal.event("checkpoint damaged", problem, level=logging.ERROR)
    if job.group.rank != 0:
        return
    if job.run.ended is not None:
        how = {"clean": "ended cleanly", "sigterm": "left after SIGTERM"}[job.run.ended["ending"]]
        message = f"the last life {how} at iteration {job.run.ended['iteration']}"
        job.journal.event("continued", message, restored.restored_iteration)
    if job.run.resized:
        job.journal.event("ranks", _resized(job, restored), restored.restored_iteration)
    _announce_recovery(job, restored, recovery_message(restored, cause, outlook))
    job.run.clear_ended()


def _resized(job: Job, restored: Restored) -> str:
    """What another number of ranks means for the run."""
    now, before = job.run.ranks, job.run.previous_ranks
    change = f"the run goes on with {now} {'ranks' if now > 1 else 'rank'}, before with {before}"
    if restored.checkpoint_iteration is None:
        return change
    part = f"each takes its part of checkpoint {restored.checkpoint_iteration}"
    if now == 1:
        part = f"it takes all of checkpoint {restored.checkpoint_iteration}"
    steps = job.adapter.micro_batches_per_iteration
    return f"{change}: {part} and trains on {steps} micro-{'batches' if steps > 1 else 'batch'} an iteration"


def _announce_recovery(job: Job, restored: Restored, message: str) -> None:
    """One line, printed by `cpsr run` if it is the launcher, else in the log; details go to the verbose log."""
    launcher, at = report(), restored.restored_iteration
    job.journal.event(BEGAN, message, at, logging.INFO if launcher is None else logging.DEBUG)
    logger.debug("%s: iteration %d, %s: %s", job.run.path, at, restored.method, restored.reason)
    if launcher is not None:
        launcher.recovered(message)
