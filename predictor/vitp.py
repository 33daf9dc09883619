"""VITP: the line's displacement, with a direction for each operator learned from its own motion."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from cpsr.predictor.backtest import backtests
from cpsr.predictor.calibration import MIN_CHECKPOINTS, Direction
from cpsr.predictor.checkpoint_series import distinct_times, path_positions
from cpsr.predictor.collectives import Ranks
from cpsr.predictor.line import MAX_NAMES, LinePredictor, Plan
from cpsr.predictor.network import MIN_SNAPSHOTS, Geometry, corrections, squared_norms, undisturbed
from cpsr.predictor.protocol import Forecast, History, HistoryEntry, Target
from cpsr.predictor.statistics import MAX_SNAPSHOTS, MotionStatistics, OperatorMotion, merged
from cpsr.predictor.training import STEPS_PER_CHECKPOINT, Examples, Head, windows
from cpsr.predictor.weight_pieces import CHUNK_ELEMENTS, gram

__all__ = ["VITPPredictor", "host_memory_bytes", "without_slices"]

# Of the run's recent past; up to two for every checkpoint.
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
        direction: whose direction is taken; None: whichever is expected to cost less.
    """

    name = "vitp"

    def __init__(
        self,
        window_iterations: int | None = None,
        gain: float | None = None,
        *,
        direction: Direction | None = None,
    ) -> None:
        super().__init__(window_iterations, gain)
        self._directions = ("line", "vitp") if direction is None else (direction,)
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

    def follow_line(self) -> None:
        """Learn nothing, take over nothing that was learned, and use the line's direction; before its first use."""
        self._learns = False
        self._directions = ("line",)

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
        yield from statistics.update(history, list(filter(self.ranks.is_mine, history.operators)))
        newest, before = max(statistics.seen, default=-1), set(self._statistics.seen)
        self._statistics = statistics
        if newest in before or newest < 0 or not self.ranks.trains:
            return
        self._checkpoints += len(set(statistics.seen) - before)
        yield
        if newest > self._trained_iteration:
            yield from self._train(newest, statistics.operators)

    def accuracy(self) -> list[dict[str, Any]]:
        """How far off predictions of the recent checkpoints were, oldest first, before the network learned from each.

        Each is `{"iteration", "checkpoints", "horizon_iterations", "mean_square_error"}`: how many checkpoints of the
        run were taken in by then, how far ahead of those that were seen the checkpoint is, and the mean square of the
        error over this rank's weights (`backtests`). The horizon
        is some 100 iterations, or the interval where that is longer.
        """
        return copy.deepcopy(self._accuracy)

    def forecast(self, history: History, target: Target) -> Forecast:
        """Decide the coefficients; reads those of the checkpoints in use that it has not learned from.

        The forecast's `method` is `vitp` where the network turned any operator's direction, else `line`. Settings say
        the `direction` taken and how many updates its network has had (`updates`). `line_operators` is the number of
        operators that keep the line's row, `line_names` has up to 8 of them.

        Raises:
            ValueError: the target lies before the newest entry, or the history is not ascending or not finite in time.
        """
        shared = self.ranks.broadcast({"updates": self._head.steps, "seen": list(self._statistics.seen)})
        self._updates, self._seen = shared["updates"], frozenset(shared["seen"])
        plan = self._agreed_plan(history, target)
        asked: Sequence[str] = ()
        rows: Mapping[str, Sequence[float]] = {}
        if plan.settings.get("direction") == "vitp":  # on all ranks or none
            asked = plan.whole
            parameters = self.ranks.broadcast({"parameters": self._head.parameters.detach()})["parameters"]
            products = self.ranks.reduce(self._grams(history, asked, plan.window))
            own = {operator: products[operator] for operator in asked if operator in products}
            rows = _turned_rows(plan, history, own, parameters)
        return self._with_rows(history, self._report(history, target, plan), plan, asked, rows)

    def state_dict(self) -> dict[str, Any]:
        """All that was learned, as plain data and tensors: below 1 MB at 300 operators."""
        learned = {
            "statistics": self._statistics.state_dict(),
            "examples": self._examples.state_dict(),
            "head": self._head.state_dict() if self._head.steps else None,  # else no 0.2 MB for what is shipped
            "checkpoints": self._checkpoints,
            "accuracy": copy.deepcopy(self._accuracy),
            "trained_iteration": self._trained_iteration,
        }
        return {**super().state_dict(), "vitp": learned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict()` returned.

        Raises:
            ValueError: the state was written by another predictor or another version; nothing has changed.
        """
        super().load_state_dict(state)
        if not self._learns:
            return
        learned, statistics, examples, head = state["vitp"], MotionStatistics(), Examples(), Head()
        statistics.load_state_dict(learned["statistics"])
        examples.load_state_dict(learned["examples"])
        if learned["head"] is not None:
            head.load_state_dict(learned["head"])
        self._statistics, self._examples, self._head = statistics, examples, head
        self._accuracy, self._checkpoints = copy.deepcopy(learned["accuracy"]), learned["checkpoints"]
        self._trained_iteration = learned["trained_iteration"]

    def _train(self, iteration: int, operators: Mapping[str, OperatorMotion]) -> Iterator[None]:
        """A backtest, and some training on the motion up to that checkpoint; every update counts at once."""
        alone = copy.copy(self)
        alone.ranks, alone._gain = Ranks(), 1.0
        found = list[dict[str, Any]]()
        for one in backtests(alone, operators):
            found.append({"iteration": iteration, "checkpoints": self._checkpoints, **one})
            yield
        self._accuracy = [*self._accuracy, *found][-MAX_ACCURACIES:]
        taken = yield from windows(operators)
        yield
        examples = self._examples.copy()
        if taken is not None:
            examples.add(taken)
        self._examples, self._trained_iteration = examples, iteration
        generator = torch.Generator(device="cpu").manual_seed(iteration)
        for _ in range(STEPS_PER_CHECKPOINT if len(examples) else 0):
            head = self._head.copy()  # a forecast may come between any two pieces
            with undisturbed():
                question = examples.draw(generator)
            yield from head.step(question)
            self._head = head
            yield

    def _must_read(self, history: History, operator: str, position: int) -> bool:
        # Other ranks check their own, and `agree` informs all. What was read whole and was finite is not read again.
        iteration = history.entries[position].iteration
        return self.ranks.is_mine(operator) and not self._statistics.found_finite(
            operator, history.numel(operator), iteration
        )

    def _path_positions(self, history: History, usable: Sequence[int]) -> list[int]:
        # The newest checkpoint may not have been learned from yet: the path up to the one before it need not be read.
        # A rank that lags reads what it lacks: products of other checkpoints must not be added up.
        before = usable[:-1] if history.entries[usable[-1]].iteration not in self._seen else usable
        learned = len(before) >= MIN_CHECKPOINTS and history.entries[before[-1]].iteration in self._seen
        return path_positions(history, before if learned else usable)

    def _path(self, history: History, operators: Sequence[str], positions: Sequence[int]) -> dict[str, torch.Tensor]:
        summed = self.ranks.reduce(self._grams(history, operators, positions))
        return {operator: summed[operator] for operator in sorted(summed)}  # every rank adds up in the same order

    def _grams(self, history: History, operators: Sequence[str], positions: Sequence[int]) -> dict[str, torch.Tensor]:
        """Gram matrices between these entries, of this rank's share of operators: from the statistics, else read."""
        iterations = [history.entries[position].iteration for position in positions]
        found = {}
        for operator in filter(self.ranks.is_mine, operators):
            known = self._statistics.operators.get(operator)
            fits = known is not None and known.numel == history.numel(operator)
            products = known.between(iterations) if known is not None and fits else None
            if products is None:
                products = gram(history, operator, positions)
            found[operator] = products * self.ranks.portion(operator)
        return found

    def _with_rows(
        self,
        history: History,
        forecast: Forecast,
        plan: Plan,
        asked: Sequence[str],
        rows: Mapping[str, Sequence[float]],
    ) -> Forecast:
        turned = {name: plan.coefficients(row, history, plan.factors.get(name, 1.0)) for name, row in rows.items()}
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
        coefficients = {**forecast.coefficients, **turned}
        method = direction if plan.moves else forecast.method
        return replace(forecast, method=method, coefficients=coefficients, settings=settings, reason=reason)


def without_slices(state: dict[str, Any]) -> dict[str, Any]:
    """A predictor's `state_dict()` for a rank that owns other slices: without the products of the old ones.

    The network and its examples stay: these are of whole operators, or have no scale. The
    checkpoints whose products go are taken in again, and counted again.
    """
    learned = state.get("vitp")
    if not learned:
        return state
    seen = learned["statistics"]["seen"]
    kept = {"statistics": MotionStatistics().state_dict(), "checkpoints": learned["checkpoints"] - len(seen)}
    return {**state, "vitp": {**learned, **kept}}


def _turned_rows(
    plan: Plan, history: History, products: Mapping[str, torch.Tensor], parameters: torch.Tensor
) -> dict[str, list[float]]:
    """Displacements over the plan's window, as long as the line's, of those operators that the network can turn."""
    points, rows = plan.points(history), dict[str, list[float]]()
    places = distinct_times(points)[-MAX_SNAPSHOTS:]
    names = list(products) if len(places) >= MIN_SNAPSHOTS else []
    line = torch.tensor(plan.row, dtype=torch.float64, device="cpu")
    for start in range(0, len(names), OPERATORS_AT_ONCE):
        some = names[start : start + OPERATORS_AT_ONCE]
        stacked = torch.stack([products[operator] for operator in some])
        straight = torch.cat([line[:-1], line[-1:] - 1.0]).expand(len(some), -1)
        middle = points[-1].time + 0.5 * plan.settings["reach_time"]
        turned = straight + straight[0].norm() * _corrections(points, places, stacked, parameters, middle)
        lengths = [squared_norms(one, stacked).clamp_min(0.0).sqrt().tolist() for one in (straight, turned)]
        for operator, row, before, after in zip(some, turned, *lengths, strict=True):
            if 0.0 < before < float("inf") and SHORTEST * before < after < float("inf"):
                rows[operator] = (row * (before / after)).tolist()
    return rows


def _corrections(
    points: Sequence[HistoryEntry],
    places: Sequence[int],
    products: torch.Tensor,
    parameters: torch.Tensor,
    middle: float,
) -> torch.Tensor:
    """The network's corrections over `points`, against a line of norm 1, float64; 0 beside `places`.

    They are of the direction at `middle`: a displacement is the motion half way.
    """
    small = merged(products, places)
    scale = small.diagonal(dim1=1, dim2=2).sum(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    geometry = Geometry.of([points[place] for place in places], middle)
    with undisturbed(), torch.no_grad():
        found = corrections(parameters, geometry, (small / scale[:, None, None]).float()).double()
    full = torch.zeros(len(products), len(points), dtype=torch.float64, device="cpu")
    full[:, list(places)] = found - found.mean(dim=1, keepdim=True)  # what float32 has left of the sum
    return full
