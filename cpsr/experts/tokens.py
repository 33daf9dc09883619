"""Tokens routed to each expert, and when each expert was last saved."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import ArrayLike, NDArray

from cpsr.engines.moe.operators import Expert, ExpertLayer
from cpsr.engines.moe.token_counts import PerExpert, per_expert

__all__ = ["SavedExperts", "TokenHistory"]

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


@dataclass(frozen=True)
class _Pending:
    """A checkpoint under way, not known to be committed yet.

    Attributes:
        iteration: of it.
        experts: that it saves.
        mask: the same, `(experts of all layers,)`.
    """

    iteration: int
    experts: frozenset[Expert]
    mask: NDArray[numpy.bool_]


class SavedExperts:
    """When each expert was last saved, and what was routed to it since then.

    A checkpoint under way counts as committed. If a later one is committed and this one is not, its experts count as
    unsaved again.

    Args:
        layers: of the model.
        iteration: at which training begins.

    Attributes:
        history: of the tokens; the counter adds them here.
    """

    def __init__(self, layers: Sequence[ExpertLayer], iteration: int = 0) -> None:
        self.history = TokenHistory(layers, iteration)
        self._all = tuple(Expert(place, index) for place, layer in enumerate(layers) for index in range(layer.experts))
        self._place = {expert: place for place, expert in enumerate(self._all)}
        self._saved_at = numpy.full(len(self._all), iteration)  # by committed checkpoints, as are the ages
        self._ages = numpy.zeros(len(self._all))
        self._booked_until = 0  # tokens missed up to here were counted in an earlier recovery
        self._pending: list[_Pending] = []

    @property
    def experts(self) -> tuple[Expert, ...]:
        """All of the model, layer by layer."""
        return self._all

    @property
    def unsaved_tokens(self) -> PerExpert:
        """Routed to each expert since it was last saved."""
        sums = self.history.until(numpy.full(len(self._all), self.history.iteration))
        saved = self.history.until(self._newest())
        return tuple(now - then for now, then in zip(sums, saved, strict=True))

    @property
    def ages(self) -> PerExpert:
        """Checkpoints since each expert's last one."""
        ages = self._ages.copy()
        for later, one in enumerate(reversed(self._pending)):
            ages = numpy.where(one.mask, numpy.minimum(ages, later), ages)
        return self.history.split(ages)

    def begun(self, iteration: int, experts: Iterable[Expert]) -> None:
        """Record that a checkpoint of the present iteration saves these experts.

        Args:
            iteration: of it.
            experts: that it saves.

        Raises:
            ValueError: there is no such expert; nothing was recorded.
        """
        chosen = frozenset(experts)
        mask = self._mask(chosen)
        self._pending = [one for one in self._pending if one.iteration < iteration]
        self._pending.append(_Pending(iteration, chosen, mask))
        self._ages += 1
        self.history.reach(iteration)
        self.history.mark()
        self._forget_points()

    def settle(self, committed_iteration: int | None) -> list[frozenset[Expert]]:
        """Record the newest committed checkpoint.

        Returns:
            The experts of each older checkpoint that was not committed, oldest first.
        """
        if committed_iteration is None:
            return []
        given_back = []
        while self._pending and self._pending[0].iteration <= committed_iteration:
            one = self._pending.pop(0)
            if one.iteration == committed_iteration:
                self._saved_at[one.mask] = committed_iteration
                self._ages[one.mask] = len(self._pending)
            else:
                given_back.append(one.experts)
        self._forget_points()
        return given_back

    def restored(self, taken_at: NDArray[numpy.int64], iteration: int) -> tuple[PerExpert, PerExpert]:
        """Record a restart with experts of these ages; their missing tokens count as lost, and none as unsaved.

        Tokens lost in an earlier recovery are not counted again.

        Args:
            taken_at: iteration of each expert's weights, `(experts of all layers,)`.
            iteration: of everything else; beyond the last count, tokens are estimated.

        Returns:
            Tokens lost, and those routed to it in the whole run, of each expert.
        """
        history = self.history
        whole = history.until(numpy.full(len(self._all), iteration))
        had = history.until(numpy.clip(taken_at, min(self._booked_until, iteration), iteration))
        lost = tuple(numpy.maximum(all_ - some, 0.0) for all_, some in zip(whole, had, strict=True))
        history.restart(iteration, whole)
        self._booked_until = iteration
        self.undone()
        return lost, whole

    def undone(self) -> None:
        """Drop checkpoints under way; the next failure is counted from the present state."""
        self._pending = []
        self._booked_until = min(self._booked_until, self.history.iteration)
        self._saved_at[:] = self.history.iteration
        self._ages[:] = 0
        self.history.mark()
        self._forget_points()

    def state_dict(self) -> dict[str, Any]:
        """The state of this life that `restored` needs."""
        return {"history": self.history.state_dict(), "booked_until": self._booked_until}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`, with nothing under way and nothing unsaved.

        Raises:
            ValueError: it is of a model with other layers of experts; nothing was changed.
        """
        self.history.load_state_dict(state["history"])
        self._booked_until = state["booked_until"]
        self._pending = []
        self._saved_at[:] = self.history.iteration
        self._ages[:] = 0

    def _mask(self, experts: Iterable[Expert]) -> NDArray[numpy.bool_]:
        """Marks of these experts, `(experts of all layers,)`; ValueError where there is no such expert."""
        chosen = frozenset(experts)
        if unknown := chosen - self._place.keys():
            raise ValueError(f"the model has no {min(unknown, key=str)}")
        mask = numpy.zeros(len(self._all), dtype=bool)
        mask[[self._place[expert] for expert in chosen]] = True
        return mask

    def _newest(self) -> NDArray[numpy.int64]:
        newest = self._saved_at.copy()
        for one in self._pending:
            newest[one.mask] = one.iteration
        return newest

    def _forget_points(self) -> None:
        # Points of committed checkpoints are needed while a newer one may still fail.
        self.history.keep({*self._saved_at.tolist(), *(one.iteration for one in self._pending)})
