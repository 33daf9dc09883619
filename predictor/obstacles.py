"""Obstacles to a prediction: too few checkpoints, or a failure too far ahead of them."""

from collections.abc import Sequence

from cpsr.predictor.protocol import HistoryEntry, Target

__all__ = ["MAX_HORIZON_INTERVALS", "too_far", "too_few", "window_start"]

# No measurement showed a benefit beyond this.
MAX_HORIZON_INTERVALS = 10.0


def too_few(entries: Sequence[HistoryEntry], needed: int) -> str | None:
    """Why `entries` (usable ones) do not suffice; None where there are `needed` of them."""
    if len(entries) >= needed:
        return None
    if len(entries) == 0:
        return "there is no usable checkpoint to predict from"
    if len(entries) == 1:
        return f"a prediction needs {needed} usable checkpoints, and there is one"
    return f"a prediction needs {needed} usable checkpoints, and there are {len(entries)}"


def too_far(target: Target, fitted: Sequence[HistoryEntry], extrapolates: bool = True) -> str | None:
    """Why `target` lies too far ahead of the checkpoints that are used; None where it does not.

    The limit is 10 of their mean intervals, and for what extrapolates also their own span, in iterations and in
    cumulative learning rate. A single checkpoint has no interval, hence no limit.

    Args:
        target: where to predict; not before the newest entry.
        fitted: the checkpoints that the prediction is formed from, strictly ascending, at least one.
        extrapolates: whether a direction is continued.
    """
    if len(fitted) == 1:
        return None
    horizon = target.iteration - fitted[-1].iteration
    span = fitted[-1].iteration - fitted[0].iteration
    interval = span / (len(fitted) - 1)
    if horizon > MAX_HORIZON_INTERVALS * interval:
        return (
            f"the failure is {horizon} iterations after the newest usable checkpoint, more than "
            f"{MAX_HORIZON_INTERVALS:g} intervals of {interval:g}"
        )
    if not extrapolates:
        return None
    if horizon > span:
        return (
            f"the failure is {horizon} iterations after the checkpoint, further than the {span} that are predicted from"
        )
    ahead, fitted_time = target.time - fitted[-1].time, fitted[-1].time - fitted[0].time
    if ahead > fitted_time:
        return (
            f"since the checkpoint the learning rates sum to {ahead:g}, more than the {fitted_time:g} over the whole "
            "window that is predicted from"
        )
    return None


def window_start(entries: Sequence[HistoryEntry], window_iterations: int) -> int:
    """Position of the oldest entry that lies within the window before the newest."""
    oldest = entries[-1].iteration - window_iterations
    return next(position for position, entry in enumerate(entries) if entry.iteration >= oldest)
