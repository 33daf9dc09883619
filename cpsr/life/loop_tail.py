"""Defers work until the loop has finished what follows an optimizer step."""

import threading
from collections.abc import Callable

from cpsr.ranks.group import Group

__all__ = ["LoopTail"]


class LoopTail:
    """Defers work to the end of the loop's iteration, which is when the loop requests the next batch.

    Schedules, averages of the weights, counters and evaluations follow the step. A checkpoint that captured random
    states and registered objects at the step itself would miss their effects, and a restart would not repeat them.

    The end of an iteration is not visible if the loop took no batch from `recovery.resume`. A pipeline stage requests a
    batch when the next iteration has begun, and others may wait for it. In both cases nothing is deferred.

    Args:
        group: all ranks; either all defer, or none.
        possible: False in a pipeline.
    """

    def __init__(self, group: Group, possible: bool) -> None:
        self._group = group
        self._possible = possible
        self._thread = threading.get_ident()
        self._asked = False  # since the last step
        self._shows_end = False  # the iteration whose step is complete took a batch
        self._waiting: list[Callable[[], None]] = []

    def on_request(self) -> None:
        """The loop requests a batch; requests of other threads, which fetch ahead, are ignored."""
        if threading.get_ident() == self._thread:
            self._asked = True
            self.finish()

    def after_step(self) -> None:
        """A step is complete."""
        self._shows_end, self._asked = self._asked, False

    def defer(self, act: Callable[[], None]) -> None:
        """Call `act` at the end of this iteration, or now; a collective, after a step."""
        if self._group.all(self._possible and self._shows_end):
            self._waiting.append(act)
        else:
            act()

    def defer_here(self, act: Callable[[], None]) -> None:
        """As `defer`, on this rank alone: `act` is no collective."""
        if self._possible and self._shows_end:
            self._waiting.append(act)
        else:
            act()

    def finish(self) -> None:
        """Run the deferred work: the iteration is over, or the next forward or update is about to begin."""
        while self._waiting:
            self._waiting.pop(0)()

    def drop(self) -> None:
        """Drop the deferred work."""
        self._waiting.clear()
