"""The line: every weight follows its least-squares slope over the recent checkpoints, further by a gain."""

import copy
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from cpsr.predictor.pieces import combine, gram, is_finite
from cpsr.predictor.protocol import Forecast, History, HistoryEntry, Target
from cpsr.predictor.series import (
    TYPICAL_STRAIGHTNESS,
    Series,
    check_history,
    operator_series,
    path_positions,
    reach_factor,
    straightness,
    too_far,
    too_few,
    window_start,
)

__all__ = [
    "CHUNK_ELEMENTS",
    "LAG_DEVIATION_ITERATIONS",
    "MAX_NAMES",
    "Fit",
    "LinePredictor",
    "line_coefficients",
    "spread",
]

STATE_VERSION = 1
# Number of past recoveries to keep: enough for any run, and a few kilobytes in every checkpoint.
MAX_OUTCOMES = 64
# Names listed where operators keep their newest value; the count is always given.
MAX_NAMES = 8
# Four pieces of 1 MiB: long enough to read at the memory's pace, short enough to stay in a processor's cache while they
# are combined, and in the allocator: pieces of 4 MiB took twice the time.
CHUNK_ELEMENTS = 1 << 18
# A setting's standard deviation counts against it: its expected end cost must be low and certain.
CAUTION_DEVIATIONS = 1.0
# How far the end cost lies from the lag after 60 to 160 iterations: 27 iterations, at 159 recoveries of 12 small runs
# (2026-11-23). Early in a run the lag is 21 too low on average, in the middle 6, late 0.
LAG_DEVIATION_ITERATIONS = 27.0


@dataclass(frozen=True)
class Fit:
    """One row of coefficients over a series' snapshots, or the reason why there is none.

    Attributes:
        row: one coefficient per snapshot; they sum to 1.
        reads: positions of the snapshots that the row rests on, also where its coefficient is zero; None: those
            whose coefficient is not.
        obstacle: why there is no row.
        note: one sentence for the user, instead of the predictor's own.
        settings: the numbers behind it; `expected_end_cost_iterations` where that is known.
    """

    row: tuple[float, ...]
    reads: tuple[int, ...] | None = None
    obstacle: str | None = None
    note: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def used(self) -> tuple[int, ...]:
        """Positions of the snapshots that must be finite."""
        return (
            tuple(place for place, value in enumerate(self.row) if value != 0.0) if self.reads is None else self.reads
        )


@dataclass(frozen=True)
class Plan:
    """Rows over the history's entries for every operator, the entries they use, and the fit of the checkpoints.

    `own` are the operators that are predicted from snapshots of their own, in place of those of all checkpoints, and
    `own_fits` their fits.
    """

    fit: Fit
    rows: dict[str, tuple[float, ...]]
    reads: dict[str, tuple[int, ...]]
    unchanged: tuple[str, ...]
    own: tuple[str, ...] = ()
    own_fits: tuple[Fit, ...] = ()


