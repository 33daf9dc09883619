"""One line for people on how a run came back: what was lost, from where each rank continues, and what it costs."""

from collections.abc import Sequence

from cpsr.checkpoint.tiers import Source
from cpsr.exits import ranks_named
from cpsr.restore import Restored

__all__ = ["recovery_message"]


def recovery_message(restored: Restored, cause: str | None) -> str:
    """What was lost, from where each rank continues, what that costs, and what the check found, in a few sentences.

    The numbers of the fit are in the journal and in `restored.reason`.

    Args:
        restored: how the life began.
        cause: how the last one ended, as a clause that begins in lower case; None where it ended in good order, or
            there was none.
    """
    parts = [_lost(restored, cause), _source(restored), _cost(restored), _check(restored)]
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts if part)


def _lost(restored: Restored, cause: str | None) -> str:
    if cause is None:
        return ""
    f = restored.failure_iteration
    at = f" after iteration {restored.restored_iteration if f is None else f}" if restored.method != "scratch" else ""
    if not restored.partly_predicted:
        return f"{cause}{at}"
    lost = ranks_named(_ranks(restored.sources, "predicted"))
    if cause.startswith((f"{lost} was ", f"{lost} were ")):
        return f"{cause}{at} and left no state"
    return f"{cause}{at}; {lost} left no state"


def _source(restored: Restored) -> str:
    if restored.method == "scratch":
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
    if tier == "predicted":
        used = 0 if restored.forecast is None else len(restored.forecast.settings.get("used_iterations", ()))
        fit = f" ({restored.method} over {used} checkpoints)" if used else f" ({restored.method})"
        return f"predicted from checkpoint {restored.checkpoint_iteration}{fit}"
    if tier == "departure":
        return (
            "with the weights and moments that they had, from memory"
            if restored.method == "departure"
            else "exact from memory"
        )
    place = "memory" if tier == "memory" else f"checkpoint {restored.checkpoint_iteration}"
    if restored.method == "stale":
        return f"from {place}, with older experts as they were saved"
    return f"from {place}, with older experts predicted" if restored.method == "experts" else f"exact from {place}"


def _cost(restored: Restored) -> str:
    f, at = restored.failure_iteration, restored.restored_iteration
    if f is None:
        return "nothing is lost" if restored.method == "exact" else ""
    if restored.predicted:
        lag = None if restored.forecast is None else restored.forecast.expected_lag_iterations
        recomputing = f - (restored.checkpoint_iteration or 0)
        return f"expected cost: {max(lag or 0.0, 0.0):.0f} iterations (recomputing: {recomputing})"
    if restored.method == "departure":
        return f"random states and registered objects are those of checkpoint {restored.checkpoint_iteration}"
    if f <= at:
        return "nothing is lost" if restored.method == "exact" else ""
    count = f"{f - at} iterations are" if f - at > 1 else "1 iteration is"
    return f"{count} recomputed{_why_recomputed(restored)}"


def _why_recomputed(restored: Restored) -> str:
    """Why nothing was predicted, where the mode would have allowed it."""
    forecast = restored.forecast
    if "tried" in restored.guard:
        return ", because the check refused the prediction"
    if restored.reason.startswith("what the ranks left when the group broke was refused"):
        return ", because the check refused what the ranks had left in memory"
    if "failed before" in restored.reason or "failed to load before" in restored.reason:
        return ", because an earlier attempt to continue near the failure had failed"
    if forecast is not None and not forecast.feasible:
        return f", because nothing can be predicted ({forecast.reason})"
    if forecast is not None or restored.reason.startswith("the plan finds"):
        return ", which is cheaper than predicting"
    return ""


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
