"""Expected end cost of a recovery that recomputes nothing: fitted offline over many runs.

The cost (`benchmarks/recovery/end_cost.py`) is the gap in the final loss, in iterations of equal worth. Two parts add:

- **skip**: the iterations since the checkpoint are lost, and the training goes on from its weights;
- **move**: these weights are moved along the line, as any run could move its own. It usually gains.

Each part is linear in a few terms, with coefficients that differ from run to run around a common mean (`Curve`); mean
and covariance are fitted by `cpsr bench prior`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import numpy
from numpy.typing import NDArray

from cpsr.predictor.checkpoint_series import TYPICAL_STRAIGHTNESS
from cpsr.predictor.protocol import HistoryEntry, Target

__all__ = [
    "HORIZON_ITERATIONS",
    "LOWEST_RATE",
    "MIN_CHECKPOINTS",
    "MOVE_TERMS",
    "SKIP_TERMS",
    "STALE",
    "YOUNGEST_ITERATIONS",
    "Context",
    "Curve",
    "Direction",
    "Expected",
    "Setting",
    "Table",
    "candidates",
    "context_of",
    "move_terms",
    "reaches",
    "skip_terms",
    "table",
    "windows",
]

TABLE_VERSION = 4
# Two checkpoints leave no residual to average: the secant amplified noise (0.12 to 0.30 nats up at injection).
MIN_CHECKPOINTS = 3
# The table is fitted to windows of 60 to 300 iterations.
WINDOWS_ITERATIONS = (100, 150, 200, 300)
# A young run turns: lines over most of its life ended up to 12 nats above the checkpoint when followed.
WINDOW_SHARE_OF_AGE = 0.5
# How far the line is followed. Beyond 0.75 windows a third of the table's recoveries begin 0.3 nats or more above the
# checkpoint: there the guard shortens the move.
REACH_OF_WINDOW = (0.1, 0.2, 0.35, 0.5, 0.7, 0.85)
FURTHEST_ITERATIONS = 200  # the table saw no further
# The furthest failure in the table's fit; there is no expectation beyond it.
HORIZON_ITERATIONS = 200
# The youngest checkpoint in it. A younger path may be straighter than any that was measured.
YOUNGEST_ITERATIONS = 150
# The lowest learning rate in it, over its peak. Below it weights hardly move, and a move has not been seen to gain.
LOWEST_RATE = 0.05
Direction = Literal["line", "vitp"]
_Array = NDArray[numpy.float64]


@dataclass(frozen=True)
class Context:
    """The known facts of a failure before the recovery.

    Attributes:
        horizon_iterations: u, from the newest checkpoint to the failure.
        age_iterations: c, of the newest checkpoint.
        learning_rate_ratio: learning rate at the checkpoint, or the mean until the failure where that is larger, over
            the largest one so far, in [0, 1].
        straightness: of the weights' path over the last 300 iterations (`straightness`), in [-1, 1].
        lost_share: of the state, that the failure takes, in (0, 1].
    """

    horizon_iterations: float
    age_iterations: float
    learning_rate_ratio: float
    straightness: float = TYPICAL_STRAIGHTNESS
    lost_share: float = 1.0


@dataclass(frozen=True)
class Setting:
    """How the line is followed.

    Attributes:
        window_iterations: it is fitted over the checkpoints at most this far before the newest.
        reach_iterations: how far it is followed, at the checkpoint's pace; 0 is the checkpoint's weights.
        direction: of the displacement: the line's, or as the network bends it.
    """

    window_iterations: float
    reach_iterations: float
    direction: Direction = "line"


STALE = Setting(0.0, 0.0)
"""The checkpoint's weights at the failure: it needs no window."""


@dataclass(frozen=True)
class Expected:
    """What a recovery without recomputing is expected to cost by the end of the training, in iterations.

    Attributes:
        skip_iterations: for the iterations that are lost.
        move_iterations: for the move; negative where it gains.
        deviation_iterations: standard deviation of the sum: of the mean of such recoveries in this run; a single one
            scatters more.
    """

    skip_iterations: float
    move_iterations: float
    deviation_iterations: float

    @property
    def end_cost_iterations(self) -> float:
        """Of both."""
        return self.skip_iterations + self.move_iterations

    def bound(self, deviations: float) -> float:
        """The cost plus so many standard deviations."""
        return self.end_cost_iterations + deviations * self.deviation_iterations


SKIP_TERMS = ("u * rate", "u * rate * (1 - rate)", "u * rate * straightness")
"""Of a skip, in iterations; `rate` is the learning rate over its peak."""
MOVE_TERMS = (
    "reach",
    "reach * straightness",
    "reach * (reach + window) / age",
    "reach * (100 / age)**2",
    "reach * (1 - rate) * bent",
)
"""Of a move, in iterations; `bent` is 1 for the network's direction and 0 for the line's. A path turns: the further the
line is followed, and the longer ago it was fitted, against the run's age, the more it costs; most in a young run."""
YOUNG_ITERATIONS = 100  # any number: it gives the square no unit


def skip_terms(context: Context) -> _Array:
    """The values of `SKIP_TERMS`."""
    rate = context.learning_rate_ratio
    return context.horizon_iterations * rate * numpy.array([1.0, 1.0 - rate, context.straightness])


