"""VITP: the line's displacement, with a direction for each operator learned from its own motion."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from cpsr.predictor.backtest import backtests
from cpsr.predictor.calibration import MIN_CHECKPOINTS, Direction, table
from cpsr.predictor.checkpoint_series import distinct_times
from cpsr.predictor.line import LinePredictor, Plan
from cpsr.predictor.network import (
    MIN_SNAPSHOTS,
    Geometry,
    corrections,
    inner,
    pretrained_parameters,
    undisturbed,
)
from cpsr.predictor.protocol import Forecast, History, Ranks, Target
from cpsr.predictor.statistics import MAX_SNAPSHOTS, MotionStatistics, merged
from cpsr.predictor.training import STEPS_PER_CHECKPOINT, Head, windows
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
# The network's weights and their update, the largest batch of operators forward and backward, and 16 bytes for each
# weight of a slice of learning.
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
    """The line with a learned direction for each operator.

    What the line adds to the checkpoint, slope times reach, keeps its length and is turned: by a row over the
    operator's snapshots that a small network chooses from the Gram matrix of their differences. The network was
    pretrained on other runs to point to where the weights moved later. The prior table says whether it is asked. If it
    may be, it is trained further on the run's own past, as checkpoints arrive (`learn`). Fewer than four snapshots, an
    operator that never moved, and products that are not finite leave the line's row.

    Where ranks hold the same operators, each learns from its share of them (`Ranks.is_mine`), and rank 0 trains the
    network on its own share. A forecast sums the products of all ranks. A rank that lags reads what it lacks anew.

    Source: CPSR, section III-A (VITP), with coefficients per operator in place of predicted values.

    Args:
        window_iterations: as in `LinePredictor`.
        gain: as in `LinePredictor`.
        direction: of the displacement; None: by expected cost.

    Attributes:
        learns: False after `follow_line`.
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
        self._directions: Sequence[Direction] = ("line", "vitp") if direction is None else (direction,)
        self.learns = True
        self._statistics = MotionStatistics()
        self._head = Head.of(pretrained_parameters())
        self._accuracy: list[dict[str, Any]] = []
        self._checkpoints = 0
        self._seen: frozenset[int] = frozenset()  # checkpoints that the running forecast counts as learned: rank 0's

    def follow_line(self) -> None:
        """Learn nothing, take over nothing that was learned, and use the line's direction; before its first use."""
        self.learns = False
        self._directions = ("line",)

    def learn(self, history: History) -> Iterator[None]:
        """Learn from the newest checkpoint: its products with those before it, a backtest, and some training.

        Every `next` reads at most half a million weights or makes an update of the network: a few milliseconds. What
        was taken in counts as soon as its products are complete, and each update once it is: abandoned later, a
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
        alone = copy.copy(self)
        alone.ranks, alone._gain = Ranks(), 1.0
        found = list[dict[str, Any]]()
        for one in backtests(alone, statistics.operators):
            found.append({"iteration": newest, "checkpoints": self._checkpoints, **one})
            yield
        self._accuracy = [*self._accuracy, *found][-MAX_ACCURACIES:]
        # The network is trained where a forecast may ask it.
        may_turn = self._directions == ("vitp",) or ("vitp" in self._directions and table().takes("vitp"))
        taken = (yield from windows(statistics.operators)) if may_turn else None
        if taken is None:
            return
        generator = torch.Generator(device="cpu").manual_seed(newest)
        for _ in range(STEPS_PER_CHECKPOINT):
            yield
            self._head = self._head.trained(taken, generator)

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

        The forecast's `method` is `vitp` where the network turned any operator's direction. Settings say the
        `direction` taken, and `line_operators` how many operators keep the line's row.

        Raises:
            ValueError: the target lies before the newest entry, or the history is not ascending or not finite in time.
        """
        self._seen = frozenset(self.ranks.broadcast(list(self._statistics.seen)))
        plan = self._agreed_plan(history, target)
        forecast = self._report(history, target, plan)
        if plan.settings.get("direction") != "vitp" or not plan.moves:  # on all ranks or none
            return replace(forecast, method="line" if plan.moves else forecast.method)
        parameters = self.ranks.broadcast(self._head.parameters)
        products = self._path(history, plan.whole, plan.window)
        own = {operator: products[operator] for operator in plan.whole if operator in products}
        rows = _turned_rows(plan, history, own, parameters)
        turned = {name: plan.coefficients(row, history, plan.factors.get(name, 1.0)) for name, row in rows.items()}
        method = "vitp" if rows else "line"
        return replace(
            forecast,
            method=method,
            coefficients={**forecast.coefficients, **turned},
            settings={**forecast.settings, "direction": method, "line_operators": len(plan.whole) - len(rows)},
            reason=f"{forecast.reason}; {len(rows)} operators in a learned direction",
        )

    def state_dict(self) -> dict[str, Any]:
        """All that was learned, as plain data and tensors: below 1 MB at 300 operators."""
        learned = {
            "statistics": self._statistics.state_dict(),
            "head": vars(self._head).copy() if self._head.steps else None,  # else no 0.2 MB for what is shipped
            "checkpoints": self._checkpoints,
            "accuracy": copy.deepcopy(self._accuracy),
        }
        return {**super().state_dict(), "vitp": learned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict()` returned.

        Raises:
            ValueError: the state was written by another predictor or another version; nothing has changed.
        """
        super().load_state_dict(state)
        if not self.learns:
            return
        learned, statistics = state["vitp"], MotionStatistics()
        statistics.load_state_dict(learned["statistics"])
        self._statistics = statistics
        self._head = Head.of(pretrained_parameters()) if learned["head"] is None else Head(**learned["head"])
        self._accuracy, self._checkpoints = copy.deepcopy(learned["accuracy"]), learned["checkpoints"]

    def _must_read(self, history: History, operator: str, position: int) -> bool:
        # What was read whole and was finite is not read again.
        iteration = history.entries[position].iteration
        found_finite = self._statistics.found_finite(operator, history.numel(operator), iteration)
        return super()._must_read(history, operator, position) and not found_finite

    def _path_positions(self, history: History, usable: Sequence[int]) -> list[int]:
        # The newest checkpoint may not have been learned from yet: the path up to the one before it need not be read.
        # A rank that lags reads what it lacks: products of other checkpoints must not be added up.
        before = usable[:-1] if history.entries[usable[-1]].iteration not in self._seen else usable
        learned = len(before) >= MIN_CHECKPOINTS and history.entries[before[-1]].iteration in self._seen
        return super()._path_positions(history, before if learned else usable)

    def _products(self, history: History, operator: str, positions: Sequence[int]) -> torch.Tensor:
        known = self._statistics.operators.get(operator)
        if known is not None and known.numel == history.numel(operator):
            products = known.between([history.entries[position].iteration for position in positions])
            if products is not None:
                return products
        return gram(history, operator, positions)


def without_slices(state: dict[str, Any]) -> dict[str, Any]:
    """A predictor's `state_dict()` for a rank that owns other slices: without the products of the old ones.

    The network stays. The checkpoints whose products go are taken in again, and counted again.
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
    if len(places) < MIN_SNAPSHOTS:
        return rows
    # A displacement is the motion half way.
    geometry = Geometry.of([points[place] for place in places], points[-1].time + 0.5 * plan.settings["reach_time"])
    line, names = torch.tensor(plan.row, dtype=torch.float64, device="cpu"), list(products)
    line[-1] -= 1.0
    for start in range(0, len(names), OPERATORS_AT_ONCE):
        some = names[start : start + OPERATORS_AT_ONCE]
        stacked = torch.stack([products[operator] for operator in some])
        seen = merged(stacked, places)
        scale = seen.diagonal(dim1=1, dim2=2).sum(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
        with undisturbed(), torch.no_grad():
            found = corrections(parameters, geometry, (seen / scale[:, None, None]).float()).double()
        straight = line.expand(len(some), -1)
        turned = straight.clone()
        turned[:, places] += line.norm() * (found - found.mean(dim=1, keepdim=True))  # what float32 has left of the sum
        lengths = [inner(one, stacked, one).clamp_min(0.0).sqrt().tolist() for one in (straight, turned)]
        for operator, row, before, after in zip(some, turned, *lengths, strict=True):
            if 0.0 < before < float("inf") and SHORTEST * before < after < float("inf"):
                rows[operator] = (row * (before / after)).tolist()
    return rows
