"""What the predictor does in a life, by the host memory that it may take."""

import logging
import math
from collections.abc import Callable
from typing import Literal

from cpsr.checkpoint.catalogue import Retention
from cpsr.config import CPSRConfig
from cpsr.predictor.vitp import VITPPredictor, host_memory_bytes
from cpsr.ranks.group import Group

__all__ = ["LIMIT_BYTES", "Use", "choose_use", "history_checkpoints"]

LIMIT_BYTES = 200_000_000  # of a rank, for predicting and learning
# Beside those of the history's span: one that was committed while an older one is still being removed, and one that a
# copy keeps.
EXTRA_CHECKPOINTS = 2
MEGABYTE = 1e6

Report = Callable[..., object]
Use = Literal["learning", "line", "nothing"]
"""What the predictor does in a life: learn and predict, predict by the calibrated line only, or nothing."""


def choose_use(
    predictor: VITPPredictor, operators: int, checkpoints_on_disk: int, config: CPSRConfig, group: Group, report: Report
) -> Use:
    """Decide what the predictor does within `LIMIT_BYTES` of host memory; a collective.

    If learning does not fit on some rank, or is off, no rank learns and all follow the line. If even that does not fit,
    no rank uses the predictor.

    Args:
        predictor: of this rank, not used yet.
        operators: number of those of which this rank has a slice.
        checkpoints_on_disk: in the run directory, of any interval, since a recovery predicts from them.
        config: of the run.
        group: the ranks.
        report: records an event, by kind, message and `level`; called on rank 0.

    Returns:
        The same on every rank.
    """
    learns = config.learning.budget_fraction > 0
    if config.mode == "exact" and not learns:
        return "nothing"
    checkpoints = max(history_checkpoints(config), checkpoints_on_disk + EXTRA_CHECKPOINTS)
    own = [host_memory_bytes(operators, checkpoints, learns=one) for one in (True, False)]
    learning_bytes, line_bytes = (max(column) for column in zip(*group.gather(own), strict=True))
    use: Use = "nothing" if line_bytes > LIMIT_BYTES else "line"
    if learns and learning_bytes <= LIMIT_BYTES:
        use = "learning"
    else:
        predictor.follow_line()
    if group.rank == 0:
        _report(use, learning_bytes if learns else None, line_bytes, checkpoints, config, report)
    return use


def history_checkpoints(config: CPSRConfig) -> int:
    """Most checkpoints in a history, at the shortest interval that the configuration allows."""
    kept = Retention()
    interval = config.checkpoint.interval_iterations or config.planner.interval_min_iterations
    return max(kept.history_checkpoints(interval), kept.full_checkpoints) + EXTRA_CHECKPOINTS


def _report(
    use: Use, learning_bytes: int | None, line_bytes: int, checkpoints: int, config: CPSRConfig, report: Report
) -> None:
    """One line for users; `learning_bytes` is None with learning off in the configuration."""
    over = f"of host memory for up to {checkpoints} checkpoints of this model"
    level = logging.WARNING
    if use == "nothing":
        message = (
            f"predicting is off: it takes {_megabytes(line_bytes)} {over}, {_megabytes(LIMIT_BYTES)} are allowed. "
            "Recoveries recompute from the newest checkpoint; training is not affected"
        )
    elif learning_bytes is not None and use == "line":
        message = (
            f"learning is off: it takes {_megabytes(learning_bytes)} {over}, {_megabytes(LIMIT_BYTES)} are allowed. "
            "Recoveries follow the calibrated line; training is not affected"
        )
    elif learning_bytes is None and config.predictor.direction == "vitp":
        message = "learning.budget_fraction is 0: the line's direction is taken, not 'vitp' as configured"
    else:
        peak = line_bytes if learning_bytes is None else learning_bytes
        message = f"the predictor uses at most {_megabytes(peak)} {over} per rank"
        # Mode exact predicts nothing, and asks for no attention to what would.
        level = logging.DEBUG if config.mode == "exact" else logging.INFO
    report("predictor memory", message, level=level)


def _megabytes(count: int) -> str:
    return f"{math.ceil(count / MEGABYTE)} MB"