def move_terms(context: Context, setting: Setting) -> _Array:
    """The values of `MOVE_TERMS`."""
    reach, age = setting.reach_iterations, max(context.age_iterations, 1.0)
    turned, young = (reach + setting.window_iterations) / age, (YOUNG_ITERATIONS / age) ** 2
    bent = (1.0 - context.learning_rate_ratio) * float(setting.direction == "vitp")
    return reach * numpy.array([1.0, context.straightness, turned, young, bent])


@dataclass(frozen=True)
class Curve:
    """One of the two parts.

    Attributes:
        mean: of the coefficients over runs, `(n,)`.
        covariance: of one run's coefficients around the mean, `(n, n)`.
        lost_exponent: a lost share costs this power of it, its standard deviation the share.
    """

    mean: _Array
    covariance: _Array
    lost_exponent: float

    def cost(self, terms: _Array, lost_share: float) -> tuple[float, float]:
        """Expected iterations, and their variance."""
        variance = max(0.0, float(terms @ self.covariance @ terms))
        return lost_share**self.lost_exponent * float(terms @ self.mean), lost_share**2 * variance


@dataclass(frozen=True)
class Table:
    """The offline fit.

    Attributes:
        skip: by `SKIP_TERMS`.
        move: by `MOVE_TERMS`.
        source: how it was made, for people.
    """

    skip: Curve
    move: Curve
    source: Mapping[str, Any]

    @classmethod
    def from_json(cls, text: str) -> "Table":
        """Read what `to_json` wrote.

        Raises:
            ValueError: another version, or other terms.
        """
        found = json.loads(text)
        terms = [found.get(part, {}).get("terms") for part in ("skip", "move")]
        if found.get("version") != TABLE_VERSION or terms != [list(SKIP_TERMS), list(MOVE_TERMS)]:
            raise ValueError(f"a prior table of version {found.get('version')!r}, this is version {TABLE_VERSION}")
        skip, move = (
            Curve(numpy.array(part["mean"]), numpy.array(part["covariance"]), float(part["lost_exponent"]))
            for part in (found["skip"], found["move"])
        )
        return cls(skip, move, found["source"])

    def to_json(self) -> str:
        """Plain JSON, one line a number."""
        content: dict[str, Any] = {"version": TABLE_VERSION, "source": dict(self.source)}
        for name, terms, curve in (("skip", SKIP_TERMS, self.skip), ("move", MOVE_TERMS, self.move)):
            numbers = {"mean": curve.mean.tolist(), "covariance": curve.covariance.tolist()}
            content[name] = {"terms": list(terms), **numbers, "lost_exponent": curve.lost_exponent}
        return json.dumps(content, indent=1) + "\n"

    def takes(self, direction: Direction) -> bool:
        """Whether that direction is expected to cost less than the line's, at the peak rate or late in a training."""
        late, peak = (Context(50.0, 1000.0, rate) for rate in (LOWEST_RATE, 1.0))
        straight, other = Setting(200.0, 100.0), Setting(200.0, 100.0, direction)
        return any(
            self.expected(context, other).move_iterations < self.expected(context, straight).move_iterations
            for context in (late, peak)
        )

    def expected(self, context: Context, setting: Setting) -> Expected:
        """The cost of a setting; beyond what was measured no less than recomputing."""
        skip, skip_variance = self.skip.cost(skip_terms(context), context.lost_share)
        move, move_variance = self.move.cost(move_terms(context, setting), context.lost_share)
        if context.learning_rate_ratio < LOWEST_RATE:
            move = max(move, 0.0)
        if context.horizon_iterations > HORIZON_ITERATIONS or context.age_iterations < YOUNGEST_ITERATIONS:
            skip = max(skip, context.horizon_iterations - move)
        return Expected(max(skip, 0.0), move, math.sqrt(skip_variance + move_variance))

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


def context_of(target: Target, newest: HistoryEntry, straightness: float = TYPICAL_STRAIGHTNESS) -> Context:
    """The context of a recovery at `target` from the newest checkpoint; `straightness` is of the path up to it."""
    peak, ahead = target.peak_learning_rate, target.iteration - newest.iteration
    # The table was fitted to rates that do not rise: where one does, the skipped iterations tell more than the first.
    rate = max(newest.learning_rate, (target.time - newest.time) / ahead if ahead else 0.0)
    return Context(
        horizon_iterations=float(ahead),
        age_iterations=float(newest.iteration),
        learning_rate_ratio=min(1.0, rate / peak) if peak > 0 else 1.0,
        straightness=straightness,
        lost_share=target.lost_share,
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


def candidates(
    context: Context,
    windows_iterations: Sequence[float],
    gain: float | None = None,
    directions: Sequence[Direction] = ("line",),
) -> list[Setting]:
    """Going on from the checkpoint's weights, and every window, reach and direction; a `gain` is so many horizons."""
    moves = [
        Setting(window, reach, direction)
        for direction in directions
        for window in windows_iterations
        for reach in (reaches(window) if gain is None else [gain * context.horizon_iterations])
    ]
    return moves if gain is not None else [STALE, *moves]


def reaches(window_iterations: float) -> list[float]:
    """How far a line over such a window may be followed, in iterations, ascending."""
    return [min(share * window_iterations, FURTHEST_ITERATIONS) for share in REACH_OF_WINDOW]
