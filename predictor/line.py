"""The line: every weight follows its least-squares slope over the recent checkpoints, further by a gain."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from cpsr.predictor.calibration import (
    HORIZON_ITERATIONS,
    MIN_CHECKPOINTS,
    STALE,
    Direction,
    candidates,
    context_of,
    table,
    windows,
)
from cpsr.predictor.checkpoint_series import (
    TYPICAL_STRAIGHTNESS,
    check_history,
    path_places,
    reach_factor,
    straightness,
    too_far,
    window_start,
)
from cpsr.predictor.protocol import CAUTION_DEVIATIONS, STALE_METHOD, Forecast, History, HistoryEntry, Ranks, Target
from cpsr.predictor.weight_pieces import combine, gram, is_finite

__all__ = ["LinePredictor", "Plan", "line_coefficients"]

STATE_VERSION = 2
# Names listed where operators keep their newest value; the count is always given.
MAX_NAMES = 8


@dataclass(frozen=True)
class Plan:
    """How operators are predicted from the usable checkpoints of a history, or why they are not.

    Attributes:
        usable: positions of the checkpoints, ascending.
        whole: operators that were saved anew in each of them; the others keep their newest value.
        window: positions of those that the line is fitted over.
        row: one coefficient for each of these; they sum to 1.
        factors: operator -> how far it follows the line, over the model's reach; 1 where it is absent.
        read: positions that must be finite: the window, and those by which damage was noticed.
        obstacle: why nothing can be predicted.
        note: one sentence for the user, instead of the predictor's own.
        settings: the numbers behind it.
    """

    usable: tuple[int, ...]
    whole: tuple[str, ...] = ()
    window: tuple[int, ...] = ()
    row: tuple[float, ...] = ()
    factors: Mapping[str, float] = field(default_factory=dict)
    read: tuple[int, ...] = ()
    obstacle: str | None = None
    note: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def moves(self) -> bool:
        """Whether any weights are moved."""
        return len(self.window) > 1

    def points(self, history: History) -> list[HistoryEntry]:
        """The checkpoints of the window."""
        return [history.entries[position] for position in self.window]

    def coefficients(self, row: Sequence[float], history: History, factor: float = 1.0) -> tuple[float, ...]:
        """A row over the window as one over all entries, its displacement from the newest so many times as long."""
        full = [0.0] * len(history.entries)
        for position, value in zip(self.window[:-1], row, strict=False):
            full[position] = factor * value
        full[self.window[-1]] = 1.0 - math.fsum(full)
        return tuple(full)


class LinePredictor:
    """Least-squares line of each operator on the cumulative-learning-rate axis.

    Predicts `x_c + factor * slope * reach`. The factor is the operator's: as much as its own path is straighter than
    the model's, 0 to 2. Window and reach are those of the lowest expected end cost, by the offline table; where even
    that is no less than recomputing, the forecast's `expected_end_cost_iterations` shows it. A reach of 0 is among
    them: the weights of the newest checkpoint. A line needs three usable checkpoints within the window, and goes no
    further ahead than it is fitted over, nor 10 intervals; where there is none, the reach is 0.

    A horizon of 0 (without `Target.moves`), and a learning rate of 0, leave the newest checkpoint unchanged. One that
    holds NaN or infinity is left out and reported. An operator that some usable checkpoint has of an earlier
    iteration, as sparse checkpoints have experts, keeps its newest value.

    Args:
        window_iterations: span of history the line is fitted over; None: by expected cost.
        gain: the reach over the horizon, 0 or larger; None: by expected cost.

    Attributes:
        ranks: all that predict together.
    """

    name = "line"
    _always_moves = False  # True, in the benchmarks: going on from the checkpoint's weights is no setting

    def __init__(
        self,
        window_iterations: int | None = None,
        gain: float | None = None,
    ) -> None:
        self.ranks = Ranks()
        self._window_iterations = window_iterations
        self._gain = gain
        self._directions: Sequence[Direction] = ("line",)

    def forecast(self, history: History, target: Target) -> Forecast:
        """Decide the coefficients; reads the checkpoints in use, to leave out any that holds NaN or infinity.

        What was learned from, and was finite then, is not read again: it would be half of the time of a recovery.

        Raises:
            ValueError: the target lies before the newest entry, or the history is not ascending or not finite in time.
        """
        return self._report(history, target, self._agreed_plan(history, target))

    def predict(self, history: History, forecast: Forecast) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Stream the predicted weights as `(operator, start, values)` pieces, `values` 1-D float32, fresh memory.

        A tensor that was the same in every checkpoint comes out equal to itself (`torch.equal`).

        Raises:
            ValueError: the forecast is not feasible, or does not belong to this history.
        """
        if not forecast.feasible:
            raise ValueError(f"this forecast is not feasible: {forecast.reason}")
        return combine(history, forecast.coefficients)

    def learn(self, history: History) -> Iterator[None]:
        """Learn from the newest checkpoint of the history, in slices; here nothing.

        Every `next` does one bounded piece of work, whatever the model's size. The caller may pause it for any time,
        or abandon it. Attributes are replaced, never changed in place, and after each `next` they belong together:
        until the checkpoint is taken in there is no change, and what comes after that may be left out.
        """
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as plain data: it commits with every checkpoint. Here which predictor it is."""
        return {"predictor": self.name, "version": STATE_VERSION}

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

    def _agreed_plan(self, history: History, target: Target) -> Plan:
        """The plan once no rank finds a damaged checkpoint in it."""
        check_history(history.entries, target)
        usable = list(range(len(history.entries)))
        checked: set[tuple[str, int]] = set()
        while True:
            plan = self._plan(history, target, usable)
            damaged = self.ranks.agree(self._damaged(history, plan, checked))
            if not damaged:
                return plan
            usable = [position for position in usable if position not in damaged]

    def _plan(self, history: History, target: Target, usable: Sequence[int]) -> Plan:
        entries = history.entries
        points = [entries[position] for position in usable]
        whole = tuple(
            operator
            for operator in history.operators
            if all(history.taken_at(operator, position) == entries[position].iteration for position in usable)
        )
        plan = Plan(tuple(usable), whole)
        if not points:
            return replace(plan, obstacle="there is no usable checkpoint to predict from")
        if target.iteration == points[-1].iteration and not target.moves:
            return _unchanged(plan, "the failure is at a checkpoint: its weights, unchanged", target)
        if _pace(points[-1], target) == 0.0:
            return _unchanged(plan, "the learning rate is 0 at the checkpoint: its weights, unchanged", target)
        return self._fitted(history, target, plan, points)

    def _fitted(self, history: History, target: Target, plan: Plan, points: Sequence[HistoryEntry]) -> Plan:
        """The plan of the lowest expected cost."""
        windows, no_line = self.usable_windows(points, target)
        beyond = target.iteration - points[-1].iteration > HORIZON_ITERATIONS  # what a skip costs there is not known
        if no_line is not None and (beyond or self._always_moves or self._gain is not None):
            return replace(plan, obstacle=no_line)
        positions = [] if no_line else self._path_positions(history, plan.usable)
        paths = {} if no_line else self._path(history, plan.whole, positions)
        products = sum(paths.values(), torch.zeros(2, 2, dtype=torch.float64, device="cpu"))
        context = context_of(target, points[-1], TYPICAL_STRAIGHTNESS if no_line else straightness(products))
        considered = candidates(context, windows, self._gain, self._directions)
        considered = [one for one in considered if one != STALE or not self._always_moves]
        setting, expected = table().best(context, considered, CAUTION_DEVIATIONS)
        reach = setting.reach_iterations * _pace(points[-1], target)
        settings: dict[str, Any] = {
            "window_iterations": int(setting.window_iterations),
            "reach_iterations": setting.reach_iterations,
            "reach_time": reach,
            "direction": setting.direction,
            "skip_iterations": expected.skip_iterations,
            "move_iterations": expected.move_iterations,
            "expected_deviation_iterations": expected.deviation_iterations,
            "lost_share": target.lost_share,
            "context": asdict(context),
        }
        # One of the checkpoints of the path may be damaged, and outside of the window.
        damaged_path = () if bool(torch.isfinite(products).all()) else positions
        if setting == STALE:
            settings |= {"no_line": no_line} if no_line else {}
            read = tuple(sorted({plan.usable[-1], *damaged_path}))
            return replace(plan, window=plan.usable[-1:], row=(1.0,), read=read, settings=settings)
        window = plan.usable[window_start(points, int(setting.window_iterations)) :]
        times = [history.entries[position].time for position in window]
        factors = {operator: reach_factor(path, context.straightness) for operator, path in paths.items()}
        ordered = sorted(factors.values()) or [1.0]
        lost = bool(history.operators) and not plan.whole
        return replace(
            plan,
            window=window,
            row=line_coefficients(times, reach),
            factors=factors,
            read=tuple(sorted({*window, *damaged_path})),
            obstacle="no operator here was saved in every checkpoint that could be predicted from" if lost else None,
            settings=settings | {"operator_factors": [ordered[0], statistics.median(ordered), ordered[-1]]},
        )

    def _path_positions(self, history: History, usable: Sequence[int]) -> list[int]:
        """Positions of those of the usable checkpoints, at least three, that the recent path is measured by."""
        return [usable[place] for place in path_places([history.entries[position] for position in usable])]

    def _path(self, history: History, operators: Sequence[str], positions: Sequence[int]) -> dict[str, torch.Tensor]:
        """Products `(2, 2)` of each operator's displacements over the two halves of the recent path, of all ranks."""
        own = {
            operator: self._products(history, operator, positions) * self.ranks.portion(operator)
            for operator in filter(self.ranks.is_mine, operators)
        }
        return dict(sorted(self.ranks.reduce(own).items()))  # every rank adds up in the same order

    def _products(self, history: History, operator: str, positions: Sequence[int]) -> torch.Tensor:
        """Gram matrix between these entries, of this rank's slice."""
        return gram(history, operator, positions)

    def _damaged(self, history: History, plan: Plan, checked: set[tuple[str, int]]) -> list[int]:
        """Positions of entries that are read and that hold NaN or infinity; `checked` grows."""
        damaged: set[int] = set()
        whole, newest = set(plan.whole), plan.usable[-1:]
        for operator in history.operators if plan.window else ():
            for position in plan.read if operator in whole else newest:
                if position in damaged or (operator, position) in checked:
                    continue
                checked.add((operator, position))
                if self._must_read(history, operator, position) and not is_finite(history, operator, position):
                    damaged.add(position)
        return sorted(damaged)

    def _must_read(self, history: History, operator: str, position: int) -> bool:
        """Whether this rank has to find out if these weights are finite: `agree` informs all of what others find."""
        return self.ranks.is_mine(operator)

    def _report(self, history: History, target: Target, plan: Plan) -> Forecast:
        entries, usable = history.entries, plan.usable
        left_out = [entry.iteration for position, entry in enumerate(entries) if position not in set(usable)]
        settings: dict[str, Any] = {"left_out_not_finite": left_out, **plan.settings}
        aside = f"; left out, not finite: iterations {left_out}" if left_out else ""
        horizon = target.iteration - (entries[usable[-1]].iteration if usable else 0)
        if plan.obstacle is not None:
            return Forecast(self.name, False, {}, float(horizon), plan.obstacle + aside, settings)
        whole = set(plan.whole)
        held = [operator for operator in history.operators if operator not in whole]
        settings |= {
            "base_iteration": entries[usable[-1]].iteration,
            "horizon_iterations": horizon,
            "used_iterations": [point.iteration for point in plan.points(history)],
            "held_operators": len(held),
            "held_names": held[:MAX_NAMES],
        }
        if held:
            aside += (
                f"; {len(held)} operators keep their newest value, some checkpoints have them of earlier iterations"
            )
        coefficients = {
            operator: plan.coefficients(
                plan.row, history, plan.factors.get(operator, 1.0) if operator in whole else 0.0
            )
            for operator in history.operators
        }
        reason = (plan.note or _sentence(settings, moves=plan.moves)) + aside
        expected = settings["skip_iterations"] + settings["move_iterations"]
        method = self.name if plan.moves else STALE_METHOD
        return Forecast(method, True, coefficients, expected, reason, settings)

    def usable_windows(self, points: Sequence[HistoryEntry], target: Target) -> tuple[list[int], str | None]:
        """Windows over which a line can be fitted to checkpoints at `points`; where there is none, why not."""
        if len(points) < MIN_CHECKPOINTS:
            found = "is one" if len(points) == 1 else f"are {len(points)}"
            return [], f"a prediction needs {MIN_CHECKPOINTS} usable checkpoints, and there {found}"
        asked = windows(points) if self._window_iterations is None else [self._window_iterations]
        obstacles = {window: _window_obstacle(points, window, target) for window in asked}
        usable = [window for window in asked if obstacles[window] is None]
        return usable, None if usable else obstacles[asked[-1]]


