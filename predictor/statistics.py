"""Statistics of the weights' motion, updated as checkpoints arrive: products of differences between snapshots."""

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from cpsr.predictor.protocol import History, HistoryEntry
from cpsr.predictor.weight_pieces import BLOCK_ELEMENTS, add_products, all_finite, read_piece

__all__ = ["MAX_SNAPSHOTS", "MotionStatistics", "OperatorMotion", "merged"]

# 380 iterations at an interval of 20, of a history of some 400; a forecast over more reads the weights again. At 300
# operators these are 0.46 MB in every checkpoint.
MAX_SNAPSHOTS = 20
# An operator's calls take as long as so many of its weights: eight small ones make a slice. A slice that begins after a
# pause finds the caches cold, and small operators would be slices of a fraction of a millisecond.
CALLS_ELEMENTS = BLOCK_ELEMENTS // 8


@dataclass(frozen=True)
class OperatorMotion:
    """One operator's recent snapshots and the Gram matrix of the differences between them.

    Attributes:
        numel: elements of the operator's slice on this rank.
        points: when the n snapshots were taken, strictly ascending in iteration.
        products: `(n - 1, n - 1)` float64, as `gram` returns it.
    """

    numel: int
    points: tuple[HistoryEntry, ...]
    products: torch.Tensor

    def between(self, iterations: Sequence[int]) -> torch.Tensor | None:
        """Gram matrix of the differences between the snapshots taken at `iterations` (ascending, at least 2).

        Returns:
            `(len(iterations) - 1, len(iterations) - 1)` float64; None where one of them is not known.
        """
        place_of = {point.iteration: place for place, point in enumerate(self.points)}
        if not all(iteration in place_of for iteration in iterations):
            return None
        return merged(self.products, [place_of[iteration] for iteration in iterations])


