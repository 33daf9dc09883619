"""Every operator once in a window, the least popular first."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from cpsr.engines.moe.operators import Expert, Operator
from cpsr.engines.moe.popularity import PerExpert, Popularity
from cpsr.experts.budget import Budget
from cpsr.experts.window import SparseWindow, sparse_window

__all__ = ["MoEvement", "OperatorBytes"]

# An expert's share has changed when it differs by this much from the last ordering, relatively ...
CHANGED_RELATIVE = 0.10
# ... and operators are ordered again when this part of the experts has changed.
CHANGED_EXPERTS = 0.25


@dataclass(frozen=True)
class OperatorBytes:
    """Bytes of one operator in a snapshot.

    Attributes:
        active: master weights and optimizer state.
        frozen: weights of the forward and backward pass.
    """

    active: float
    frozen: float


class MoEvement:
    """Operators in windows: each is saved whole once, and until then only its weights are (`frozen`).

    Experts go by ascending score, then gates and non-expert parts, which every token passes. Popular operators are so
    frozen for longest when the checkpoint is converted, which saves their weight gradients. Order and window hold for
    one window. At its end the window is found anew from the budget. The order is found anew where the share of their
    layer's tokens is over 10% off for at least 25% of the experts.

    Of the budget it takes `snapshot_bytes`: non-expert parts are operators like others. Ranks with operators or links
    of their own have windows of their own; a checkpoint is complete when the longest has ended.

    Args:
        operators: of this rank, with what they take.

    Source: moevement, section 3.5, Algorithm 1.
    """

    def __init__(self, operators: Mapping[Operator, OperatorBytes]) -> None:
        self._bytes = dict(operators)
        self._order: tuple[Operator, ...] = ()
        self._ordered_by: NDArray[numpy.float64] | None = None
        self._window: SparseWindow | None = None
        self._position = 0
        self._step: int | None = None

    @property
    def window(self) -> SparseWindow | None:
        """The present window, with places in `order`; None before the first selection."""
        return self._window

    @property
    def order(self) -> tuple[Operator, ...]:
        """Operators as they are ordered now."""
        return self._order

    @property
    def frozen(self) -> tuple[Operator, ...]:
        """Operators of which the last selected snapshot holds only the weights."""
        if self._window is None:
            return ()
        return tuple(self._order[place] for place in self._window.frozen(self._position))

    def select(self, step: int, popularity: Popularity, budget: Budget) -> tuple[Operator, ...]:
        """The next operators of the window; the same again for the same step.

        A step that was left out does not count: its operators are what comes next.
        """
        if not self._bytes:
            return ()
        if step != self._step:
            self._advance(popularity, budget)
            self._step = step
        assert self._window is not None
        return tuple(self._order[place] for place in self._window.schedule[self._position])

    def _advance(self, popularity: Popularity, budget: Budget) -> None:
        self._position += 1
        if self._window is not None and self._position < self._window.window:
            return
        now = popularity.shares
        if self._ordered_by is None or _changed(self._ordered_by, now):
            self._order = tuple(sorted(self._bytes, key=lambda operator: _score(operator, popularity.scores)))
            self._ordered_by = now
        sizes = [self._bytes[operator] for operator in self._order]
        # The budget is what one iteration moves: with the iteration as the unit of time, it is the bandwidth.
        self._window = sparse_window(
            [size.active for size in sizes], [size.frozen for size in sizes], 1.0, budget.snapshot_bytes
        )
        self._position = 0


def _score(operator: Operator, scores: PerExpert) -> float:
    if not isinstance(operator, Expert):
        return math.inf
    if operator.layer >= len(scores) or operator.index >= len(scores[operator.layer]):
        raise ValueError(f"scores were given, and none of {operator}")
    return float(scores[operator.layer][operator.index])


def _changed(before: NDArray[numpy.float64], now: NDArray[numpy.float64]) -> bool:
    """Whether enough experts' shares have changed; one without tokens before has changed if it has some now."""
    off = int((abs(now - before) > CHANGED_RELATIVE * before).sum())
    return now.size > 0 and off >= CHANGED_EXPERTS * now.size
