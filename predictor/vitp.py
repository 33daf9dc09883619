"""VITP: the line's displacement, with a direction for each operator learned from its own motion."""

import copy
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cpsr.predictor.assignment import OwnOperators, Together, learned_together, shared_state
from cpsr.predictor.calibration import Direction
from cpsr.predictor.examples import Examples, windows
from cpsr.predictor.footprint import Footprint, fitted
from cpsr.predictor.gram import gram
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.obstacles import window_start
from cpsr.predictor.prior import MIN_CHECKPOINTS
from cpsr.predictor.protocol import Forecast, History, Target
from cpsr.predictor.ranks import ALONE, Ranks
from cpsr.predictor.series import Series
from cpsr.predictor.series_predictor import CHUNK_ELEMENTS, MAX_NAMES, Fit
from cpsr.predictor.statistics import SLICE_ELEMENTS, MotionStatistics, OperatorMotion
from cpsr.predictor.straightness import path_places, path_positions, straightness
from cpsr.predictor.vitp_rows import OperatorFit, turned_rows
from cpsr.predictor.vitp_training import STEPS_PER_CHECKPOINT, Head

__all__ = ["MIN_UPDATES", "Progress", "VITPPredictor"]

STATE_VERSION = 1
# A network trained on fewer than four checkpoints is of little use.
MIN_UPDATES = 4 * STEPS_PER_CHECKPOINT
# One number for every checkpoint of the run's recent past.
MAX_ACCURACIES = 256


@dataclass(frozen=True)
class Progress:
    """How much of a run was learned from.

    Attributes:
        iteration: newest checkpoint of the history that was taken in; None: none.
        checkpoints: taken in so far.
        updates: of the network, on this run.
    """

    iteration: int | None
    checkpoints: int
    updates: int


