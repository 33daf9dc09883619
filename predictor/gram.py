"""Inner products of the differences between checkpoints, from which coefficients per tensor are chosen."""

from collections.abc import Sequence

import torch

from cpsr.predictor.combine import read_piece
from cpsr.predictor.protocol import History

__all__ = ["BLOCK_ELEMENTS", "difference_rows", "gram"]

# Float64 values that the differences of one block hold, over all snapshots: 4 MiB, and the products of a block run at
# the memory's pace. Fixed, so that a sum of rounded products does not depend on how predicted values are streamed.
BLOCK_ELEMENTS = 1 << 19


def gram(
    history: History, operator: str, positions: Sequence[int] | None = None, block_elements: int = BLOCK_ELEMENTS
) -> torch.Tensor:
    """Gram matrix of the operator's differences between consecutive snapshots, in one streaming pass.

    With `d_k = x_(k+1) - x_k` over the K snapshots: `G[j, k] = sum over elements d_j d_k`. Not normalised, so that
    the matrices of ranks that hold slices of the same operator add up to that of the whole. NaN or infinite weights
    make it so.

    Args:
        history: what is read; at most `block_elements` float64 values of differences and two pieces are alive.
        operator: one of its operators.
        positions: entries that hold the snapshots, ascending (`Series.indices`); None: all.
        block_elements: bound on the memory; it changes the result by rounding only.

    Returns:
        `(K - 1, K - 1)` float64 on the CPU, symmetric.

    Raises:
        ValueError: fewer than 2 snapshots, a block that holds less than one element of each, or a tensor that changed
            its shape.
    """
    places = range(len(history.entries)) if positions is None else positions
    if len(places) < 2:
        raise ValueError(f"'{operator}': {len(places)} snapshots have no differences")
    length = block_elements // (len(places) - 1)
    if length < 1:
        raise ValueError(f"block_elements = {block_elements}: too few for {len(places)} snapshots")
    numel = history.numel(operator)
    total = torch.zeros(len(places) - 1, len(places) - 1, dtype=torch.float64, device="cpu")
    differences = torch.empty(len(places) - 1, min(length, numel), dtype=torch.float64, device="cpu")
    for start in range(0, numel, length):
        stop = min(start + length, numel)
        block = differences[:, : stop - start]
        difference_rows(history, operator, places, start, stop, block)
        total.addmm_(block, block.T)
    return total


def difference_rows(
    history: History, operator: str, positions: Sequence[int], start: int, stop: int, out: torch.Tensor
) -> None:
    """Write `x_(k+1) - x_k` of the elements `[start, stop)` into row k of `out`, `(K - 1, stop - start)` float64."""
    older = read_piece(history, operator, positions[0], start, stop)
    for row, position in zip(out, positions[1:], strict=True):
        newer = read_piece(history, operator, position, start, stop)
        torch.sub(newer, older, out=row)
        older = newer
