"""The host memory that is allotted to the predictor when a life begins."""

import logging
import math
from collections.abc import Callable
from typing import Literal

from cpsr.config import CPSRConfig
from cpsr.predictor.vitp import VITPPredictor
from cpsr.ranks.group import Group

__all__ = ["Use", "allot_memory", "history_checkpoints"]

# Beside those of the history's span: one that was committed while an older one is still being removed, and one that a
# copy keeps.
EXTRA_CHECKPOINTS = 2
MEGABYTE = 1e6

Report = Callable[..., object]
Use = Literal["learning", "line", "nothing"]
"""What the predictor does in a life: learn and predict, predict by the calibrated line only, or nothing."""


def allot_memory(
    predictor: VITPPredictor, operators: int, checkpoints_on_disk: int, config: CPSRConfig, group: Group, report: Report
) -> Use:
    """Decide what the predictor does within `learning.memory_limit_bytes`; a collective.

    It works in pieces that are as small as the limit requires. If the smallest do not fit on some rank, or learning is
    off, no rank learns and all follow the line. If even that does not fit, no rank uses the predictor.

    Args:
        predictor: of this rank, not used yet.
        operators: number of those of which this rank has a slice.
        checkpoints_on_disk: in the run directory, of any interval.
        config: the limit, and the span of the history.
        group: the ranks.
        report: records an event, by kind, message and `level`; called on rank 0.

    Returns:
        The same on every rank.
    """
    if config.mode == "exact" and not config.learning.budget_fraction:
        return "nothing"
    checkpoints = max(history_checkpoints(config), checkpoints_on_disk + EXTRA_CHECKPOINTS)
    limit_bytes = config.learning.memory_limit_bytes
    least = {learns: predictor.least_footprint(operators, checkpoints, learns=learns) for learns in (True, False)}
    needed: list[list[int]] = group.gather([least[True].peak_bytes, least[False].peak_bytes])
    learning_bytes, line_bytes = (max(column) for column in zip(*needed, strict=True))
    learns = config.learning.budget_fraction > 0
    use: Use = "nothing" if line_bytes > limit_bytes else "line"
    if learns and learning_bytes <= limit_bytes:
        use = "learning"
    if use != "learning":
        predictor.follow_line()
        if group.rank == 0 and (learns or use == "nothing"):  # with learning off by choice, no warning
            where = f"rank {needed.index(max(needed))} over up to {checkpoints} checkpoints"
            message = _why_not(use, where, limit_bytes, learning_bytes if learns else None, line_bytes)
            report("predictor memory", message, level=logging.WARNING)
    if use == "nothing":
        return use
    if not learns and config.predictor.direction == "vitp" and group.rank == 0:
        message = "learning.budget_fraction is 0: the line's direction is taken, not 'vitp' as configured"
        report("predictor memory", message, level=logging.WARNING)
    footprint = predictor.stay_within(limit_bytes, operators, checkpoints)
    if group.rank == 0:
        peak = _megabytes(footprint.peak_bytes)
        report(
            "predictor memory",
            f"the predictor uses at most {peak} of host memory per rank for up to {checkpoints} checkpoints"
            + ("" if learns else "; it does not learn (learning.budget_fraction is 0)"),
            # Mode exact predicts nothing, and asks for no attention to what would.
            level=logging.DEBUG if config.mode == "exact" else logging.INFO,
        )
    return use


def _why_not(use: Use, where: str, limit_bytes: int, learning_bytes: int | None, line_bytes: int) -> str:
    """The message for users; `learning_bytes` is None with learning off in the configuration."""
    limit = f"learning.memory_limit_bytes is {limit_bytes}"
    kept = "what earlier lives have learned of the motion is kept for a life with more memory, training is not affected"
    if use == "line" and learning_bytes is not None:
        return (
            f"learning is off: with the predictions it needs {_megabytes(learning_bytes)} of host memory on {where}, "
            f"{limit}; raise it to {learning_bytes}. Until then recoveries follow the calibrated line, which needs "
            f"{_megabytes(line_bytes)}; {kept}"
        )
    off, more = "predicting is off", ""
    if learning_bytes is not None:
        off, more = "predicting and learning are off", f", or to {learning_bytes} for learning too"
    return (
        f"{off}: the line alone needs {_megabytes(line_bytes)} of host memory on {where}, {limit}; raise it to "
        f"{line_bytes}{more}. Until then recoveries recompute from the newest checkpoint; {kept}"
    )


def _megabytes(count: int) -> str:
    """Rounded up, so that the printed limit suffices."""
    return f"{math.ceil(count / MEGABYTE)} MB"


def history_checkpoints(config: CPSRConfig) -> int:
    """Most checkpoints in a history, at the shortest interval that the configuration allows."""
    checkpoint = config.checkpoint
    interval = checkpoint.interval_iterations or config.planner.interval_min_iterations
    return max(checkpoint.history_checkpoints(interval), checkpoint.full_checkpoints) + EXTRA_CHECKPOINTS
