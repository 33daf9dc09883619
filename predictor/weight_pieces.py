"""Weights in bounded pieces: coefficients applied to a history, and products of the differences in it."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from cpsr.predictor.checkpoint_series import newest_used
from cpsr.predictor.protocol import History

__all__ = [
    "BLOCK_ELEMENTS",
    "CHUNK_ELEMENTS",
    "add_products",
    "all_finite",
    "combine",
    "gram",
    "is_finite",
    "read_piece",
]

# Four pieces of 1 MiB: long enough to read at the memory's pace, short enough to stay in a processor's cache while they
# are combined, and in the allocator: pieces of 4 MiB took twice the time.
CHUNK_ELEMENTS = 1 << 18
# Rows are built in float64 so that they sum to 1; a row that misses it by more was not built that way.
SUM_TOLERANCE = 1e-9


def combine(history: History, coefficients: Mapping[str, Sequence[float]]) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Stream `sum_k row[k] * history.read(operator, k)` as `(operator, start, values)`.

    Formed as `x_n + sum_k row[k] * (x_k - x_n)` with n the newest entry used: the same since a row sums to 1. Small
    differences are summed instead of large values cancelled, so that float32 keeps its precision. A tensor that was the
    same in all entries comes out equal to itself (`torch.equal`). At most four pieces of `CHUNK_ELEMENTS` float32
    values are alive at a time besides what the caller keeps.

    Raises:
        ValueError: an operator has no row; a row does not fit the history or does not sum to 1; the history returned a
            piece of another length.
    """
    count = len(history.entries)
    for operator in history.operators:
        row = coefficients.get(operator)
        if row is None:
            raise ValueError(f"no coefficients for operator '{operator}'")
        if len(row) != count or not abs(math.fsum(row) - 1.0) <= SUM_TOLERANCE:
            raise ValueError(f"coefficients of '{operator}' must be {count} numbers that sum to 1, got {tuple(row)}")
        numel = history.numel(operator)
        for start in range(0, numel, CHUNK_ELEMENTS):
            yield operator, start, _piece(history, operator, row, start, min(start + CHUNK_ELEMENTS, numel))


def _piece(history: History, operator: str, row: Sequence[float], start: int, stop: int) -> torch.Tensor:
    newest = newest_used(row)
    pivot = read_piece(history, operator, newest, start, stop)
    if not any(row[:newest]):
        return pivot.clone()  # the same bits: adding 0 turns -0.0 into 0.0
    correction = torch.zeros_like(pivot)
    difference = torch.empty_like(pivot)
    for position in range(newest):
        if row[position] != 0.0:
            torch.sub(read_piece(history, operator, position, start, stop), pivot, out=difference)
            correction.add_(difference, alpha=row[position])
    return correction.add_(pivot)  # one rounding at the weights' own size; fresh memory, the history is untouched


def read_piece(history: History, operator: str, entry: int, start: int, stop: int) -> torch.Tensor:
    """`history.read`, refusing a piece that would broadcast or be cast silently.

    Raises:
        ValueError: the piece is not `(stop - start,)` float32.
    """
    piece = history.read(operator, entry, start, stop)
    if piece.shape != (stop - start,) or piece.dtype != torch.float32:
        raise ValueError(
            f"'{operator}' at iteration {history.entries[entry].iteration}: expected ({stop - start},) float32, "
            f"the history holds {tuple(piece.shape)} {piece.dtype}; did the tensor change its shape?"
        )
    return piece


def is_finite(history: History, operator: str, entry: int) -> bool:
    """Whether the operator's weights in that entry hold neither NaN nor infinity; read in pieces."""
    numel = history.numel(operator)
    return all(
        all_finite(read_piece(history, operator, entry, start, min(start + CHUNK_ELEMENTS, numel)))
        for start in range(0, numel, CHUNK_ELEMENTS)
    )


def all_finite(piece: torch.Tensor) -> bool:
    """Whether a piece of weights holds neither NaN nor infinity."""
    # NaN and infinity never leave a sum again, and a sum is read at the memory's pace, 50 times faster than `isfinite`
    # with its temporaries. Large weights may overflow it: only then each value is looked at.
    return math.isfinite(float(piece.sum())) or bool(torch.isfinite(piece).all())


# Float64 values that the differences of one block hold, over all snapshots: 2 MiB are read, turned into 4 MiB of
# differences and multiplied within about 2 milliseconds on one core, at the memory's pace.
BLOCK_ELEMENTS = 1 << 19
# Longer pieces of a few snapshots stay with the allocator: up to 11 MB.
MIN_BLOCK_ROWS = 4


def gram(history: History, operator: str, positions: Sequence[int] | None = None) -> torch.Tensor:
    """Gram matrix of the operator's differences between consecutive snapshots, in one streaming pass.

    With `d_k = x_(k+1) - x_k` over the K snapshots: `G[j, k] = sum over elements d_j d_k`. Not normalised, so that
    the matrices of ranks that hold slices of the same operator add up to that of the whole. NaN or infinite weights
    make it so.

    Args:
        history: what is read.
        operator: one of its operators.
        positions: entries that hold the snapshots, ascending, at least one; None: all.

    Returns:
        `(K - 1, K - 1)` float64 on the CPU, symmetric.

    Raises:
        ValueError: a tensor changed its shape.
    """
    places = range(len(history.entries)) if positions is None else positions
    products = torch.zeros(len(places) - 1, len(places) - 1, dtype=torch.float64, device="cpu")
    for _ in add_products(history, operator, places, products):
        pass
    return products


def add_products(history: History, operator: str, positions: Sequence[int], products: torch.Tensor) -> Iterator[None]:
    """Add to `products` the last columns of the operator's Gram matrix (`gram`); yields between two blocks.

    At most `BLOCK_ELEMENTS` float64 values of differences and two pieces are alive. Abandoned, it has added a part.
    """
    rows, columns = products.shape
    numel, length = history.numel(operator), BLOCK_ELEMENTS // max(rows + 1, MIN_BLOCK_ROWS)
    differences = torch.empty(rows, min(length, numel), dtype=torch.float64, device="cpu")
    for start in range(0, numel, length):
        stop = min(start + length, numel)
        block = differences[:, : stop - start]
        older = read_piece(history, operator, positions[0], start, stop)
        for row, position in zip(block, positions[1:], strict=True):
            newer = read_piece(history, operator, position, start, stop)
            torch.sub(newer, older, out=row)
            older = newer
        products.addmm_(block, block[rows - columns :].T)
        if stop < numel:
            yield