class VITPPredictor(LinePredictor):
    """The line with a learned direction for each operator (a `StatePredictor`).

    What the line adds to the checkpoint, gain times slope times time, keeps its length and is turned: by a row over the
    operator's snapshots that a small network chooses from the Gram matrix of their differences. The network was
    pretrained on other runs to point to where the weights moved later. It is trained further on the run's own past, as
    checkpoints arrive (`learn`); scale and window are not learned here. Fewer than four snapshots, an operator that
    never moved, and products that are not finite leave the line's row.

    Where ranks hold the same operators, each takes the statistics of its share of them (`Ranks.share`). One rank
    trains on what all have learned, as it was saved with a checkpoint: what all had taken in before that one. So the
    network is one checkpoint behind, and otherwise the same as without sharing. Training itself is not shared, because
    gradients would have to go around with every update. An update takes some 4 ms of a core with 40 operators and more
    (2026-11-24, x86 server). A rank that lags or was lost costs its own operators alone: training goes on without them,
    and a forecast reads them anew, or leaves them the line's row.

    Source: CPSR, section III-A (VITP), with coefficients per operator in place of predicted values.

    Args:
        window_iterations: as in `LinePredictor`.
        gain: as in `LinePredictor`.
        chunk_elements: as in `LinePredictor`.
        direction: whose direction is taken. None: that of the lower expected end cost, the line's until the network has
            had 32 updates in this run.
        ranks: the other ranks that predict together. `broadcast` is called once a forecast, `reduce` once more than
            damage is searched for, alike on all. Where slices of one operator were taken at different iterations, each
            has a name of its own in `reduce`.

    Raises:
        ValueError: as `LinePredictor`, or an unknown direction.
    """

    name = "vitp"

    def __init__(
        self,
        window_iterations: int | None = None,
        gain: float | None = None,
        chunk_elements: int = CHUNK_ELEMENTS,
        *,
        direction: Direction | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(window_iterations, gain, chunk_elements, ranks.agree)
        if direction not in (None, "line", "vitp"):
            raise ValueError(f"direction = {direction!r}: expected 'line', 'vitp' or None")
        self._forced = direction
        self._ranks = ranks
        self._learns = True
        self._memory_limit_bytes: int | None = None
        self._slice_elements = SLICE_ELEMENTS
        self._statistics = MotionStatistics()
        self._examples = Examples()
        self._head = Head()
        self._accuracy: list[dict[str, Any]] = []
        self._checkpoints = 0
        self._trained_iteration = -1  # newest checkpoint used in training, where ranks share
        # Of the head that the running forecast asks, and the checkpoints that it counts as learned: rank 0's.
        self._updates = 0
        self._seen: frozenset[int] = frozenset()
        self._asked: dict[str, OperatorFit] = {}
        self._kept: dict[str, Any] | None = None  # what was learned before, where this life learns nothing

    def stay_within(self, limit_bytes: int, operators: int, checkpoints: int) -> Footprint:
        """Choose piece sizes so that this predictor stays within so much host memory; before its first use.

        Args:
            limit_bytes: of host memory.
            operators: that this rank holds a slice of.
            checkpoints: in the history, at most.

        Raises:
            ValueError: it does not fit, whatever the pieces; nothing has changed.
        """
        footprint = fitted(limit_bytes, operators, checkpoints, self._chunk_elements, learns=self._learns)
        self._memory_limit_bytes = limit_bytes
        self._chunk_elements, self._slice_elements = footprint.chunk_elements, footprint.slice_elements
        self._statistics = self._empty_statistics()
        return footprint

    def least_footprint(self, operators: int, checkpoints: int, *, learns: bool) -> Footprint:
        """Its memory with the smallest pieces, with or without learning; arguments as in `stay_within`."""
        return Footprint.least(operators, checkpoints, self._chunk_elements, learns=learns)

    def follow_line(self) -> None:
        """Learn nothing, and always use the line's direction; before its first use.

        Statistics of earlier lives are not used, but pass unchanged into `state_dict()` for a later life. Their
        recoveries are loaded, and calibrate the line.
        """
        self._learns = False
        self._forced = "line"

    def learn(self, history: History) -> Iterator[None]:
        """Learn from the newest checkpoint: its products with those before it, then some training on all of them.

        Every `next` reads at most half a million weights or makes half an update of the network: a millisecond or two.
        What was taken in counts as soon as its products are complete, and each update once it is: abandoned later, a
        checkpoint lacks the rest of its training alone, which is not made up for. The same checkpoints, processed one
        by one and to the end, always give the same result; torch's global random state and its threads are left alone.

        Raises:
            ValueError: the history returned a piece of another length or type, or is too long for the memory that
                `stay_within` has allowed.
        """
        if self._memory_limit_bytes is not None:
            operators, checkpoints = len(history.operators), len(history.entries)
            needed = Footprint(operators, checkpoints, self._slice_elements, self._chunk_elements)
            needed.require(self._memory_limit_bytes)
        # First, because learning its own share takes long, and that checkpoint may be thinned meanwhile.
        together = (yield from self._learned_by_all(history)) if self._ranks.trains else None
        statistics = copy.copy(self._statistics)  # an update replaces what it holds, it changes nothing in place
        yield from statistics.update(self._own(history))
        newest, before = max(statistics.seen, default=-1), set(self._statistics.seen)
        if newest in before or newest < 0 or not self._ranks.trains:
            self._statistics = statistics
            return
        self._statistics, self._checkpoints = statistics, self._checkpoints + len(set(statistics.seen) - before)
        yield
        if not self._shared and newest > self._trained_iteration:
            together = Together(newest, statistics.operators)
        if together is not None:
            later = sum(iteration > together.iteration for iteration in statistics.seen)
            yield from self._train(together, self._checkpoints - later)

    def accuracy(self) -> list[dict[str, Any]]:
        """Of each recent checkpoint, oldest first: how well its difference from the one before was predicted.

        Each is `{"iteration", "checkpoints", "line_cosine", "vitp_cosine", "mean_square_motion"}`: how many
        checkpoints of the run were taken in by then; the mean cosine between direction and difference over the
        operators, by the distance that they moved, before the network learned from it; and the mean square of that
        difference over this rank's weights. Noise of the two checkpoints is in the difference, the more the shorter
        the interval: compare the two.
        """
        return copy.deepcopy(self._accuracy)

    def progress(self) -> Progress:
        """How much of the run was learned from."""
        return Progress(max(self._statistics.seen, default=None), self._checkpoints, self._head.steps)

    def straightness(self) -> float | None:
        """Straightness of the recent path, from what was learned; None until that is three checkpoints.

        Of one rank of several it is that of its own weights: no rank waits for another.
        """
        motions = self._statistics.operators.values()
        points = max((motion.points for motion in motions), key=len, default=())
        if len(points) < MIN_CHECKPOINTS:
            return None
        iterations = [points[place].iteration for place in path_places(points)]
        total = torch.zeros(2, 2, dtype=torch.float64, device="cpu")
        for motion in motions:
            products = motion.between(iterations)
            if products is not None:
                total += products
        return straightness(total)

    @property
    def left_out(self) -> tuple[int, ...]:
        """Iterations of the history's checkpoints that were not learned from, since they are not finite."""
        return self._statistics.left_out

    def forecast(self, history: History, target: Target) -> Forecast:
        """Decide the coefficients; reads those of the checkpoints in use that it has not learned from.

        The forecast's `method` is `vitp` where the network turned any operator's direction, else `line`. Settings say
        the `direction` taken and how many updates its network has had (`updates`). `line_operators` is the number of
        operators that keep the line's row, `line_names` has up to 8 of them.

        Raises:
            ValueError: the target lies before the newest entry, or the history is not ascending or not finite in time.
        """
        shared: dict[str, Any] = {"updates": self._head.steps, "parameters": self._head.parameters.detach()}
        shared = self._ranks.broadcast({**shared, "seen": list(self._statistics.seen)})
        self._updates, self._seen = shared["updates"], frozenset(shared["seen"])
        self._asked = {}
        forecast = super().forecast(history, target)
        asked = self._settled(forecast)
        products = {
            operator: self._products(history, operator, one) * self._ranks.portion(operator)
            for operator, one in asked.items()
            if self._is_mine(operator)
        }
        names = _names_between_ranks(history, forecast, asked)
        summed = self._ranks.reduce({names[operator]: matrix for operator, matrix in products.items()})
        products = {operator: summed[names[operator]] for operator in asked if names[operator] in summed}
        known = {operator: one for operator, one in asked.items() if operator in products}
        rows = turned_rows(known, products, shared["parameters"], target)
        return self._with_rows(history, forecast, asked, rows)

    def state_dict(self) -> dict[str, Any]:
        """Past recoveries and all that was learned, as plain data and tensors: below 1 MB at 300 operators."""
        return {**super().state_dict(), "vitp": self._learned() if self._kept is None else self._kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict()` returned.

        Raises:
            ValueError: the state was written by another predictor or another version; nothing has changed.
        """
        learned = state.get("vitp", {})
        if state.get("predictor") == self.name and learned.get("version") != STATE_VERSION:
            raise ValueError(f"learned state of VITP, version {learned.get('version')!r}; this is {STATE_VERSION}")
        if not self._learns:
            super().load_state_dict(state)
            self._kept = learned or None
            return
        statistics, examples, head = self._empty_statistics(), Examples(), Head()
        if learned:
            statistics.load_state_dict(learned["statistics"])
            examples.load_state_dict(learned["examples"])
            if learned["head"] is not None:
                head.load_state_dict(learned["head"])
        super().load_state_dict(state)
        self._statistics, self._examples, self._head = statistics, examples, head
        self._accuracy, self._checkpoints = copy.deepcopy(learned["accuracy"]), learned["checkpoints"]
        # Without sharing all that was taken in was trained on.
        self._trained_iteration = learned.get("trained_iteration", max(statistics.seen, default=-1))

    def _learned(self) -> dict[str, Any]:
        learned = {
            "version": STATE_VERSION,
            "statistics": shared_state(self._statistics) if self._shared else self._statistics.state_dict(),
            "examples": self._examples.state_dict(),
            "head": self._head.state_dict() if self._head.steps else None,  # else no 0.2 MB for what is shipped
            "checkpoints": self._checkpoints,
            "accuracy": copy.deepcopy(self._accuracy),
        }
        if self._shared:
            learned["trained_iteration"] = self._trained_iteration
        return learned

    def _empty_statistics(self) -> MotionStatistics:
        return MotionStatistics(self._slice_elements)

    @property
    def _shared(self) -> bool:
        return self._ranks.share is not None and self._ranks.share.is_shared

    def _is_mine(self, operator: str) -> bool:
        return self._ranks.share is None or self._ranks.share.is_mine(operator)

    def _own(self, history: History) -> History:
        return (
            history
            if self._ranks.share is None or not self._ranks.share.is_shared
            else OwnOperators(history, self._ranks.share)
        )

    def _learned_by_all(self, history: History) -> Generator[None, None, Together | None]:
        """The sharing ranks' statistics up to the newest checkpoint of the history; None where nothing is new."""
        if self._ranks.share is None or not self._ranks.share.is_shared or not history.entries:
            return None
        parts = []
        for part in self._ranks.share.learned(history.entries[-1].iteration):
            if part is not None:
                parts.append(part)
            yield
        return (yield from learned_together(parts, self._trained_iteration, history.operators))

    def _train(self, together: Together, checkpoints: int) -> Iterator[None]:
        """Some training on the motion up to that checkpoint; every update counts at once."""
        accuracy = list(self._accuracy)
        # An operator that was not saved anew has taught all it can, and was scored, when it was.
        fresh = {
            name: one
            for name, one in together.operators.items()
            if one.points and one.points[-1].iteration == together.iteration  # all of its snapshots may be left out
        }
        taken = yield from windows(fresh)
        yield
        if taken:
            found = yield from self._head.accuracy(taken)
            moved = {"mean_square_motion": _newest_mean_square(fresh.values())}
            accuracy.append({"iteration": together.iteration, "checkpoints": checkpoints, **found, **moved})
        examples = self._examples.copy()
        for window in taken:
            examples.add(window)
        self._examples, self._accuracy = examples, accuracy[-MAX_ACCURACIES:]
        self._trained_iteration = together.iteration
        generator = torch.Generator(device="cpu").manual_seed(together.iteration)
        for _ in range(STEPS_PER_CHECKPOINT if len(examples) else 0):
            head = self._head.copy()  # a forecast may come between any two pieces
            yield from head.step(examples, generator)
            self._head = head
            yield

    def _damaged(
        self, history: History, reads: Mapping[str, Sequence[int]], checked: set[tuple[str, int]]
    ) -> list[int]:
        # The other ranks check their own, and `agree` informs all.
        own = {operator: positions for operator, positions in reads.items() if self._is_mine(operator)}
        return super()._damaged(history, own, checked)

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
        self._asked[operator] = OperatorFit(series, fit, window, held_in, self._factor(operator, series))
        return replace(fit, reads=window)

    def _directions(self) -> tuple[Direction, ...]:
        if self._forced is not None:
            return (self._forced,)
        return ("line", "vitp") if self._updates >= MIN_UPDATES else ("line",)

    def _path_positions(self, history: History, usable: Sequence[int]) -> list[int]:
        # The newest checkpoint may not have been learned from yet: the path up to the one before it need not be read.
        # A rank that lags reads what it lacks: products of other checkpoints must not be added up.
        before = usable[:-1] if history.entries[usable[-1]].iteration not in self._seen else usable
        learned = len(before) >= MIN_CHECKPOINTS and history.entries[before[-1]].iteration in self._seen
        return path_positions(history, before if learned else usable)

    def _path(self, history: History, positions: Sequence[int]) -> dict[str, torch.Tensor]:
        iterations = [history.entries[position].iteration for position in positions]
        mine = filter(self._is_mine, history.operators)
        paths = {
            operator: self._gram(history, operator, positions, iterations) * self._ranks.portion(operator)
            for operator in mine
        }
        summed = self._ranks.reduce(paths)
        return {operator: summed[operator] for operator in sorted(summed)}  # every rank adds up in the same order

    def _products(self, history: History, operator: str, asked: OperatorFit) -> torch.Tensor:
        """Gram matrix over the window."""
        positions = [asked.series.indices[place] for place in asked.window]
        return self._gram(history, operator, positions, [point.iteration for point in asked.points])

    def _gram(
        self, history: History, operator: str, positions: Sequence[int], iterations: Sequence[int]
    ) -> torch.Tensor:
        """Gram matrix between the snapshots of `iterations`: from the statistics, else read at `positions`."""
        known = self._statistics.operators.get(operator)
        products = None
        if known is not None and known.numel == history.numel(operator):
            products = known.between(iterations)
        return gram(history, operator, positions, self._slice_elements) if products is None else products

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
        direction = "vitp" if rows else "line"
        settings = {
            **forecast.settings,
            "direction": direction,
            "updates": self._updates,
            "line_operators": len(line),
            "line_names": line[:MAX_NAMES],
        }
        reason = forecast.reason
        if rows:
            reason += f"; {len(rows)} operators in a learned direction"
        elif forecast.feasible and "vitp" not in self._directions() and self._forced is None:
            reason += f"; in the line's direction, the network has had {self._updates} of {MIN_UPDATES} updates"
        return replace(forecast, method=direction, coefficients=coefficients, settings=settings, reason=reason)


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
