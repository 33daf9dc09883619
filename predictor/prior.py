"""Candidate settings of the line for a failure, and the known facts about it."""

from collections.abc import Sequence

from cpsr.predictor.calibration import Context, Direction, Setting
from cpsr.predictor.obstacles import window_start
from cpsr.predictor.protocol import HistoryEntry, Target
from cpsr.predictor.straightness import TYPICAL_STRAIGHTNESS

__all__ = [
    "HORIZON_ITERATIONS",
    "MIN_CHECKPOINTS",
    "WINDOWS_ITERATIONS",
    "context_of",
    "reaches",
    "settings",
    "start_of_three",
    "windows",
]

# Two checkpoints leave no residual to average: the secant amplified noise (0.12 to 0.30 nats up at injection).
MIN_CHECKPOINTS = 3
# The table is fitted to windows of 60 to 300 iterations.
WINDOWS_ITERATIONS = (100, 150, 200, 300)
# A young run turns: lines over most of its life ended up to 12 nats above the checkpoint when followed.
WINDOW_SHARE_OF_AGE = 0.5
# How far the line is followed: these shares of its window, and these multiples of the horizon. The table is fitted to
# 1.5 windows and 3 horizons. Beyond 0.75 windows a third of its recoveries begin 0.3 nats or more above the checkpoint:
# there the guard shortens the move.
REACH_OF_WINDOW = (0.1, 0.2, 0.35, 0.5, 0.7, 0.85)
# Not 0: going on from the checkpoint's weights costs more than the table expects (1.2 horizons at an interval of 100).
REACH_OF_HORIZON = (0.5, 1.0, 1.5, 2.0)
FURTHEST_ITERATIONS = 200  # the table saw no further, but for three horizons
# The furthest failure in the table's fit; there is no expectation beyond it.
HORIZON_ITERATIONS = 200


def context_of(target: Target, points: Sequence[HistoryEntry], straightness: float = TYPICAL_STRAIGHTNESS) -> Context:
    """The context of predicting `target`.

    Args:
        target: the failure.
        points: usable checkpoints, strictly ascending, at least three.
        straightness: of the weights' path up to the newest of them.
    """
    newest = points[-1]
    peak = target.peak_learning_rate
    return Context(
        horizon_iterations=float(target.iteration - newest.iteration),
        age_iterations=float(newest.iteration),
        interval_iterations=(newest.iteration - points[-MIN_CHECKPOINTS].iteration) / (MIN_CHECKPOINTS - 1),
        learning_rate_ratio=min(1.0, newest.learning_rate / peak) if peak > 0 else 1.0,
        straightness=straightness,
    )


def windows(points: Sequence[HistoryEntry]) -> list[int]:
    """Windows that hold three of the points and reach back no further than they do, nor half the run's age; never none.

    Args:
        points: at least three.
    """
    newest = points[-1].iteration
    three, whole = newest - points[-MIN_CHECKPOINTS].iteration, newest - points[0].iteration
    longest = min(whole, WINDOW_SHARE_OF_AGE * newest)
    return [window for window in WINDOWS_ITERATIONS if three <= window <= longest] or [three]


def start_of_three(points: Sequence[HistoryEntry], window_iterations: int) -> int:
    """Position of the oldest point within a window that is stretched to three points (there are at least three)."""
    return min(window_start(points, window_iterations), len(points) - MIN_CHECKPOINTS)


def reaches(horizon: float, window: float) -> list[float]:
    """How far the line may be followed, in iterations at the checkpoint's pace; always to the failure."""
    found = {share * window for share in REACH_OF_WINDOW} | {multiple * horizon for multiple in REACH_OF_HORIZON}
    shortest = REACH_OF_HORIZON[0] * horizon
    longest = max(min(REACH_OF_WINDOW[-1] * window, FURTHEST_ITERATIONS), horizon)
    return sorted(reach for reach in found if shortest <= reach <= longest)


def settings(
    context: Context,
    windows_iterations: Sequence[float],
    gain: float | None = None,
    directions: Sequence[Direction] = ("line",),
) -> list[Setting]:
    """Every combination; where `gain` is given, the line is followed that many horizons."""
    horizon = context.horizon_iterations
    return [
        Setting(window, reach, direction)
        for window in windows_iterations
        for reach in (reaches(horizon, window) if gain is None else [gain * horizon])
        for direction in directions
    ]