def _sentence(settings: Mapping[str, Any], *, moves: bool) -> str:
    skip, move = settings["skip_iterations"], settings["move_iterations"]
    cost = (
        f"{settings['horizon_iterations']} iterations ahead; expected end cost {skip + move:+.0f} ± "
        f"{settings['expected_deviation_iterations']:.0f}"
    )
    if not moves:
        why = f"; no line: {settings['no_line']}" if "no_line" in settings else ""
        return f"stale: the weights of checkpoint {settings['base_iteration']}, {cost}{why}"
    lowest, _, highest = settings["operator_factors"]
    return (
        f"{settings['direction']} over {len(settings['used_iterations'])} checkpoints "
        f"({settings['window_iterations']} iterations), followed for {settings['reach_iterations']:.0f} iterations "
        f"({lowest:.1f} to {highest:.1f} times that by operator), {cost}, {move:+.0f} of it the move's"
    )


def _unchanged(plan: Plan, note: str, target: Target) -> Plan:
    newest = plan.usable[-1:]
    settings = {"skip_iterations": 0.0, "move_iterations": 0.0, "lost_share": target.lost_share}
    return replace(plan, window=newest, row=(1.0,), read=newest, note=note, settings=settings)


def _pace(newest: HistoryEntry, target: Target) -> float:
    """Cumulative learning rate per iteration of reach: the mean up to the failure, or of the next update."""
    ahead = target.iteration - newest.iteration
    return (target.time - newest.time) / ahead if ahead else newest.learning_rate


