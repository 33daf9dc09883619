"""Sparse snapshots of every iteration, on the training thread: which windows go to the peers, alike on all ranks."""

from collections.abc import Callable
from typing import Any

from cpsr.experts.saving import ExpertSaving
from cpsr.replay.windows import Windows
from cpsr.saving.turns import Turns

__all__ = ["WindowSnapshots"]

MEASURED_ITERATIONS = 10  # of a life: then enough copies were measured, and the first checkpoint may be far away


class WindowSnapshots:
    """Does nothing where no windows are wanted.

    Args:
        windows: of this rank; None: none are wanted.
        turns: which of them all ranks send.
        note: is told of how many iterations windows are from now on; None: none are taken.
        experts: count the tokens by which experts have their turns; None: nobody counts.

    Attributes:
        wanted: whether windows take the place of snapshots in memory, and of their replicas.
    """

    def __init__(
        self,
        windows: Windows | None,
        turns: Turns,
        note: Callable[[int | None], object],
        experts: ExpertSaving | None = None,
    ) -> None:
        self._windows, self._turns, self._note, self._experts = windows, turns, note, experts
        self.wanted = windows is not None
        self._ended = 0
        note(None if windows is None else windows.iterations)

    def end_of(self, iteration: int, capture: Callable[[], Any]) -> Callable[[], None] | None:
        """Decide right after the step; returns what the iteration ends with, None without windows.

        Args:
            iteration: the finished one.
            capture: gives the whole small state.
        """
        windows = self._windows
        if windows is None:
            return None
        self._ended += 1
        if self._ended == MEASURED_ITERATIONS:
            windows.agree(iteration)
            self._note(windows.iterations)
        send = windows.ends_after(iteration) and self._turns.may_send(iteration)

        def take() -> None:
            sent = windows.take(iteration, capture, send=send)
            if sent is not None:
                self._turns.sent(iteration, sent.is_pending, sent.first)

        return take

    def before_update(self) -> None:
        """The state is about to change."""
        if self._windows is not None:
            self._windows.before_update()

    def agree(self, iteration: int) -> None:
        """Find the number of iterations of later windows anew, and what has its turn when; a collective.

        Args:
            iteration: the finished one, of which a checkpoint has begun.
        """
        if self._windows is not None:
            if self._experts is not None:
                self._windows.order(self._experts.popularity)
            self._windows.agree(iteration)
            self._note(self._windows.iterations)
