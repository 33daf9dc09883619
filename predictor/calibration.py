"""Expected end cost of a recovery for a setting of the line: fitted offline over many runs.

The cost is the end cost (`benchmarks/recovery/end_cost.py`): the gap in the final loss, in iterations of equal worth.
Errors per element, curvature and the loss at injection do not find the setting of the lowest cost. So it is modelled,

    cost = features(context, setting) . coefficients + noise        (all in iterations),

linear in coefficients that differ from run to run around a common mean: `coefficients ~ N(mean, covariance)`, both
fitted over the table's runs (`cpsr bench prior`).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

import numpy
from numpy.typing import NDArray

from cpsr.predictor.checkpoint_series import TYPICAL_STRAIGHTNESS
from cpsr.predictor.protocol import Forecast, HistoryEntry, Target

__all__ = [
    "FEATURES",
    "HORIZON_ITERATIONS",
    "MIN_CHECKPOINTS",
    "WINDOWS_ITERATIONS",
    "Context",
    "Expected",
    "Setting",
    "Table",
    "candidates",
    "context_of",
    "features",
    "of_part",
    "reaches",
    "table",
    "windows",
]

TABLE_VERSION = 3
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
Direction = Literal["line", "vitp"]
_Array = NDArray[numpy.float64]


@dataclass(frozen=True)
class Context:
    """The known facts of a failure before the prediction.

    Attributes:
        horizon_iterations: u, from the newest checkpoint to the failure.
        age_iterations: c, of the newest checkpoint.
        interval_iterations: mean distance of the newest checkpoints.
        learning_rate_ratio: learning rate at the checkpoint over the largest one so far, in [0, 1].
        straightness: of the weights' path over the last 300 iterations (`straightness`), in [-1, 1].
    """

    horizon_iterations: float
    age_iterations: float
    interval_iterations: float
    learning_rate_ratio: float
    straightness: float = TYPICAL_STRAIGHTNESS


@dataclass(frozen=True)
class Setting:
    """How the line is followed.

    Attributes:
        window_iterations: it is fitted over the checkpoints at most this far before the newest.
        reach_iterations: how far it is followed, at the checkpoint's pace; the gain is this over the horizon.
        direction: of the displacement: the line's, or as the network bends it.
    """

    window_iterations: float
    reach_iterations: float
    direction: Direction = "line"


@dataclass(frozen=True)
class Expected:
    """End cost that a setting is expected to have, and the standard deviation of that expectation, in iterations.

    The standard deviation is that of the mean of such recoveries in this run; a single one scatters more.
    """

    end_cost_iterations: float
    deviation_iterations: float

    def bound(self, deviations: float) -> float:
        """The cost plus so many standard deviations."""
        return self.end_cost_iterations + deviations * self.deviation_iterations

    def of_part(self, lost_share: float) -> "Expected":
        """The same where only this share of the state is lost: it costs that share."""
        return Expected(lost_share * self.end_cost_iterations, lost_share * self.deviation_iterations)


def of_part(forecast: Forecast, lost_share: float) -> Forecast:
    """The forecast with the end cost of a failure that loses this share of the state, which its settings then name."""
    whole = Expected(forecast.expected_end_cost_iterations, forecast.expected_deviation_iterations)
    part, settings = whole.of_part(lost_share), {**forecast.settings, "lost_share": lost_share}
    for name in ("expected_end_cost_iterations", "expected_deviation_iterations"):
        if name in settings:
            settings[name] *= lost_share
    return replace(forecast, expected_end_cost_iterations=part.end_cost_iterations, settings=settings)


YOUNG_ITERATIONS = 200  # any number: it makes the square a number of iterations
FEATURES = (
    "horizon",
    "horizon * decay",
    "reach",
    "reach * straightness",
    "reach * interval / window",
    "reach * window / age",
    "(reach / age)**2 * 200",
    "reach * bent",
)
"""Terms of the expected cost, each in iterations; `decay` is 1 - learning_rate_ratio, `bent` is 1 for the network's
direction and 0 for the line's."""