def _window_obstacle(points: Sequence[HistoryEntry], window: int, target: Target) -> str | None:
    """Why no line can be fitted over this window; None where it can."""
    fitted = points[window_start(points, window) :]
    if len(fitted) < MIN_CHECKPOINTS:
        return (
            f"a prediction needs {MIN_CHECKPOINTS} usable checkpoints within {window} iterations, and there are "
            f"{len(fitted)}"
        )
    still = "the learning rate was 0 over the whole window" if fitted[-1].time == fitted[0].time else None
    return too_far(target, fitted) or still


def line_coefficients(times: Sequence[float], reach: float) -> tuple[float, ...]:
    """Coefficients of `x_n + reach * slope` over the snapshots, n the newest.

    Let m be the mean time and `S = sum (t_k - m)^2`. The slope is `sum_k (t_k - m)/S * x_k`. The newest coefficient is
    positive.

    Args:
        times: ascending, not all equal; at least 2.
        reach: in the unit of the times, 0 or larger.

    Returns:
        One float per time; they sum to 1 to rounding.

    >>> line_coefficients([0.0, 1.0], 1.0)
    (-1.0, 2.0)
    """
    mean = math.fsum(times) / len(times)
    scatter = math.fsum((time - mean) ** 2 for time in times)
    row = [reach * ((time - mean) / scatter) for time in times[:-1]]
    return (*row, 1.0 - math.fsum(row))
