"""Tokens routed to each expert up to the iterations at which experts were saved."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy
from numpy.typing import ArrayLike, NDArray

from cpsr.engines.moe.layers import ExpertLayer
from cpsr.engines.moe.popularity import PerExpert, per_expert

__all__ = ["TokenHistory"]

# Two points give a rate, which estimates tokens whose counts died with their process.
POINTS_KEPT = 2


class TokenHistory:
    """Sums over the run, `(experts of all layers,)`, at a few iterations (*points*) and now.

    An expert misses the tokens between the iteration of its snapshot and another one. The sums at these iterations are
    enough: 8 bytes for each expert and point. Elsewhere sums are estimated: linear between two points, and beyond the
    last with the rate of the last two.

    Args:
        layers: of the model.
        iteration: from which tokens are counted.
    """

    def __init__(self, layers: Sequence[ExpertLayer], iteration: int = 0) -> None:
        self._layers = tuple(layers)
        self._ends = numpy.cumsum([layer.experts for layer in layers])[:-1]
        self._iteration = iteration
        self._sums = numpy.zeros(sum(layer.experts for layer in layers))
        self._points: dict[int, NDArray[numpy.float64]] = {iteration: self._sums.copy()}

    @property
    def iteration(self) -> int:
        """Iteration up to which tokens were counted."""
        return self._iteration

    def count(self, tokens: Sequence[ArrayLike]) -> None:
        """Add tokens that were trained on: for each layer, `(experts,)`."""
        self._sums = self._sums + numpy.concatenate([*per_expert(self._layers, tokens, "tokens"), []])

    def reach(self, iteration: int) -> None:
        """Declare all tokens up to this iteration counted; drop counts of later, undone iterations."""
        if iteration < self._iteration:
            self._sums = self._until(iteration).copy()
        self._iteration = iteration
        self._points = {point: sums for point, sums in self._points.items() if point <= iteration}

    def restart(self, iteration: int, sums: PerExpert) -> None:
        """Continue from another iteration, with these sums."""
        self.reach(iteration)
        self._sums = numpy.concatenate([*sums, []])

    def mark(self) -> None:
        """Make this iteration a point."""
        self._points[self._iteration] = self._sums.copy()

    def keep(self, iterations: Collection[int]) -> None:
        """Drop the points of other iterations, except the newest ones."""
        newest = sorted(self._points)[-POINTS_KEPT:]
        self._points = {point: sums for point, sums in self._points.items() if point in iterations or point in newest}

    def until(self, iterations: NDArray[numpy.int64]) -> PerExpert:
        """Tokens of each expert up to an iteration of its own.

        Args:
            iterations: `(experts of all layers,)`.
        """
        found = numpy.empty_like(self._sums)
        for iteration in map(int, numpy.unique(iterations)):
            chosen = iterations == iteration
            found[chosen] = self._until(iteration)[chosen]
        return self.split(found)

    def split(self, values: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        """One array `(experts,)` for each layer of one `(experts of all layers,)`."""
        return tuple(numpy.split(values, self._ends))

    def state_dict(self) -> dict[str, Any]:
        """Iterations and sums of the points, the present one last."""
        points = sorted(self._points)
        rows = [self._points[point] for point in points] + [self._sums]
        return {"iterations": [*points, self._iteration], "sums": numpy.stack(rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`.

        Raises:
            ValueError: it is of a model with other layers of experts; nothing was changed.
        """
        sums = numpy.array(state["sums"], dtype=numpy.float64)
        if sums.shape[1:] != self._sums.shape:
            raise ValueError(f"tokens of {sums.shape[-1]} experts were saved, and the model has {self._sums.size}")
        *points, self._iteration = state["iterations"]
        self._points = dict(zip(points, sums, strict=False))
        self._sums = sums[-1].copy()

    def _until(self, iteration: int) -> NDArray[numpy.float64]:
        known = self._points | {self._iteration: self._sums}
        if iteration in known:
            return known[iteration]
        points = numpy.array(sorted(known))
        if len(points) == 1 or iteration < points[0]:
            return known[int(points[0])]
        after = min(int(numpy.searchsorted(points, iteration)), len(points) - 1)
        first, second = int(points[after - 1]), int(points[after])
        rate = (known[second] - known[first]) / (second - first)
        return known[second] + rate * (iteration - second)