def features(context: Context, setting: Setting) -> _Array:
    """The terms of `FEATURES`, `(len(FEATURES),)`."""
    horizon, age = context.horizon_iterations, max(context.age_iterations, 1.0)
    window, reach = setting.window_iterations, setting.reach_iterations
    decay = 1.0 - context.learning_rate_ratio
    interval = context.interval_iterations
    return numpy.array(
        [
            horizon,
            horizon * decay,
            reach,
            reach * context.straightness,
            reach * interval / window,
            reach * window / age,
            (reach / age) ** 2 * YOUNG_ITERATIONS,
            reach * float(setting.direction == "vitp"),
        ]
    )


@dataclass(frozen=True)
class Table:
    """The offline fit.

    Attributes:
        mean: of the coefficients over runs, `(n,)`.
        covariance: of one run's coefficients around the mean, `(n, n)`.
        noise_iterations: standard deviation of a single recovery's cost around its run's expectation.
        source: how it was made, for people.
    """

    mean: _Array
    covariance: _Array
    noise_iterations: float
    source: Mapping[str, Any]

    @classmethod
    def from_json(cls, text: str) -> "Table":
        """Read what `to_json` wrote.

        Raises:
            ValueError: another version, or other features.
        """
        found = json.loads(text)
        if found.get("version") != TABLE_VERSION or found.get("features") != list(FEATURES):
            raise ValueError(f"a prior table of version {found.get('version')!r}, this is version {TABLE_VERSION}")
        mean, covariance = numpy.array(found["mean"]), numpy.array(found["covariance"])
        return cls(mean, covariance, float(found["noise_iterations"]), found["source"])

    def to_json(self) -> str:
        """Plain JSON, one line a number."""
        content = {
            "version": TABLE_VERSION,
            "features": list(FEATURES),
            "mean": self.mean.tolist(),
            "covariance": self.covariance.tolist(),
            "noise_iterations": self.noise_iterations,
            "source": dict(self.source),
        }
        return json.dumps(content, indent=1) + "\n"

    def expected(self, context: Context, setting: Setting) -> Expected:
        """The cost of a setting."""
        terms = features(context, setting)
        return Expected(float(terms @ self.mean), math.sqrt(max(0.0, float(terms @ self.covariance @ terms))))

    def best(self, context: Context, candidates: Sequence[Setting], deviations: float) -> tuple[Setting, Expected]:
        """The setting of the lowest expected cost among those that are safe, and that cost.

        Safe is what costs less than recomputing even with so many standard deviations more. Where nothing is safe, it
        is that of the lowest bound.

        Args:
            context: of the failure.
            candidates: at least one.
            deviations: how cautious to be.
        """
        expected = [(setting, self.expected(context, setting)) for setting in candidates]
        safe = [one for one in expected if one[1].bound(deviations) < context.horizon_iterations]
        if safe:
            return min(safe, key=lambda one: one[1].end_cost_iterations)
        return min(expected, key=lambda one: one[1].bound(deviations))


@cache
def table() -> Table:
    """The table that is shipped."""
    return Table.from_json((resources.files(__package__) / "prior_table.json").read_text(encoding="utf-8"))


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


def reaches(horizon: float, window: float) -> list[float]:
    """How far the line may be followed, in iterations at the checkpoint's pace; always to the failure."""
    found = {share * window for share in REACH_OF_WINDOW} | {multiple * horizon for multiple in REACH_OF_HORIZON}
    shortest = REACH_OF_HORIZON[0] * horizon
    longest = max(min(REACH_OF_WINDOW[-1] * window, FURTHEST_ITERATIONS), horizon)
    return sorted(reach for reach in found if shortest <= reach <= longest)


def candidates(
    context: Context,
    windows_iterations: Sequence[float],
    gain: float | None = None,
    direction: Direction = "line",
) -> list[Setting]:
    """Every combination; where `gain` is given, the line is followed that many horizons."""
    horizon = context.horizon_iterations
    return [
        Setting(window, reach, direction)
        for window in windows_iterations
        for reach in (reaches(horizon, window) if gain is None else [gain * horizon])
    ]
