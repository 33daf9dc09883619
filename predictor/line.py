"""The line: every weight follows its least-squares slope over the recent checkpoints, further by a gain."""

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from cpsr.predictor.calibration import (
    HORIZON_ITERATIONS,
    MIN_CHECKPOINTS,
    Calibration,
    Context,
    Direction,
    Expected,
    Observation,
    Setting,
    candidates,
    context_of,
    windows,
)
from cpsr.predictor.pieces import gram
from cpsr.predictor.protocol import History, HistoryEntry, Target
from cpsr.predictor.series import (
    TYPICAL_STRAIGHTNESS,
    Series,
    path_positions,
    reach_factor,
    straightness,
    too_far,
    too_few,
    window_start,
)
from cpsr.predictor.series_predictor import CHUNK_ELEMENTS, Fit, Plan, SeriesPredictor

__all__ = ["LAG_DEVIATION_ITERATIONS", "LinePredictor", "line_coefficients"]

# A setting's standard deviation counts against it: its expected end cost must be low and certain.
CAUTION_DEVIATIONS = 1.0
# How far the end cost lies from the lag after 60 to 160 iterations: 27 iterations, at 159 recoveries of 12 small runs
# (2026-11-23). Early in a run the lag is 21 too low on average, in the middle 6, late 0.
LAG_DEVIATION_ITERATIONS = 27.0


