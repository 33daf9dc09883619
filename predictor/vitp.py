"""VITP: the line's displacement, with a direction for each operator learned from its own motion."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cpsr.predictor.calibration import MIN_CHECKPOINTS, Direction
from cpsr.predictor.line import CHUNK_ELEMENTS, MAX_NAMES, Fit, LinePredictor, line_coefficients, spread
from cpsr.predictor.network import MIN_SNAPSHOTS, Geometry, corrections, squared_norms, undisturbed
from cpsr.predictor.pieces import gram
from cpsr.predictor.protocol import Forecast, History, HistoryEntry, Target
from cpsr.predictor.ranks import Ranks
from cpsr.predictor.series import Series, distinct_times, path_places, path_positions, straightness, window_start
from cpsr.predictor.statistics import MAX_SNAPSHOTS, MotionStatistics, OperatorMotion, merged
from cpsr.predictor.training import STEPS_PER_CHECKPOINT, Examples, Head, windows

__all__ = ["MIN_UPDATES", "Progress", "VITPPredictor", "host_memory_bytes", "without_slices"]

STATE_VERSION = 1
# A network trained on fewer than four checkpoints is of little use.
MIN_UPDATES = 4 * STEPS_PER_CHECKPOINT
# One number for every checkpoint of the run's recent past.
MAX_ACCURACIES = 256
# Operators that pass the network together: bounds its memory at 2 MiB.
OPERATORS_AT_ONCE = 64
# Where a correction cancels more of the line's displacement than this leaves, stretching the rest to the old length
# would multiply its noise tenfold.
SHORTEST = 0.1

# Upper bounds of measurements on Linux with glibc and torch 2.13; tests verify them.
# Kept by libraries after first use: threads' heaps, workspaces of matrix products, autograd's own. A few MB for
# small tensors; with the tensors of a model of 350 million weights all of it took 79.5 MB.
LIBRARY_BYTES = 40_000_000
# The head, its copy, the examples, the largest batch of operators forward and backward, and 16 bytes for each weight
# of a slice of learning.
LEARNING_BYTES = 33_000_000
# Of predicting: six float32 pieces of CHUNK_ELEMENTS, in those who predict and in those who consume it.
CHUNK_BYTES = 6 * 4 * CHUNK_ELEMENTS
# Products of the differences, those in the making, a state that is being saved, and rows while a failure is answered;
# and the same where nothing is learned.
OPERATOR_BYTES, LINE_OPERATOR_BYTES = 24_000, 6_000
# An operator's place in the header of an open checkpoint, and its coefficient.
OPERATOR_CHECKPOINT_BYTES = 500


def host_memory_bytes(operators: int, checkpoints: int, *, learns: bool) -> int:
    """Host memory that the predictor takes at most; mapped files are page cache and not counted.

    On the device it takes nothing: checkpoints come from files, and training keeps the device to itself.

    Args:
        operators: that this rank holds a slice of.
        checkpoints: in the history.
        learns: False where it follows the line and learns nothing.
    """
    own = OPERATOR_BYTES if learns else LINE_OPERATOR_BYTES
    fixed = LIBRARY_BYTES + (LEARNING_BYTES if learns else CHUNK_BYTES)  # it learns or predicts, never both
    return fixed + operators * (own + OPERATOR_CHECKPOINT_BYTES * checkpoints)


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


@dataclass(frozen=True)
class _Asked:
    """The line of one operator, whose direction the network is asked for.

    Attributes:
        series: its snapshots.
        fit: its row over them.
        window: places of the snapshots that the line is fitted over.
        held_in: iterations of the history's entries that the snapshots are read from.
        factor: how far this operator follows the line, over the model's reach.
    """

    series: Series
    fit: Fit
    window: tuple[int, ...]
    held_in: frozenset[int]
    factor: float

    @property
    def points(self) -> tuple[HistoryEntry, ...]:
        """When the snapshots of the window were taken."""
        return tuple(self.series.points[place] for place in self.window)

    @property
    def gain(self) -> float:
        """How far the whole model follows the line, in horizons."""
        return float(self.fit.settings["gain"])


class VITPPredictor(LinePredictor):
    """The line with a learned direction for each operator (a `StatePredictor`).

    What the line adds to the checkpoint, gain times slope times time, keeps its length and is turned: by a row over the
    operator's snapshots that a small network chooses from the Gram matrix of their differences. The network was
    pretrained on other runs to point to where the weights moved later. It is trained further on the run's own past, as
    checkpoints arrive (`learn`); scale and window are not learned here. Fewer than four snapshots, an operator that
    never moved, and products that are not finite leave the line's row.

    Where ranks hold the same operators, each learns from its share of them (`Ranks.is_mine`), and rank 0 trains the
    network on its own share. A forecast sums the products of all ranks. A rank that lags reads what it lacks anew.

    Source: CPSR, section III-A (VITP), with coefficients per operator in place of predicted values.

    Args:
        window_iterations: as in `LinePredictor`.
        gain: as in `LinePredictor`.
        chunk_elements: as in `LinePredictor`.
        direction: whose direction is taken. None: that of the lower expected end cost, the line's until the network has
            had 32 updates in this run.
        ranks: all that predict together; None: this one alone. `broadcast` is called once a forecast, `reduce` once
            more than damage is searched for, alike on all. Where slices of one operator were taken at different
            iterations, each has a name of its own in `reduce`.

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
        ranks: Ranks | None = None,
    ) -> None:
        ranks = ranks or Ranks()
        super().__init__(window_iterations, gain, chunk_elements, ranks.agree)
        if direction not in (None, "line", "vitp"):
            raise ValueError(f"direction = {direction!r}: expected 'line', 'vitp' or None")
        self._forced = direction
        self._ranks = ranks
        self._learns = True
        self._statistics = MotionStatistics()
        self._examples = Examples()
        self._head = Head()
        self._accuracy: list[dict[str, Any]] = []
        self._checkpoints = 0
        self._trained_iteration = -1  # newest checkpoint used in training
        # Of the head that the running forecast asks, and the checkpoints that it counts as learned: rank 0's.
        self._updates = 0
        self._seen: frozenset[int] = frozenset()
        self._asked: dict[str, _Asked] = {}
        self._kept: dict[str, Any] | None = None  # what was learned before, where this life learns nothing

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
            ValueError: the history returned a piece of another length or type.
        """
        statistics = copy.copy(self._statistics)  # an update replaces what it holds, it changes nothing in place
        yield from statistics.update(history, list(filter(self._ranks.is_mine, history.operators)))
        newest, before = max(statistics.seen, default=-1), set(self._statistics.seen)
        self._statistics = statistics
        if newest in before or newest < 0 or not self._ranks.trains:
            return
        self._checkpoints += len(set(statistics.seen) - before)
        yield
        if newest > self._trained_iteration:
            yield from self._train(newest, statistics.operators)

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
            if self._ranks.is_mine(operator)
        }
        names = _names_between_ranks(history, forecast, asked)
        summed = self._ranks.reduce({names[operator]: matrix for operator, matrix in products.items()})
        products = {operator: summed[names[operator]] for operator in asked if names[operator] in summed}
        known = {operator: one for operator, one in asked.items() if operator in products}
        rows = _turned_rows(known, products, shared["parameters"], target)
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
        statistics, examples, head = MotionStatistics(), Examples(), Head()
        if learned:
            statistics.load_state_dict(learned["statistics"])
            examples.load_state_dict(learned["examples"])
            if learned["head"] is not None:
                head.load_state_dict(learned["head"])
        super().load_state_dict(state)
        self._statistics, self._examples, self._head = statistics, examples, head
        self._accuracy, self._checkpoints = copy.deepcopy(learned["accuracy"]), learned["checkpoints"]
        self._trained_iteration = learned["trained_iteration"]

    def _learned(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "statistics": self._statistics.state_dict(),
            "examples": self._examples.state_dict(),
            "head": self._head.state_dict() if self._head.steps else None,  # else no 0.2 MB for what is shipped
            "checkpoints": self._checkpoints,
            "accuracy": copy.deepcopy(self._accuracy),
            "trained_iteration": self._trained_iteration,
        }

    def _train(self, iteration: int, operators: Mapping[str, OperatorMotion]) -> Iterator[None]:
        """Some training on the motion up to that checkpoint; every update counts at once."""
        accuracy = list(self._accuracy)
        # An operator that was not saved anew has taught all it can, and was scored, when it was.
        fresh = {
            name: one
            for name, one in operators.items()
            if one.points and one.points[-1].iteration == iteration  # all of its snapshots may be left out
        }
        taken = yield from windows(fresh)
        yield
        if taken:
            found = yield from self._head.accuracy(taken)
            moved = {"mean_square_motion": _newest_mean_square(fresh.values())}
            accuracy.append({"iteration": iteration, "checkpoints": self._checkpoints, **found, **moved})
        examples = self._examples.copy()
        for window in taken:
            examples.add(window)
        self._examples, self._accuracy = examples, accuracy[-MAX_ACCURACIES:]
        self._trained_iteration = iteration
        generator = torch.Generator(device="cpu").manual_seed(iteration)
        for _ in range(STEPS_PER_CHECKPOINT if len(examples) else 0):
            head = self._head.copy()  # a forecast may come between any two pieces
            with undisturbed():
                question = examples.draw(generator)
            yield from head.step(question)
            self._head = head
            yield

    def _damaged(
        self, history: History, reads: Mapping[str, Sequence[int]], checked: set[tuple[str, int]]
    ) -> list[int]:
        # The other ranks check their own, and `agree` informs all.
        own = {operator: positions for operator, positions in reads.items() if self._ranks.is_mine(operator)}
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
        self._asked[operator] = _Asked(series, fit, window, held_in, self._factor(operator, series))
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
        paths = {
            operator: self._gram(history, operator, positions, iterations) * self._ranks.portion(operator)
            for operator in filter(self._ranks.is_mine, history.operators)
        }
        summed = self._ranks.reduce(paths)
        return {operator: summed[operator] for operator in sorted(summed)}  # every rank adds up in the same order

    def _products(self, history: History, operator: str, asked: _Asked) -> torch.Tensor:
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
        return gram(history, operator, positions) if products is None else products

    def _settled(self, forecast: Forecast) -> dict[str, _Asked]:
        """Those asked for when no more checkpoints were left out."""
        left_out = set(forecast.settings["left_out_not_finite"])
        if not forecast.feasible:
            return {}
        return {operator: asked for operator, asked in self._asked.items() if left_out.isdisjoint(asked.held_in)}

    def _with_rows(
        self,
        history: History,
        forecast: Forecast,
        asked: Mapping[str, _Asked],
        rows: Mapping[str, tuple[float, ...]],
    ) -> Forecast:
        coefficients = dict(forecast.coefficients)
        for operator, row in rows.items():
            coefficients[operator] = spread(row, asked[operator].series.indices, len(history.entries))
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


def without_slices(state: dict[str, Any]) -> dict[str, Any]:
    """A predictor's `state_dict()` for a rank that owns other slices: without the products of the old ones.

    Outcomes of recoveries, the network and its examples stay: these are of whole operators, or have no scale. The
    checkpoints whose products go are taken in again, and counted again.
    """
    learned = state.get("vitp")
    if not learned:
        return state
    seen = learned["statistics"]["seen"]
    kept = {"statistics": MotionStatistics().state_dict(), "checkpoints": learned["checkpoints"] - len(seen)}
    return {**state, "vitp": {**learned, **kept}}


def _names_between_ranks(history: History, forecast: Forecast, asked: Mapping[str, _Asked]) -> dict[str, str]:
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


def _turned_rows(
    asked: Mapping[str, _Asked], products: Mapping[str, torch.Tensor], parameters: torch.Tensor, target: Target
) -> dict[str, tuple[float, ...]]:
    """Rows over their own snapshots of those operators that the network can turn."""
    groups: dict[tuple[tuple[HistoryEntry, ...], float], list[str]] = {}
    for operator, one in asked.items():
        groups.setdefault((one.points, one.gain), []).append(operator)
    rows: dict[str, tuple[float, ...]] = {}
    for (points, gain), operators in groups.items():
        places = distinct_times(points, range(len(points)))[-MAX_SNAPSHOTS:]
        if len(places) < MIN_SNAPSHOTS:
            continue
        for start in range(0, len(operators), OPERATORS_AT_ONCE):
            some = operators[start : start + OPERATORS_AT_ONCE]
            stacked = torch.stack([products[operator] for operator in some])
            turned = _corrections(points, places, stacked, parameters, target, gain)
            for operator, correction, matrix in zip(some, turned, stacked, strict=True):
                row = _turned(asked[operator], correction, matrix, target)
                if row is not None:
                    rows[operator] = row
    return rows


def _corrections(
    points: Sequence[HistoryEntry],
    places: Sequence[int],
    products: torch.Tensor,
    parameters: torch.Tensor,
    target: Target,
    gain: float,
) -> torch.Tensor:
    """The network's corrections over `points`, against a line of norm 1, float64; 0 beside `places`."""
    seen = [points[place] for place in places]
    middle = seen[-1].time + 0.5 * gain * (target.time - seen[-1].time)  # a displacement is the motion half way
    small = merged(products, places)
    scale = small.diagonal(dim1=1, dim2=2).sum(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    with undisturbed(), torch.no_grad():
        found = corrections(parameters, Geometry.of(seen, middle), (small / scale[:, None, None]).float()).double()
    full = torch.zeros(len(products), len(points), dtype=torch.float64, device="cpu")
    full[:, list(places)] = found - found.mean(dim=1, keepdim=True)  # what float32 has left of the sum
    return full


def _turned(
    asked: _Asked, correction: torch.Tensor, products: torch.Tensor, target: Target
) -> tuple[float, ...] | None:
    """The line's row with its displacement turned and as long as before; None where there is nothing to turn."""
    times = [point.time for point in asked.points]
    line = torch.tensor(line_coefficients(times, target.time, asked.gain, base=0.0), dtype=torch.float64, device="cpu")
    line[-1] -= 1.0
    displacement = line + line.norm() * correction
    pair = squared_norms(torch.stack([line, displacement]), products.expand(2, -1, -1)).clamp_min(0.0).sqrt()
    before, after = pair.tolist()
    if not (0.0 < before < float("inf") and SHORTEST * before < after < float("inf")):
        return None
    row = torch.tensor(asked.fit.row, dtype=torch.float64, device="cpu")
    row[list(asked.window)] += asked.factor * (displacement * (before / after) - line)
    return tuple(row.tolist())
