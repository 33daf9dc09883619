"""Statistics of the weights' motion, updated as checkpoints arrive: products of differences between snapshots."""

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch

from cpsr.predictor.pieces import all_finite, difference_rows, read_piece
from cpsr.predictor.protocol import History, HistoryEntry
from cpsr.predictor.series import Series, operator_series

__all__ = ["MAX_SNAPSHOTS", "SLICE_ELEMENTS", "MotionStatistics", "OperatorMotion", "merged"]

STATE_VERSION = 1
# 380 iterations at an interval of 20, of a history of some 400; a forecast over more reads the weights again. At 300
# operators these are 0.46 MB in every checkpoint.
MAX_SNAPSHOTS = 20
# 2 MiB are read, turned into 4 MiB of float64 differences and multiplied within about 2 milliseconds on one core.
SLICE_ELEMENTS = 1 << 19
# Between two yields where nothing is read of them: half a millisecond.
OPERATORS_AT_ONCE = 256
# An operator's calls take as long as so many of its weights: eight small ones make a slice. A slice that begins after a
# pause finds the caches cold, and small operators would be slices of a fraction of a millisecond.
CALLS_ELEMENTS = SLICE_ELEMENTS // 8


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
    """Gram matrices of the differences between all operators' snapshots, kept up to date with a history.

    A snapshot is known as long as the history holds it: products with a later one need its weights. A checkpoint with
    NaN or infinity in any operator is left out for all. An operator whose number of elements changed starts anew.
    Where ranks hold slices of the same operator, their matrices add up to that of the whole.

    One slice of `update` reads at most `SLICE_ELEMENTS` weights; four times as many bytes of float32 and eight times
    of float64 differences are alive at a time.
    """

    def __init__(self) -> None:
        self._operators: dict[str, OperatorMotion] = {}
        self._seen: tuple[int, ...] = ()
        self._left_out: tuple[int, ...] = ()

    @property
    def operators(self) -> Mapping[str, OperatorMotion]:
        """Operator -> its motion; those of the newest history that was taken in."""
        return self._operators

    @property
    def seen(self) -> tuple[int, ...]:
        """Iterations of the history's checkpoints that were taken in."""
        return self._seen

    @property
    def left_out(self) -> tuple[int, ...]:
        """Iterations of the history's checkpoints that are not finite."""
        return self._left_out

    def found_finite(self, operator: str, numel: int, iteration: int) -> bool:
        """Whether the checkpoint of that iteration was read whole, and held no NaN or infinity, with this operator."""
        known = self._operators.get(operator)
        return known is not None and known.numel == numel and iteration in self._seen

    def update(self, history: History, own: Sequence[str] | None = None) -> Iterator[None]:
        """Take in the checkpoints of `history` that are not known yet, in slices.

        Every `next` reads at most `SLICE_ELEMENTS` weights. Results show when the iterator is exhausted; one that is
        abandoned before changes nothing.

        Args:
            history: as it is now.
            own: those of its operators that count; None: all.

        Raises:
            ValueError: the history returned a piece of another length or type.
        """
        names = list(history.operators if own is None else own)
        present = set(names)
        resized = any(name in present and history.numel(name) != known.numel for name, known in self._operators.items())
        checked = set(self._left_out) if resized else {*self._seen, *self._left_out}
        left_out = [entry.iteration for entry in history.entries if entry.iteration in self._left_out]
        for position, entry in enumerate(history.entries):
            if entry.iteration not in checked and not (yield from self._finite(history, names, position)):
                left_out.append(entry.iteration)
        usable = [place for place, entry in enumerate(history.entries) if entry.iteration not in left_out]
        operators: dict[str, OperatorMotion] = {}
        pending = 0
        for operator in names if usable else ():
            series = _newest(operator_series(history, operator, usable), MAX_SNAPSHOTS)
            # Also where nothing is read: there may be thousands of sparse operators.
            work = CALLS_ELEMENTS + len(series.points) * history.numel(operator)
            if pending + work > SLICE_ELEMENTS and pending:
                yield
                pending = 0
            operators[operator] = yield from self._extended(history, operator, series)
            pending += work
        if pending:
            yield
        self._operators = operators
        self._seen = tuple(history.entries[place].iteration for place in usable)
        self._left_out = tuple(sorted(left_out))

    def state_dict(self) -> dict[str, Any]:
        """The statistics, as plain data and one tensor; operators with the same snapshots share their times."""
        nothing = torch.empty(0, dtype=torch.float64, device="cpu")  # torch.cat refuses an empty list
        shared: dict[tuple[HistoryEntry, ...], int] = {}
        for motion in self._operators.values():
            shared.setdefault(motion.points, len(shared))
        return {
            "version": STATE_VERSION,
            "seen": list(self._seen),
            "left_out": list(self._left_out),
            "points": [[[p.iteration, p.time, p.learning_rate] for p in points] for points in shared],
            "operators": {name: [motion.numel, shared[motion.points]] for name, motion in self._operators.items()},
            "products": torch.cat([nothing, *map(_triangle, self._operators.values())]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict()` returned.

        Raises:
            ValueError: the state was written by another version.
        """
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"motion statistics of version {state.get('version')!r}; this is version {STATE_VERSION}")
        points = [tuple(HistoryEntry(*numbers) for numbers in series) for series in state["points"]]
        operators, start = {}, 0
        for name, (numel, place) in state["operators"].items():
            size = len(points[place]) - 1
            stop = start + size * (size + 1) // 2
            operators[name] = OperatorMotion(numel, points[place], _square(state["products"][start:stop], size))
            start = stop
        self._operators = operators
        self._seen, self._left_out = tuple(state["seen"]), tuple(state["left_out"])

    def _finite(self, history: History, names: Sequence[str], position: int) -> Generator[None, None, bool]:
        """Whether the entry is finite in all operators; a snapshot that is known is not read again."""
        pending = 0
        for place, operator in enumerate(names, start=1):
            numel = history.numel(operator)
            if history.taken_at(operator, position) in self._snapshots(operator, numel):
                if place % OPERATORS_AT_ONCE == 0:
                    yield
                continue
            for start in range(0, numel, SLICE_ELEMENTS):
                stop = min(start + SLICE_ELEMENTS, numel)
                if pending + stop - start > SLICE_ELEMENTS and pending:
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

    def _extended(self, history: History, operator: str, series: Series) -> Generator[None, None, OperatorMotion]:
        """The operator's motion over `series`: products among known snapshots are kept, the others computed."""
        count, numel = len(series.points), history.numel(operator)
        products = torch.zeros(count - 1, count - 1, dtype=torch.float64, device="cpu")
        known = self._snapshots(operator, numel)
        before = len(list(itertools.takewhile(lambda point: point.iteration in known, series.points)))
        if before >= 2:
            kept = self._operators[operator].between([point.iteration for point in series.points[:before]])
            assert kept is not None
            products[: before - 1, : before - 1] = kept
        first = max(before - 1, 0)  # of the differences that are new
        if first < count - 1:
            new = torch.zeros(count - 1, count - 1 - first, dtype=torch.float64, device="cpu")
            length = SLICE_ELEMENTS // count
            differences = torch.empty(count - 1, min(length, numel), dtype=torch.float64, device="cpu")
            for start in range(0, numel, length):
                stop = min(start + length, numel)
                block = differences[:, : stop - start]
                difference_rows(history, operator, series.indices, start, stop, block)
                new.addmm_(block, block[first:].T)
                if stop < numel:
                    yield
            products[:, first:] = new
        return OperatorMotion(numel, series.points, products.triu() + products.triu(1).T)

    def _snapshots(self, operator: str, numel: int) -> set[int]:
        """Iterations of the snapshots that are known; none where the operator had another number of elements."""
        motion = self._operators.get(operator)
        if motion is None or motion.numel != numel:
            return set()
        return {point.iteration for point in motion.points}


def _newest(series: Series, count: int) -> Series:
    return replace(series, indices=series.indices[-count:], points=series.points[-count:])


def _triangle(motion: OperatorMotion) -> torch.Tensor:
    size = len(motion.products)
    rows, columns = torch.triu_indices(size, size, device="cpu")
    return motion.products[rows, columns]


def _square(triangle: torch.Tensor, size: int) -> torch.Tensor:
    rows, columns = torch.triu_indices(size, size, device="cpu")
    square = torch.zeros(size, size, dtype=torch.float64, device="cpu")
    square[rows, columns] = triangle
    square[columns, rows] = triangle
    return square