class LinePredictor:
    """Least-squares line of each operator on the cumulative-learning-rate axis (a `StatePredictor`).

    Predicts `x_c + factor * gain * slope * (time_f - time_c)`. The factor is the operator's: as much as its own path is
    straighter than the model's, 0 to 2. Window and gain are those of the lowest expected end cost, by the
    offline table and by what this run has measured; where even that is no less than recomputing, the forecast's
    `expected_end_cost_iterations` shows it. It needs three usable checkpoints within the window, and goes no further
    ahead than the line is fitted over, nor 10 intervals.

    Each operator is one combination of its own distinct snapshots. A horizon of 0, and one over which the learning rate
    was 0, predict the newest snapshot unchanged. A checkpoint that holds NaN or infinity is left out and reported. An
    operator whose own snapshots cannot be predicted from keeps its newest value.

    Args:
        window_iterations: span of history the line is fitted over; None: by expected cost.
        gain: factor on the fitted displacement; None: by expected cost.
        chunk_elements: elements per piece; memory is about four such pieces of float32.
        agree: where ranks predict together, maps the positions of the entries that this rank must leave out to those
            that any rank must (a collective; called equally often on every rank). None: a single rank.

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
    ) -> None:
        if chunk_elements < 1:
            raise ValueError(f"chunk_elements = {chunk_elements}: expected 1 or more")
        if window_iterations is not None and window_iterations < 2:
            raise ValueError(f"window_iterations = {window_iterations}: a line needs a window of 2 or more")
        if gain is not None and not 0 <= gain < math.inf:
            raise ValueError(f"gain = {gain}: expected a finite number, 0 or larger")
        self._chunk_elements = chunk_elements
        self._agree = agree
        self._window_iterations = window_iterations
        self._gain = gain
        self._outcomes: list[dict[str, Any]] = []
        self._calibration = Calibration()
        self._direction: Direction = "line"
        # Of the forecast under way: the path of the whole model, each operator's reach over the model's, and the
        # checkpoints that these are known over.
        self._straightness = TYPICAL_STRAIGHTNESS
        self._factors: dict[str, float] = {}
        self._points: tuple[HistoryEntry, ...] = ()

    def forecast(self, history: History, target: Target) -> Forecast:
        """Decide the coefficients; reads the checkpoints in use, to leave out any that holds NaN or infinity.

        What was learned from, and was finite then, is not read again: it would be half of the time of a recovery.

        Raises:
            ValueError: the target lies before the newest entry, or the history is not ascending or not finite in time.
        """
        check_history(history.entries, target)
        usable = list(range(len(history.entries)))
        checked: set[tuple[str, int]] = set()
        while True:
            plan = self._plan(history, target, usable)
            damaged = self._damaged(history, plan.reads, checked)
            if self._agree is not None:
                damaged = sorted(set(self._agree(damaged)))
            if not damaged:
                return self._report(history, target, usable, plan)
            usable = [position for position in usable if position not in damaged]

    def predict(self, history: History, forecast: Forecast) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Stream the predicted weights as `(operator, start, values)` pieces, `values` 1-D float32, fresh memory.

        A tensor that was the same in every checkpoint comes out equal to itself (`torch.equal`).

        Raises:
            ValueError: the forecast is not feasible, or does not belong to this history.
        """
        if not forecast.feasible:
            raise ValueError(f"this forecast is not feasible: {forecast.reason}")
        return combine(history, forecast.coefficients, self._chunk_elements)

    def learn(self, history: History) -> Iterator[None]:
        """Nothing to learn: coefficients follow from the times alone."""
        return iter(())

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

        Keeps the newest 64 outcomes with a measured lag, and the newest 64 others.

        Raises:
            ValueError: the outcome is not plain JSON data, or its lag or standard error is not a number.
        """
        try:
            plain = json.loads(json.dumps(outcome))
        except (TypeError, ValueError) as error:
            raise ValueError(f"the outcome of a recovery must be plain JSON data: {error}") from error
        for observation in _observations([plain]):
            if not (math.isfinite(observation.lag_iterations) and observation.standard_error_iterations >= 0):
                raise ValueError(f"a lag of {observation.lag_iterations} +- {observation.standard_error_iterations}")
        self._take_outcomes([*self._outcomes, plain])

    def state_dict(self) -> dict[str, Any]:
        """Past recoveries and the direction in use, as plain data."""
        outcomes = copy.deepcopy(self._outcomes)
        return {"predictor": self.name, "version": STATE_VERSION, "outcomes": outcomes, "direction": self._direction}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict()` returned.

        Raises:
            ValueError: the state was written by another predictor or a newer version.
        """
        if state.get("predictor") != self.name or state.get("version") != STATE_VERSION:
            raise ValueError(
                f"learned state of predictor {state.get('predictor')!r}, version {state.get('version')!r}; "
                f"this is {self.name!r}, version {STATE_VERSION}"
            )
        self._take_outcomes(copy.deepcopy(list(state["outcomes"])))
        self._direction = state.get("direction", "line")

    def _take_outcomes(self, outcomes: list[dict[str, Any]]) -> None:
        """Calibrate anew from all that is kept, so that it is the same after a restart."""
        self._outcomes = _newest(outcomes)
        self._calibration = Calibration(observations=_observations(self._outcomes))

    def _plan(self, history: History, target: Target, usable: Sequence[int]) -> Plan:
        self._straightness, self._factors = TYPICAL_STRAIGHTNESS, {}
        self._points = tuple(history.entries[position] for position in usable)
        if len(usable) < MIN_CHECKPOINTS:
            return self._rows(history, target, usable)
        positions = self._path_positions(history, usable)
        paths = self._path(history, positions)
        products = sum(paths.values(), torch.zeros(2, 2, dtype=torch.float64, device="cpu"))
        self._straightness, direction = straightness(products), self._direction
        self._factors = {operator: reach_factor(path, self._straightness) for operator, path in paths.items()}
        plan = self._rows(history, target, usable)
        if not bool(torch.isfinite(products).all()):  # one of the three is damaged, perhaps outside of the window
            self._direction = direction  # what follows from a damaged one must not count
            reads = {operator: tuple(sorted({*read, *positions})) for operator, read in plan.reads.items()}
            return replace(plan, reads=reads)
        return plan

    def _rows(self, history: History, target: Target, usable: Sequence[int]) -> Plan:
        entries = tuple(history.entries[position] for position in usable)
        fit = self._series_fit(entries, target)
        plan = Plan(fit, {}, {}, ())
        if fit.obstacle is not None:
            return plan
        unchanged: dict[str, str] = {}
        with_own: list[str] = []
        fits: dict[Series, Fit] = {}  # most operators share one series
        for operator in history.operators:
            series = operator_series(history, operator, usable)
            if series not in fits:
                # On a copy: state for the next failure may change only by the checkpoints, which all ranks share.
                aside = copy.copy(self)
                fits[series] = fit if series.points == entries else aside._series_fit(series.points, target)
            own = fits[series]
            if own.obstacle is None and own is not fit:
                with_own.append(operator)
            if own.obstacle is not None:
                unchanged[operator] = own.obstacle
                own = Fit(_newest_row(len(series.points)))
            elif not own.note:
                own = self._operator_row(history, operator, series, own, target)
            plan.rows[operator] = spread(own.row, series.indices, len(history.entries))
            plan.reads[operator] = tuple(series.indices[place] for place in own.used())
        if plan.rows and len(unchanged) == len(plan.rows):
            name, why = next(iter(unchanged.items()))
            obstacle = f"no operator's own snapshots can be predicted from; '{name}': {why}"
            return Plan(Fit((), obstacle=obstacle), {}, {}, ())
        others = tuple(one for one in fits.values() if one is not fit and one.obstacle is None)
        return replace(plan, unchanged=tuple(unchanged), own=tuple(with_own), own_fits=others)

    def _path_positions(self, history: History, usable: Sequence[int]) -> list[int]:
        """Positions of the three checkpoints that the recent path is measured by."""
        return path_positions(history, usable)

    def _path(self, history: History, positions: Sequence[int]) -> dict[str, torch.Tensor]:
        """Products `(2, 2)` of each operator's displacements over the two halves of the recent path."""
        block = max(2, self._chunk_elements)
        return {operator: gram(history, operator, positions, block) for operator in history.operators}

    def _series_fit(self, points: Sequence[HistoryEntry], target: Target) -> Fit:
        if points and target.iteration == points[-1].iteration:
            return _unchanged(len(points), "the failure is at a checkpoint: its weights, unchanged")
        obstacle = self._obstacle(points, target)
        if obstacle is not None:
            return Fit((), obstacle=obstacle)
        if target.time == points[-1].time:
            return _unchanged(len(points), "the learning rate was 0 since the checkpoint: its weights, unchanged")
        return self._fit(points, target)

    def _damaged(
        self, history: History, reads: Mapping[str, Sequence[int]], checked: set[tuple[str, int]]
    ) -> list[int]:
        """Positions of entries that are read and that hold NaN or infinity; `checked` grows."""
        damaged: set[int] = set()
        for operator, positions in reads.items():
            for position in positions:
                if position in damaged or (operator, position) in checked:
                    continue
                checked.add((operator, position))
                if self._found_finite(history, operator, position):
                    continue
                if not is_finite(history, operator, position, self._chunk_elements):
                    damaged.add(position)
        return sorted(damaged)

    def _found_finite(self, history: History, operator: str, position: int) -> bool:
        """Whether these weights were read whole before and were finite, so that a forecast need not look again."""
        return False

    def _report(self, history: History, target: Target, usable: Sequence[int], plan: Plan) -> Forecast:
        entries = history.entries
        left_out = [entry.iteration for position, entry in enumerate(entries) if position not in set(usable)]
        settings: dict[str, Any] = {"left_out_not_finite": left_out, **plan.fit.settings}
        aside = f"; left out, not finite: iterations {left_out}" if left_out else ""
        if plan.fit.obstacle is not None:
            horizon = float(target.iteration - entries[usable[-1]].iteration) if usable else float(target.iteration)
            return Forecast(self.name, False, {}, horizon, plan.fit.obstacle + aside, settings)
        base_entry = entries[usable[-1]]
        horizon = float(target.iteration - base_entry.iteration)
        settings |= {
            "base_iteration": base_entry.iteration,
            "horizon_iterations": int(horizon),
            "horizon_time": target.time - base_entry.time,
            "used_iterations": [entries[usable[place]].iteration for place in plan.fit.used()],
            "held_operators": len(plan.unchanged),
            "held_names": list(plan.unchanged[:MAX_NAMES]),
        }
        if plan.unchanged:
            aside += f"; {len(plan.unchanged)} operators keep their newest value, too few snapshots of their own"
        if plan.own:
            settings["own_series_operators"] = len(plan.own)
            aside += f"; {len(plan.own)} operators follow snapshots of their own"
        reason = plan.fit.note or self._sentence(settings)
        # Without a measurement there is no expected gain: recomputing costs the horizon and is exact. The state is no
        # better than the worst of its operators.
        cost = max(
            float(one.settings.get("expected_end_cost_iterations", horizon)) for one in (plan.fit, *plan.own_fits)
        )
        return Forecast(self.name, True, dict(plan.rows), cost, reason + aside, settings)

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


def _newest(outcomes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest 64 outcomes that hold a measured lag, and the newest 64 others, in their order."""
    kept: set[int] = set()
    for measured in (True, False):
        places = [place for place, one in enumerate(outcomes) if (one.get("lag_iterations") is not None) == measured]
        kept |= set(places[-MAX_OUTCOMES:])
    return [one for place, one in enumerate(outcomes) if place in kept]


def _newest_row(count: int) -> tuple[float, ...]:
    """The row that takes the newest of `count` snapshots."""
    return (0.0,) * (count - 1) + (1.0,)


def _unchanged(count: int, note: str) -> Fit:
    return Fit(_newest_row(count), note=note, settings={"expected_end_cost_iterations": 0.0})


def spread(row: Sequence[float], indices: Sequence[int], count: int) -> tuple[float, ...]:
    """The row over `count` entries, from one over those at `indices`."""
    full = [0.0] * count
    for position, value in zip(indices, row, strict=True):
        full[position] = value
    return tuple(full)


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
