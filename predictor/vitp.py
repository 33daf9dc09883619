"""VITP: the line's displacement, turned for each operator by what its own motion shows."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from cpsr.predictor.calibration import Direction
from cpsr.predictor.examples import Examples, windows
from cpsr.predictor.gram import gram
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.obstacles import window_start
from cpsr.predictor.protocol import Forecast, History, Target
from cpsr.predictor.series import Series
from cpsr.predictor.series_predictor import CHUNK_ELEMENTS, MAX_NAMES, Fit
from cpsr.predictor.statistics import MotionStatistics, OperatorMotion
from cpsr.predictor.vitp_rows import OperatorFit, turned_rows
from cpsr.predictor.vitp_training import STEPS_PER_CHECKPOINT, Head

__all__ = ["MIN_UPDATES", "VITPPredictor"]

STATE_VERSION = 1
# Before four checkpoints' training the network has little to say.
MIN_UPDATES = 4 * STEPS_PER_CHECKPOINT
# One number for every checkpoint of the run's recent past.
MAX_ACCURACIES = 256

Reduce = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class VITPPredictor(LinePredictor):
    """The line with a learned direction for each operator (a `StatePredictor`).

    What the line adds to its base, gain times slope times time, keeps its length and is turned: by a row over the
    operator's snapshots that a small network chooses from the Gram matrix of their differences. The network starts
    with the line's direction exactly. It is trained on the run's own past, as checkpoints arrive (`learn`), to point
    to where the weights moved later; scale, base and window are not learned here. Fewer than four snapshots, an
    operator that never moved, and products that are not finite leave the line's row.

    Source: CPSR, section III-A (VITP), with coefficients per operator in place of predicted values.

    Args:
        window_iterations: as in `LinePredictor`.
        gain: as in `LinePredictor`.
        base: as in `LinePredictor`.
        chunk_elements: as in `LinePredictor`.
        agree: as in `SeriesPredictor`.
        name: as in `SeriesPredictor`.
        direction: whose direction is taken. None: that of the lower expected lag, the line's until the network has
            been trained on four checkpoints.
        trains: False on ranks that take another's weights by `broadcast`.
        reduce: where ranks hold slices of the same operators: sums matrices by name over the ranks (a collective,
            called exactly once a forecast; a rank's own may lack operators, and may be empty). Where slices of one
            operator were taken at different iterations, each has a name of its own. None: this rank alone.
        broadcast: where ranks predict together: returns rank 0's argument on every rank (likewise; the argument is
            numbers and one tensor in a mapping). None: this rank's own.

    Raises:
        ValueError: as `LinePredictor`, or an unknown direction.
    """

    name = "vitp"

    def __init__(
        self,
        window_iterations: int | None = None,
        gain: float | None = None,
        base: Literal["checkpoint", "line"] | None = None,
        chunk_elements: int = CHUNK_ELEMENTS,
        agree: Callable[[Sequence[int]], Sequence[int]] | None = None,
        name: str | None = None,
        *,
        direction: Direction | None = None,
        trains: bool = True,
        reduce: Reduce | None = None,
        broadcast: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(window_iterations, gain, base, chunk_elements, agree, name)
        if direction not in (None, "line", "vitp"):
            raise ValueError(f"direction = {direction!r}: expected 'line', 'vitp' or None")
        self._forced = direction
        self._trains = trains
        self._reduce = reduce
        self._broadcast = broadcast
        self._statistics = MotionStatistics()
        self._examples = Examples()
        self._head = Head()
        self._accuracy: list[dict[str, Any]] = []
        self._checkpoints = 0
        self._updates = 0  # of the head that the running forecast asks, which may be another rank's
        self._asked: dict[str, OperatorFit] = {}

    def learn(self, history: History) -> Iterator[None]:
        """Take in the newest checkpoint: its products with those before it, then some training on all of them.

        Every `next` reads at most half a million weights or makes one update of the network: a few milliseconds.
        What was learned changes at the very end, all at once. The same checkpoints, taken in one by one, always give
        the same result; torch's global random state and its threads are left alone.

        Raises:
            ValueError: the history returned a piece of another length or type.
        """
        statistics = copy.copy(self._statistics)  # an update replaces what it holds, it changes nothing in place
        yield from statistics.update(history)
        newest, before = max(statistics.seen, default=-1), set(self._statistics.seen)
        if newest in before or newest < 0 or not self._trains:
            self._statistics = statistics
            return
        examples, head = self._examples.copy(), self._head.copy()
        taken = yield from windows(statistics.operators)
        yield
        accuracy, checkpoints = list(self._accuracy), self._checkpoints + len(set(statistics.seen) - before)
        if taken:
            found = yield from head.accuracy(taken)
            moved = {"mean_square_motion": _newest_mean_square(statistics.operators.values())}
            accuracy.append({"iteration": newest, "checkpoints": checkpoints, **found, **moved})
        for window in taken:
            examples.add(window)
        generator = torch.Generator(device="cpu").manual_seed(newest)
        for _ in range(STEPS_PER_CHECKPOINT if len(examples) else 0):
            head.step(examples, generator)
            yield
        self._statistics, self._examples, self._head = statistics, examples, head
        self._accuracy, self._checkpoints = accuracy[-MAX_ACCURACIES:], checkpoints

    def accuracy(self) -> list[dict[str, Any]]:
        """Of each recent checkpoint, oldest first: how well its difference from the one before was foretold.

        Each is `{"iteration", "checkpoints", "line_cosine", "vitp_cosine", "mean_square_motion"}`: how many
        checkpoints of the run were taken in by then; the mean cosine between direction and difference over the
        operators, by the distance that they moved, before the network learned from it; and the mean square of that
        difference over this rank's weights. Noise of the two checkpoints is in the difference, the more the shorter
        the interval: compare the two.
        """
        return copy.deepcopy(self._accuracy)

    @property
    def left_out(self) -> tuple[int, ...]:
        """Iterations of the history's checkpoints that were not learned from, since they are not finite."""
        return self._statistics.left_out

    def forecast(self, history: History, target: Target) -> Forecast:
        """Decide the coefficients; reads those of the checkpoints in use that it has not learned from.

        Settings say the `direction` taken, how many updates its network has had (`updates`), and which operators keep
        the line's row (`line_operators`, their number, and up to 8 `line_names`).

        Raises:
            ValueError: the target lies before the newest entry, or the history is not ascending or not finite in time.
        """
        shared: dict[str, Any] = {"updates": self._head.steps, "parameters": self._head.parameters.detach()}
        if self._broadcast is not None:
            shared = self._broadcast(shared)
        self._updates = shared["updates"]
        self._asked = {}
        forecast = super().forecast(history, target)
        asked = self._settled(forecast)
        products = {operator: self._products(history, operator, one) for operator, one in asked.items()}
        if self._reduce is not None:
            names = _names_between_ranks(history, forecast, asked)
            summed = self._reduce({names[operator]: matrix for operator, matrix in products.items()})
            products = {operator: summed[names[operator]] for operator in products}
        rows = turned_rows(asked, products, shared["parameters"], target)
        return self._with_rows(history, forecast, asked, rows)

    def state_dict(self) -> dict[str, Any]:
        """Past recoveries and all that was learned, as plain data and tensors: below 1 MB at 300 operators."""
        learned = {
            "version": STATE_VERSION,
            "statistics": self._statistics.state_dict(),
            "examples": self._examples.state_dict(),
            "head": self._head.state_dict() if self._head.steps else None,  # no 0.2 MB for what was never trained
            "checkpoints": self._checkpoints,
            "accuracy": copy.deepcopy(self._accuracy),
        }
        return {**super().state_dict(), "vitp": learned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict()` returned.

        Raises:
            ValueError: the state was written by another predictor or another version; nothing has changed.
        """
        learned = state.get("vitp", {})
        if state.get("predictor") == self.name and learned.get("version") != STATE_VERSION:
            raise ValueError(f"learned state of VITP, version {learned.get('version')!r}; this is {STATE_VERSION}")
        statistics, examples, head = MotionStatistics(), Examples(), Head()
        if learned:
            statistics.load_state_dict(learned["statistics"])
            examples.load_state_dict(learned["examples"])
            if learned["head"] is not None:
                head.load_state_dict(learned["head"])
        super().load_state_dict(state)
        self._statistics, self._examples, self._head = statistics, examples, head
        self._accuracy, self._checkpoints = copy.deepcopy(learned["accuracy"]), learned["checkpoints"]

    def _found_finite(self, history: History, operator: str, position: int) -> bool:
        iteration = history.entries[position].iteration
        return self._statistics.found_finite(operator, history.numel(operator), iteration)

    def _operator_row(self, history: History, operator: str, series: Series, fit: Fit, target: Target) -> Fit:
        fit = super()._operator_row(history, operator, series, fit, target)
        if fit.settings["direction"] == "line":
            return fit
        start = window_start(series.points, fit.settings["window_iterations"])
        window = tuple(range(start, len(series.points)))
        held_in = frozenset(history.entries[position].iteration for position in series.indices)
        self._asked[operator] = OperatorFit(series, fit, window, held_in)
        return replace(fit, reads=window)

    def _directions(self) -> tuple[Direction, ...]:
        if self._forced is not None:
            return (self._forced,)
        return ("line", "vitp") if self._updates >= MIN_UPDATES else ("line",)

    def _products(self, history: History, operator: str, asked: OperatorFit) -> torch.Tensor:
        """Gram matrix over the window: what was learned, or read now where the newest checkpoint was not yet."""
        known = self._statistics.operators.get(operator)
        if known is not None and known.numel == history.numel(operator):
            products = known.between([point.iteration for point in asked.points])
            if products is not None:
                return products
        return gram(history, operator, [asked.series.indices[place] for place in asked.window])

    def _settled(self, forecast: Forecast) -> dict[str, OperatorFit]:
        """Those asked for when no more checkpoints were left out."""
        left_out = set(forecast.settings["left_out_not_finite"])
        if not forecast.feasible:
            return {}
        return {operator: asked for operator, asked in self._asked.items() if left_out.isdisjoint(asked.held_in)}

    def _with_rows(
        self,
        history: History,
        forecast: Forecast,
        asked: Mapping[str, OperatorFit],
        rows: Mapping[str, tuple[float, ...]],
    ) -> Forecast:
        coefficients = dict(forecast.coefficients)
        for operator, row in rows.items():
            full = [0.0] * len(history.entries)
            for position, value in zip(asked[operator].series.indices, row, strict=True):
                full[position] = value
            coefficients[operator] = tuple(full)
        line = [operator for operator in asked if operator not in rows]
        settings = {
            **forecast.settings,
            "direction": "vitp" if rows else "line",
            "updates": self._updates,
            "line_operators": len(line),
            "line_names": line[:MAX_NAMES],
        }
        reason = forecast.reason
        if rows:
            reason += f"; {len(rows)} operators in a learned direction"
        elif forecast.feasible and "vitp" not in self._directions() and self._forced is None:
            reason += f"; in the line's direction, the network has had {self._updates} of {MIN_UPDATES} updates"
        return replace(forecast, coefficients=coefficients, settings=settings, reason=reason)


def _names_between_ranks(history: History, forecast: Forecast, asked: Mapping[str, OperatorFit]) -> dict[str, str]:
    """Operator -> the name of its products: one for all slices that were taken at the same iterations."""
    left_out = set(forecast.settings["left_out_not_finite"])
    entries = tuple(entry for entry in history.entries if entry.iteration not in left_out)
    names: dict[str, str] = {}
    for operator, one in asked.items():
        names[operator] = operator
        if one.series.points != entries:
            names[operator] += "@" + ",".join(str(point.iteration) for point in one.points)
    return names


def _newest_mean_square(motions: Iterable[OperatorMotion]) -> float:
    """Mean over the weights of the squared difference between the newest two snapshots; 0 where there are no two."""
    known = [motion for motion in motions if len(motion.points) > 1]
    numel = sum(motion.numel for motion in known)
    return sum(float(motion.products[-1, -1]) for motion in known) / numel if numel else 0.0
