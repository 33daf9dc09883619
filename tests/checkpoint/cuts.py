"""Parts of a small state as ranks cut it: into ranges of each operator, of one flat tensor, or not at all."""

import torch

from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = ["CUTS", "ROWS", "SHAPES", "shard", "whole"]

CUTS = ("each", "flat", "whole")
SHAPES = {"a.weight": (7, 5), "b.bias": (3,), "c": (11, 13), "d.scale": ()}
ROWS = "rows"  # a moment that is not per element


def whole(name: str, kind: str) -> torch.Tensor:
    seed = torch.Generator().manual_seed(hash((name, kind)) % (1 << 32))
    return torch.randn(int(torch.Size(SHAPES[name]).numel()), generator=seed)


def shard(rank: int, ranks: int, *, cuts: str = "each", filled: bool = True, rows: bool = False) -> Shard:
    """A rank's part.

    Args:
        rank: whose.
        ranks: of the job.
        cuts: `each` operator into as many ranges as there are ranks; `flat`, all operators in one flat tensor, as ZeRO
            does; or `whole` on every rank.
        filled: with the values; else zeros.
        rows: with a moment by row.
    """
    sizes = {name: int(torch.Size(shape).numel()) for name, shape in SHAPES.items()}
    total, place, operators = sum(sizes.values()), 0, {}
    for name, size in sizes.items():
        length = -(-size // ranks)
        start, stop = min(size, rank * length), min(size, (rank + 1) * length)
        if cuts == "flat":
            length = -(-total // ranks)
            start, stop = max(0, rank * length - place), min(size, (rank + 1) * length - place)
            place += size
        if cuts == "whole":
            start, stop = 0, size
        if start >= stop:
            continue
        values = {kind: whole(name, kind)[start:stop].clone() for kind in ("param", "exp_avg", "exp_avg_sq")}
        if rows:
            values[ROWS] = whole(name, ROWS)[:2].clone() if size > 2 else whole(name, ROWS)[:1].clone()
        if not filled:
            values = {kind: torch.zeros_like(one) for kind, one in values.items()}
        parameter = ParamSlice(values.pop("param"), SHAPES[name], start)
        operators[name] = OperatorState(name, parameter, values, 4)
    return Shard(operators, {"seen": torch.tensor([float(rank)])})
