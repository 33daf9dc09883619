"""How a life began, for people: what was lost, from where each rank continues, what that costs, and warnings."""

import logging
from collections.abc import Sequence

from cpsr.checkpoint.tiers import Source
from cpsr.job import Job
from cpsr.journal import Beginning
from cpsr.planner.plan import exact_price, predicted_price
from cpsr.predictor.protocol import STALE_METHOD
from cpsr.ranks.exits import BEGAN, cause_of, exits_of, forget_exits, ranks_named
from cpsr.ranks.link import report, restart_obstacle
from cpsr.restart.restored_state import Recomputes, Restored

__all__ = ["announce", "cause_of_failure", "recovery_message"]

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
    """Report problems of the job, and how it recovered."""
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


def recovery_message(restored: Restored, cause: str | None, outlook: str) -> str:
    """What was lost, from where each rank continues, the cost, and the result of the check, in a few sentences.

    The numbers of the fit are in the journal and in `restored.reason`.

    Args:
        restored: how the life began.
        cause: how the last life ended, as a clause that begins in lower case; None if it ended in good order, or there
            was none.
        outlook: whether the repeated steps of an exact restart are checked, one clause.
    """
    exact = outlook if restored.beginning is Beginning.EXACT else ""
    costs = _cost(restored), exact, _check(restored)
    parts = [_lost(restored, cause), _source(restored), *costs]
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts if part)


def _lost(restored: Restored, cause: str | None) -> str:
    if cause is None:
        return ""
    f = restored.restored_iteration if restored.failure_iteration is None else restored.failure_iteration
    at = "" if restored.beginning is Beginning.SCRATCH else f" after iteration {f}"
    if not restored.partly_predicted:
        return f"{cause}{at}"
    lost = ranks_named(_ranks(restored.sources, "predicted"))
    if cause.startswith((f"{lost} was ", f"{lost} were ")):
        return f"{cause}{at} and left no state"
    return f"{cause}{at}; {lost} left no state"


def _source(restored: Restored) -> str:
    if restored.beginning is Beginning.SCRATCH:
        return "training begins at iteration 0: no checkpoint has been committed yet"
    at, sources = restored.restored_iteration, restored.sources
    tiers = dict.fromkeys(source.tier for source in sources)
    if len(tiers) > 1:
        each = ", ".join(
            f"{ranks_named(ranks)} {_from(restored, tier)}" for tier in tiers if (ranks := _ranks(sources, tier))
        )
        return f"{ranks_named(source.rank for source in sources)} continue at iteration {at}: {each}"
    who = "all ranks continue" if len(sources) > 1 else "training continues"
    return f"{who} at iteration {at}, {_from(restored, next(iter(tiers), 'disk'))}"


def _from(restored: Restored, tier: str) -> str:
    if tier == "predicted" and restored.stale:
        assert restored.forecast is not None
        base = restored.forecast.settings["base_iteration"]
        return f"with the weights of checkpoint {base}; {restored.restored_iteration - base} iterations are skipped"
    if tier == "predicted":
        used = 0 if restored.forecast is None else len(restored.forecast.settings.get("used_iterations", ()))
        fit = f" ({restored.method} over {used} checkpoints)" if used else f" ({restored.method})"
        how = "moved" if restored.lost_iterations else "predicted"
        return f"{how} from checkpoint {restored.checkpoint_iteration}{fit}"
    if tier == "departure":
        return (
            "with their last weights and moments, from memory"
            if restored.beginning is Beginning.EMERGENCY_DUMP
            else "exact from memory"
        )
    place = "memory" if tier == "memory" else f"checkpoint {restored.checkpoint_iteration}"
    if restored.beginning is Beginning.OLDER_EXPERTS:
        return f"from {place}, with older experts as they were saved"
    return f"exact from {place}"


def _cost(restored: Restored) -> str:
    f, at = restored.failure_iteration, restored.restored_iteration
    if f is None:
        return "nothing is lost" if restored.beginning is Beginning.EXACT else ""
    if restored.predicted:
        later = exact_price(f - (restored.checkpoint_iteration or 0))
        forecast, cost = restored.forecast, restored.expected_end_cost_iterations
        if forecast is None or cost is None:
            return f"predicted state; expected cost unknown ({later})"
        state = STALE_METHOD if restored.stale else "predicted"
        price = predicted_price(cost, forecast.expected_deviation_iterations, state)
        return f"{price}{_parts(restored, cost, forecast.move_iterations)} ({later})"
    if restored.beginning is Beginning.EMERGENCY_DUMP:
        return f"random states and registered objects are those of checkpoint {restored.checkpoint_iteration}"
    if f <= at:
        return "nothing is lost" if restored.beginning is Beginning.EXACT else ""
    if restored.beginning is Beginning.EXACT:
        return f"{exact_price(f - at)}{_why_recomputed(restored)}"
    count = f"{f - at} iterations are" if f - at > 1 else "1 iteration is"
    return f"{count} recomputed{_why_recomputed(restored)}"


def _parts(restored: Restored, cost: float, move: float) -> str:
    """The two parts of the cost, where there was a move."""
    if round(move) == 0:
        return ""
    rest = "recomputing" if restored.lost_iterations else "skipping"
    moved = f"the move {'gains' if move < 0 else 'costs'} {abs(move):.0f}, as it would without a failure"
    return f": {rest} costs {cost - move:.0f}, {moved}"


def _why_recomputed(restored: Restored) -> str:
    """Why nothing near the failure was taken, where the mode would have allowed it."""
    why, forecast = restored.recomputes, restored.forecast
    if why is None:
        return ""
    return f"; {why.value}{f' ({forecast.reason})' if why is Recomputes.INFEASIBLE and forecast is not None else ''}"


def _check(restored: Restored) -> str:
    loss = restored.guard.get("loss")
    if loss is None:
        return ""
    if "loss_predicted" not in loss:
        if not restored.predicted:
            return ""
        return f"not checked: {loss['reason'].removeprefix('not evaluated: ')}"
    verdict = "passed" if loss["accepted"] else "failed"
    return f"check {verdict}: loss {loss['loss_predicted']:.3g}, checkpoint {loss['loss_checkpoint']:.3g}"


def _ranks(sources: Sequence[Source], tier: str) -> list[int]:
    return [source.rank for source in sources if source.tier == tier]