class LinePredictor(SeriesPredictor):
    """Least-squares line of each operator on the cumulative-learning-rate axis (a `StatePredictor`).

    Predicts `x_c + factor * gain * slope * (time_f - time_c)`. The factor is the operator's: as much as its own path is
    straighter than the model's, 0 to 2. Window and gain are those of the lowest expected end cost, by the
    offline table and by what this run has measured; where even that is no less than recomputing, the forecast's
    `expected_end_cost_iterations` shows it. It needs three usable checkpoints within the window, and goes no further
    ahead than the line is fitted over, nor 10 intervals.

    Args:
        window_iterations: span of history the line is fitted over; None: by expected cost.
        gain: factor on the fitted displacement; None: by expected cost.
        chunk_elements: elements per piece; memory is about four such pieces of float32.
        agree: as in `SeriesPredictor`.
        name: as in `SeriesPredictor`.

    Raises:
        ValueError: a window below 2, a gain below 0 or not finite, or fewer than 1 element a piece.
    """

    name = "line"
    _base = 0.0  # 1: from the line's own value at the checkpoint, a control of the benchmarks

    def __init__(
        self,
        window_iterations: int | None = None,
        gain: float | None = None,
        chunk_elements: int = CHUNK_ELEMENTS,
        agree: Callable[[Sequence[int]], Sequence[int]] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(chunk_elements, agree, name)
        if window_iterations is not None and window_iterations < 2:
            raise ValueError(f"window_iterations = {window_iterations}: a line needs a window of 2 or more")
        if gain is not None and not 0 <= gain < math.inf:
            raise ValueError(f"gain = {gain}: expected a finite number, 0 or larger")
        self._window_iterations = window_iterations
        self._gain = gain
        self._calibration = Calibration()
        self._direction: Direction = "line"
        # Of the forecast under way: the path of the whole model, each operator's reach over the model's, and the
        # checkpoints that these are known over.
        self._straightness = TYPICAL_STRAIGHTNESS
        self._factors: dict[str, float] = {}
        self._points: tuple[HistoryEntry, ...] = ()

    def expected(
        self, points: Sequence[HistoryEntry], target: Target, straightness: float = TYPICAL_STRAIGHTNESS
    ) -> Expected | str:
        """Expected end cost of a prediction from checkpoints at `points`, or why there would be none; reads no weights.

        Args:
            points: when the checkpoints would be taken, ascending.
            target: the failure, later than the newest of them.
            straightness: of the weights' path up to the newest of them.
        """
        obstacle = self._obstacle(points, target)
        if obstacle is not None:
            return obstacle
        context = context_of(target, points, straightness)
        if context.horizon_iterations > HORIZON_ITERATIONS:
            return f"nothing was measured beyond {HORIZON_ITERATIONS} iterations ahead"
        undecided = copy.copy(self)  # a query must not change the direction in use
        return undecided._choose(context, points, target)[1]

    def record(self, outcome: dict[str, Any]) -> None:
        """Record the outcome of a recovery; a measured lag updates the expected end costs.

        Raises:
            ValueError: the outcome is not plain JSON data, or its lag or standard error is not a number.
        """
        for observation in _observations([outcome]):
            if not (math.isfinite(observation.lag_iterations) and observation.standard_error_iterations >= 0):
                raise ValueError(f"a lag of {observation.lag_iterations} +- {observation.standard_error_iterations}")
        super().record(outcome)
        # Anew from all that is kept, so that it is the same after a restart.
        self._calibration = Calibration(observations=_observations(self._outcomes))

    def state_dict(self) -> dict[str, Any]:
        """Past recoveries and the direction in use, as plain data."""
        return {**super().state_dict(), "direction": self._direction}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict()` returned.

        Raises:
            ValueError: the state was written by another predictor or a newer version.
        """
        super().load_state_dict(state)
        self._calibration = Calibration(observations=_observations(self._outcomes))
        self._direction = state.get("direction", "line")

    def _plan(self, history: History, target: Target, usable: Sequence[int]) -> Plan:
        self._straightness, self._factors = TYPICAL_STRAIGHTNESS, {}
        self._points = tuple(history.entries[position] for position in usable)
        if len(usable) < MIN_CHECKPOINTS:
            return super()._plan(history, target, usable)
        positions = self._path_positions(history, usable)
        paths = self._path(history, positions)
        products = sum(paths.values(), torch.zeros(2, 2, dtype=torch.float64, device="cpu"))
        self._straightness, direction = straightness(products), self._direction
        self._factors = {operator: reach_factor(path, self._straightness) for operator, path in paths.items()}
        plan = super()._plan(history, target, usable)
        if not bool(torch.isfinite(products).all()):  # one of the three is damaged, perhaps outside of the window
            self._direction = direction  # what follows from a damaged one must not count
            reads = {operator: tuple(sorted({*read, *positions})) for operator, read in plan.reads.items()}
            return replace(plan, reads=reads)
        return plan

    def _path_positions(self, history: History, usable: Sequence[int]) -> list[int]:
        """Positions of the three checkpoints that the recent path is measured by."""
        return path_positions(history, usable)

    def _path(self, history: History, positions: Sequence[int]) -> dict[str, torch.Tensor]:
        """Products `(2, 2)` of each operator's displacements over the two halves of the recent path."""
        block = max(2, self._chunk_elements)
        return {operator: gram(history, operator, positions, block) for operator in history.operators}

    def _operator_row(self, history: History, operator: str, series: Series, fit: Fit, target: Target) -> Fit:
        return replace(fit, row=_stretched(fit.row, self._factor(operator, series)))

    def _factor(self, operator: str, series: Series) -> float:
        """How far this operator follows the line, over the model's reach; 1 where it has snapshots of its own.

        Straightness grows with the distance between snapshots: that of other snapshots does not compare.
        """
        return self._factors.get(operator, 1.0) if series.points == self._points else 1.0

    def _directions(self) -> tuple[Direction, ...]:
        """Directions that this predictor can take now."""
        return ("line",)

    def _obstacle(self, points: Sequence[HistoryEntry], target: Target) -> str | None:
        few = too_few(points, MIN_CHECKPOINTS)
        if few is not None:
            return few
        obstacles = [_window_obstacle(points, window, target) for window in self._windows(points)]
        return obstacles[-1] if all(obstacles) else None

    def _fit(self, points: Sequence[HistoryEntry], target: Target) -> Fit:
        context = context_of(target, points, self._straightness)
        setting, expected = self._choose(context, points, target)
        cost = expected.end_cost_iterations
        if context.horizon_iterations > HORIZON_ITERATIONS:
            cost = max(cost, context.horizon_iterations)
        window = int(setting.window_iterations)
        gain = setting.reach_iterations / context.horizon_iterations
        start = window_start(points, window)
        row = line_coefficients([point.time for point in points[start:]], target.time, gain, self._base)
        factors = [*self._factors.values()] or [1.0]
        settings = {
            "window_iterations": window,
            "gain": gain,
            "direction": setting.direction,
            "operator_factors": [min(factors), statistics.median(factors), max(factors)],
            "expected_end_cost_iterations": cost,
            "expected_deviation_iterations": expected.deviation_iterations,
            "context": asdict(context),
        }
        return Fit((0.0,) * start + row, settings=settings)

    def _choose(self, context: Context, points: Sequence[HistoryEntry], target: Target) -> tuple[Setting, Expected]:
        windows = [window for window in self._windows(points) if not _window_obstacle(points, window, target)]
        directions = self._directions()
        considered = candidates(context, windows, self._gain, directions)
        best = self._calibration.best(context, considered, CAUTION_DEVIATIONS, usual=self._direction)
        self._direction = best[0].direction
        return best

    def _windows(self, points: Sequence[HistoryEntry]) -> list[int]:
        return windows(points) if self._window_iterations is None else [self._window_iterations]

    def _sentence(self, settings: Mapping[str, Any]) -> str:
        lowest, _, highest = settings["operator_factors"]
        return (
            f"{settings['direction']} over {len(settings['used_iterations'])} checkpoints "
            f"({settings['window_iterations']} iterations), gain {settings['gain']:.2f} "
            f"({lowest:.1f} to {highest:.1f} times that by operator), "
            f"{settings['horizon_iterations']} iterations ahead; expected end cost "
            f"{settings['expected_end_cost_iterations']:+.0f} +- {settings['expected_deviation_iterations']:.0f}"
        )


def _stretched(row: Sequence[float], factor: float) -> tuple[float, ...]:
    """The row with its displacement from the newest snapshot this much as long."""
    older = [factor * value for value in row[:-1]]
    return (*older, 1.0 - math.fsum(older))


def _window_obstacle(points: Sequence[HistoryEntry], window: int, target: Target) -> str | None:
    """Why no line can be fitted over this window; None where it can."""
    fitted = points[window_start(points, window) :]
    if len(fitted) < MIN_CHECKPOINTS:
        return (
            f"a prediction needs {MIN_CHECKPOINTS} usable checkpoints within {window} iterations, and there are "
            f"{len(fitted)}"
        )
    return too_far(target, fitted)


def _observations(outcomes: Sequence[Mapping[str, Any]]) -> Iterator[Observation]:
    """Measured lags of settings of the line, from outcomes of any kind.

    If the guard limited some tensors, or some followed their own snapshots, the measurement is of no setting. Neither
    is it if the displacement began at the line's value (`base`). Where only a share of the state was lost, the lag of
    the whole is that over the share.
    """
    for outcome in outcomes:
        settings, lag = outcome.get("settings", {}), outcome.get("lag_iterations")
        if lag is None or "context" not in settings:
            continue
        if any(settings.get(key) for key in ("limited_operators", "own_series_operators", "base")):
            continue
        try:
            context = Context(**settings["context"])
        except TypeError as error:
            raise ValueError(f"an outcome of another version: {error}") from error
        reach = settings["gain"] * context.horizon_iterations
        setting = Setting(settings["window_iterations"], reach, settings["direction"])
        share = float(settings.get("lost_share", 1.0))
        deviation = float(outcome.get("standard_error_iterations", math.nan)) / share
        deviation = math.hypot(deviation, LAG_DEVIATION_ITERATIONS)
        yield Observation(context, setting, float(lag) / share, deviation)


def line_coefficients(times: Sequence[float], target_time: float, gain: float, base: float) -> tuple[float, ...]:
    """Coefficients of `x_n + base * (line(n) - x_n) + gain * slope * (target_time - t_n)` over the snapshots.

    Let m be the mean time, `S = sum (t_k - m)^2`, and n the newest. The slope is `sum_k (t_k - m)/S * x_k`. The line's
    value at n is `sum_k (1/K + (t_n - m)(t_k - m)/S) * x_k`. The newest coefficient is positive.

    Args:
        times: ascending, not all equal; at least 2.
        target_time: not before the newest.
        gain: factor on the displacement, 0 or larger.
        base: 0 for the newest snapshot, 1 for the line's value there.

    Returns:
        One float per time; they sum to 1 to rounding.

    >>> line_coefficients([0.0, 1.0], 2.0, gain=1.0, base=0.0)
    (-1.0, 2.0)
    """
    count = len(times)
    mean = math.fsum(times) / count
    scatter = math.fsum((time - mean) ** 2 for time in times)
    reach = base * (times[-1] - mean) + gain * (target_time - times[-1])
    row = [base / count + reach * ((time - mean) / scatter) for time in times[:-1]]
    return (*row, 1.0 - math.fsum(row))