def merged(products: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Gram matrix of the differences between some of the snapshots, from that between all.

    Args:
        products: `(..., K - 1, K - 1)`, as `gram` returns it.
        places: of the n snapshots, ascending, at least 1.

    Returns:
        `(..., n - 1, n - 1)`.
    """
    size = products.shape[-1]
    if list(places) == list(range(size + 1)):
        return products.clone()
    # A difference over several snapshots is the sum of those between them.
    ends, between = numpy.array(places), numpy.arange(size)
    within = (ends[:-1, None] <= between) & (between < ends[1:, None])
    sums = torch.from_numpy(within).to(products.dtype)
    return sums @ products @ sums.T


class MotionStatistics:
    """Gram matrices of the differences between the operators' snapshots, kept up to date with a history.

    An operator counts that every checkpoint of the history has of its own iteration. A snapshot is known as long as the
    history holds it: products with a later one need its weights. A checkpoint with NaN or infinity in any operator is
    left out for all. An operator whose number of elements changed starts anew. Where ranks hold slices of the same
    operator, their matrices add up to that of the whole.

    One slice of `update` reads at most `BLOCK_ELEMENTS` weights; four times as many bytes of float32 and eight times
    of float64 differences are alive at a time.

    Attributes:
        operators: operator -> its motion; those of the newest history that was taken in.
        seen: iterations of the history's checkpoints that were taken in.
        left_out: iterations of the history's checkpoints that are not finite.
    """

    def __init__(self) -> None:
        self.operators: Mapping[str, OperatorMotion] = {}
        self.seen: tuple[int, ...] = ()
        self.left_out: tuple[int, ...] = ()

    def found_finite(self, operator: str, numel: int, iteration: int) -> bool:
        """Whether the checkpoint of that iteration was read whole, and held no NaN or infinity, with this operator."""
        known = self.operators.get(operator)
        return known is not None and known.numel == numel and iteration in self.seen

    def update(self, history: History, own: Sequence[str] | None = None) -> Iterator[None]:
        """Take in the checkpoints of `history` that are not known yet, in slices.

        Every `next` reads at most `BLOCK_ELEMENTS` weights. Results show when the iterator is exhausted; one that is
        abandoned before changes nothing.

        Args:
            history: as it is now.
            own: those of its operators that count; None: all.

        Raises:
            ValueError: the history returned a piece of another length or type.
        """
        names, entries = list(history.operators if own is None else own), history.entries
        present = set(names)
        resized = any(name in present and history.numel(name) != known.numel for name, known in self.operators.items())
        checked = set(self.left_out) if resized else {*self.seen, *self.left_out}
        left_out = [entry.iteration for entry in entries if entry.iteration in self.left_out]
        for position, entry in enumerate(entries):
            if entry.iteration not in checked and not (yield from _finite(history, names, position)):
                left_out.append(entry.iteration)
        usable = [position for position, entry in enumerate(entries) if entry.iteration not in left_out]
        operators: dict[str, OperatorMotion] = {}
        pending = 0
        for operator in names if usable else ():
            whole = all(history.taken_at(operator, position) == entries[position].iteration for position in usable)
            work = CALLS_ELEMENTS + (min(len(usable), MAX_SNAPSHOTS) * history.numel(operator) if whole else 0)
            if pending + work > BLOCK_ELEMENTS and pending:
                yield
                pending = 0
            if whole:
                operators[operator] = yield from self._extended(history, operator, usable[-MAX_SNAPSHOTS:])
            pending += work
        if pending:
            yield
        self.operators = operators
        self.seen = tuple(entries[position].iteration for position in usable)
        self.left_out = tuple(sorted(left_out))

    def state_dict(self) -> dict[str, Any]:
        """The statistics, as plain data and one tensor; all operators have the same snapshots."""
        nothing = torch.empty(0, dtype=torch.float64, device="cpu")  # torch.cat refuses an empty list
        points = next((motion.points for motion in self.operators.values()), ())
        upper = _upper_half(points)
        return {
            "seen": list(self.seen),
            "left_out": list(self.left_out),
            "points": [[point.iteration, point.time, point.learning_rate] for point in points],
            "operators": {name: motion.numel for name, motion in self.operators.items()},
            "products": torch.cat([nothing, *(motion.products[upper] for motion in self.operators.values())]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict()` returned."""
        points, operators = tuple(HistoryEntry(*numbers) for numbers in state["points"]), state["operators"]
        rows, columns = _upper_half(points)
        halves = state["products"].reshape(len(operators), len(rows))
        loaded: dict[str, OperatorMotion] = {}
        for half, (name, numel) in zip(halves, operators.items(), strict=True):
            products = torch.zeros(len(points) - 1, len(points) - 1, dtype=torch.float64, device="cpu")
            products[rows, columns] = products[columns, rows] = half
            loaded[name] = OperatorMotion(numel, points, products)
        self.operators = loaded
        self.seen, self.left_out = tuple(state["seen"]), tuple(state["left_out"])

    def _extended(
        self, history: History, operator: str, positions: Sequence[int]
    ) -> Generator[None, None, OperatorMotion]:
        """The operator's motion over these entries: products among known snapshots are kept, the others computed."""
        points, numel = tuple(history.entries[position] for position in positions), history.numel(operator)
        count, motion = len(points), self.operators.get(operator)
        products = torch.zeros(count - 1, count - 1, dtype=torch.float64, device="cpu")
        known = motion.points if motion is not None and motion.numel == numel else ()
        iterations = {point.iteration for point in known}
        before = len(list(itertools.takewhile(lambda point: point.iteration in iterations, points)))
        if motion is not None and before >= 2:
            kept = motion.between([point.iteration for point in points[:before]])
            assert kept is not None
            products[: before - 1, : before - 1] = kept
        first = max(before - 1, 0)  # of the differences that are new
        if first < count - 1:
            new = torch.zeros(count - 1, count - 1 - first, dtype=torch.float64, device="cpu")
            yield from add_products(history, operator, positions, new)
            products[:, first:] = new
        return OperatorMotion(numel, points, products.triu() + products.triu(1).T)


def _finite(history: History, names: Sequence[str], position: int) -> Generator[None, None, bool]:
    """Whether the entry is finite in all of these operators."""
    pending = 0
    for operator in names:
        numel = history.numel(operator)
        for start in range(0, numel, BLOCK_ELEMENTS):
            stop = min(start + BLOCK_ELEMENTS, numel)
            if pending + stop - start > BLOCK_ELEMENTS and pending:
                yield
                pending = 0
            finite = all_finite(read_piece(history, operator, position, start, stop))
            pending += CALLS_ELEMENTS + stop - start
            if not finite:
                yield
                return False
    if pending:
        yield
    return True


def _upper_half(points: Sequence[HistoryEntry]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of the upper half of a Gram matrix between these snapshots."""
    size = max(len(points) - 1, 0)
    rows, columns = torch.triu_indices(size, size, device="cpu")
    return rows, columns
