"""Tokens routed to each expert, and when each expert was last saved."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy
from numpy.typing import ArrayLike, NDArray

from cpsr.engines.moe.operators import Expert, ExpertLayer
from cpsr.engines.moe.token_counts import PerExpert, per_expert

__all__ = ["TokenHistory"]

# Two points give a rate, which estimates tokens whose counts died with their process.
POINTS_KEPT = 2


class TokenHistory:
    """Sums over the run, `(experts of all layers,)`, at a few iterations (*points*) and now.

    An expert misses the tokens between the iteration of its snapshot and another one. The sums at these iterations are
    enough: 8 bytes for each expert and point. Elsewhere sums are estimated: linear between two points, and beyond the
    last with the rate of the last two.

    A checkpoint under way counts as saved. If it fails, the next one saves all experts.

    Args:
        layers: of the model.
        iteration: from which tokens are counted.

    Attributes:
        experts: all of the model, layer by layer.
        iteration: up to which tokens were counted.
    """

    def __init__(self, layers: Sequence[ExpertLayer], iteration: int = 0) -> None:
        self._layers = tuple(layers)
        self.experts = tuple(
            Expert(place, index) for place, layer in enumerate(layers) for index in range(layer.experts)
        )
        self._ends = numpy.cumsum([layer.experts for layer in layers])[:-1]
        self.iteration = iteration
        self._sums = numpy.zeros(len(self.experts))
        self._points: dict[int, NDArray[numpy.float64]] = {iteration: self._sums.copy()}
        self._saved_at = numpy.full(len(self.experts), iteration)
        self._ages = numpy.zeros(len(self.experts))
        self._booked_until = 0  # tokens missed up to here were counted in an earlier recovery

    # Training

    def count(self, tokens: Sequence[ArrayLike]) -> None:
        """Add tokens that were trained on: for each layer, `(experts,)`."""
        self._sums = self._sums + numpy.concatenate([*per_expert(self._layers, tokens, "tokens"), []])

    def reach(self, iteration: int) -> None:
        """Declare all tokens up to this iteration counted; drop counts of later, undone iterations."""
        if iteration < self.iteration:
            self._sums = self._until(iteration).copy()
        self.iteration = iteration
        self._points = {point: sums for point, sums in self._points.items() if point <= iteration}

    def begun(self, iteration: int, experts: Iterable[Expert]) -> None:
        """Record that a checkpoint of the present iteration saves these experts."""
        chosen = frozenset(experts)
        mask = numpy.array([expert in chosen for expert in self.experts], dtype=bool)
        self.reach(iteration)
        self._saved_at[mask] = iteration
        self._ages = numpy.where(mask, 0.0, self._ages + 1)
        self._mark()

    @property
    def unsaved_tokens(self) -> PerExpert:
        """Routed to each expert since it was last saved."""
        return self.split(self._sums - self._up_to(self._saved_at))

    @property
    def tokens(self) -> NDArray[numpy.float64]:
        """Routed to each expert in the whole run, `(experts of all layers,)`."""
        return self._sums

    @property
    def run_tokens(self) -> float:
        """Routed to all experts in the whole run."""
        return float(self._sums.sum())

    @property
    def interval_tokens(self) -> float:
        """Routed to all experts since the last checkpoint, or since the run went back."""
        return self.run_tokens - float(self._points[max(self._points)].sum())

    def rates(self, before: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
        """Tokens of each expert in an iteration since the last point, or those of before if none has passed."""
        point = max(self._points)
        passed = self.iteration - point
        return (self._sums - self._points[point]) / passed if passed > 0 else before

    @property
    def ages(self) -> PerExpert:
        """Checkpoints since each expert's last one."""
        return self.split(self._ages)

    # After a failure

    def restored(self, taken_at: NDArray[numpy.int64], iteration: int) -> tuple[PerExpert, PerExpert]:
        """Record a restart with experts of these ages; their missing tokens count as lost, and none as unsaved.

        Tokens lost in an earlier recovery are not counted again.

        Args:
            taken_at: iteration of each expert's weights, `(experts of all layers,)`.
            iteration: of everything else; beyond the last count, tokens are estimated.

        Returns:
            Tokens lost, and those routed to it in the whole run, of each expert.
        """
        whole = self._until(iteration).copy()
        had = self._up_to(numpy.clip(taken_at, min(self._booked_until, iteration), iteration))
        self.reach(iteration)
        self._sums, self._booked_until = whole, iteration
        self.undone()
        return self.split(numpy.maximum(whole - had, 0.0)), self.split(whole)

    def undone(self) -> None:
        """Steps are undone: the next failure is counted from the present state."""
        self._booked_until = min(self._booked_until, self.iteration)
        self._saved_at[:] = self.iteration
        self._ages[:] = 0
        self._mark()

    def state_dict(self) -> dict[str, Any]:
        """Iterations and sums of the points, the present one last."""
        points = sorted(self._points)
        rows = [self._points[point] for point in points] + [self._sums]
        return {
            "iterations": [*points, self.iteration],
            "sums": numpy.stack(rows),
            "booked_until": self._booked_until,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`, with nothing unsaved.

        Raises:
            ValueError: it is of a model with other layers of experts; nothing was changed.
        """
        sums = numpy.array(state["sums"], dtype=numpy.float64)
        if sums.shape[1:] != self._sums.shape:
            raise ValueError(f"tokens of {sums.shape[-1]} experts were saved, and the model has {self._sums.size}")
        *points, self.iteration = state["iterations"]
        self._points = dict(zip(points, sums, strict=False))
        self._sums = sums[-1].copy()
        self._booked_until = state["booked_until"]
        self._saved_at[:] = self.iteration
        self._ages[:] = 0

    # Parts of the above

    def split(self, values: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        """One array `(experts,)` for each layer of one `(experts of all layers,)`."""
        return tuple(numpy.split(values, self._ends))

    def _mark(self) -> None:
        """Make this iteration a point; drop those at which no expert was saved, except the newest ones."""
        self._points[self.iteration] = self._sums.copy()
        kept = {*self._saved_at.tolist(), *sorted(self._points)[-POINTS_KEPT:]}
        self._points = {point: sums for point, sums in self._points.items() if point in kept}

    def _up_to(self, iterations: NDArray[numpy.int64]) -> NDArray[numpy.float64]:
        """Tokens of each expert up to an iteration of its own, `(experts of all layers,)` both."""
        found = numpy.empty_like(self._sums)
        for iteration in map(int, numpy.unique(iterations)):
            chosen = iterations == iteration
            found[chosen] = self._until(iteration)[chosen]
        return found

    def _until(self, iteration: int) -> NDArray[numpy.float64]:
        known = self._points | {self.iteration: self._sums}
        if iteration in known:
            return known[iteration]
        points = numpy.array(sorted(known))
        if len(points) == 1 or iteration < points[0]:
            return known[int(points[0])]
        after = min(int(numpy.searchsorted(points, iteration)), len(points) - 1)
        first, second = int(points[after - 1]), int(points[after])
        rate = (known[second] - known[first]) / (second - first)
        return known[second] + rate * (iteration - second)
