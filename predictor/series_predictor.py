"""Base of predictors by coefficients: handles damaged checkpoints, snapshots of different ages, learned state."""

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cpsr.predictor.pieces import combine, is_finite
from cpsr.predictor.protocol import Forecast, History, HistoryEntry, Target
from cpsr.predictor.series import Series, check_history, operator_series

__all__ = ["CHUNK_ELEMENTS", "Fit", "Plan", "SeriesPredictor", "newest_row", "spread"]

STATE_VERSION = 1
# Number of past recoveries to keep: enough for any run, and a few kilobytes in every checkpoint.
MAX_OUTCOMES = 64
# Names listed where operators keep their newest value; the count is always given.
MAX_NAMES = 8
# Four pieces of 1 MiB: long enough to read at the memory's pace, short enough to stay in a processor's cache while they
# are combined, and in the allocator: pieces of 4 MiB took twice the time.
CHUNK_ELEMENTS = 1 << 18


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


class SeriesPredictor(ABC):
    """Predicts each operator as one combination of its own distinct snapshots (a `StatePredictor`).

    A subclass returns from `_obstacle` why a series cannot be predicted from, and from `_fit` its row; it may refine
    the row of one operator in `_operator_row`, reading weights. A horizon of 0, and one over which the learning rate
    was 0, predict the newest snapshot unchanged. A checkpoint that holds NaN or infinity is left out and reported. An
    operator whose own snapshots meet an obstacle keeps its newest value.

    Args:
        chunk_elements: elements per piece; memory is about four such pieces of float32.
        agree: where ranks predict together, maps the positions of the entries that this rank must leave out to those
            that any rank must (a collective; called equally often on every rank). None: a single rank.
        name: of the method in forecasts and in the learned state; None: the class's own.

    Raises:
        ValueError: fewer than 1 element a piece.
    """

    name: str

    def __init__(
        self,
        chunk_elements: int = CHUNK_ELEMENTS,
        agree: Callable[[Sequence[int]], Sequence[int]] | None = None,
        name: str | None = None,
    ) -> None:
        if chunk_elements < 1:
            raise ValueError(f"chunk_elements = {chunk_elements}: expected 1 or more")
        if name is not None:
            self.name = name
        self._chunk_elements = chunk_elements
        self._agree = agree
        self._outcomes: list[dict[str, Any]] = []

    @abstractmethod
    def _obstacle(self, points: Sequence[HistoryEntry], target: Target) -> str | None:
        """Why `target` cannot be predicted from snapshots taken at `points` (ascending, perhaps none)."""

    @abstractmethod
    def _fit(self, points: Sequence[HistoryEntry], target: Target) -> Fit:
        """The row over `points`, where there is no obstacle and `target` is later in time than the newest."""

    def _found_finite(self, history: History, operator: str, position: int) -> bool:
        """Whether these weights were read whole before and were finite, so that a forecast need not look again."""
        return False

    def _operator_row(self, history: History, operator: str, series: Series, fit: Fit, target: Target) -> Fit:
        """The fit of one operator; where weights read here were not finite, its `reads` must hold them."""
        return fit

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

    def record(self, outcome: dict[str, Any]) -> None:
        """Record the outcome of one recovery; keeps the newest 64 with a measured lag, and the newest 64 others.

        Raises:
            ValueError: the outcome is not plain JSON data.
        """
        try:
            self._outcomes.append(json.loads(json.dumps(outcome)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"the outcome of a recovery must be plain JSON data: {error}") from error
        self._outcomes = _newest(self._outcomes)

    def state_dict(self) -> dict[str, Any]:
        """Past recoveries, as plain data: `{"predictor": name, "version": 1, "outcomes": [...]}`."""
        return {"predictor": self.name, "version": STATE_VERSION, "outcomes": copy.deepcopy(self._outcomes)}

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
        self._outcomes = _newest(copy.deepcopy(list(state["outcomes"])))

    def _series_fit(self, points: Sequence[HistoryEntry], target: Target) -> Fit:
        if points and target.iteration == points[-1].iteration:
            return _unchanged(len(points), "the failure is at a checkpoint: its weights, unchanged")
        obstacle = self._obstacle(points, target)
        if obstacle is not None:
            return Fit((), obstacle=obstacle)
        if target.time == points[-1].time:
            return _unchanged(len(points), "the learning rate was 0 since the checkpoint: its weights, unchanged")
        return self._fit(points, target)

    def _plan(self, history: History, target: Target, usable: Sequence[int]) -> Plan:
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
                own = Fit(newest_row(len(series.points)))
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

    def _sentence(self, settings: Mapping[str, Any]) -> str:
        used = len(settings["used_iterations"])
        return f"{self.name} over {used} checkpoints, {settings['horizon_iterations']} iterations ahead"


def _newest(outcomes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest 64 outcomes that hold a measured lag, and the newest 64 others, in their order."""
    kept: set[int] = set()
    for measured in (True, False):
        places = [place for place, one in enumerate(outcomes) if (one.get("lag_iterations") is not None) == measured]
        kept |= set(places[-MAX_OUTCOMES:])
    return [one for place, one in enumerate(outcomes) if place in kept]


def newest_row(count: int) -> tuple[float, ...]:
    """The row that takes the newest of `count` snapshots."""
    return (0.0,) * (count - 1) + (1.0,)


def _unchanged(count: int, note: str) -> Fit:
    return Fit(newest_row(count), note=note, settings={"expected_end_cost_iterations": 0.0})


def spread(row: Sequence[float], indices: Sequence[int], count: int) -> tuple[float, ...]:
    """The row over `count` entries, from one over those at `indices`."""
    full = [0.0] * count
    for position, value in zip(indices, row, strict=True):
        full[position] = value
    return tuple(full)
