"""What a training loop does after the optimizer's step, and when it is through with it."""

import threading
from collections.abc import Callable

from cpsr.group import Group

__all__ = ["LoopTail"]


class LoopTail:
    """Puts things off until the loop has finished an iteration, which is when it asks for the next batch.

    Schedules, averages of the weights, counters and evaluations come after the step. A checkpoint that took the random
    states and the registered objects at the step itself would miss what they do, and a restart would not do it again.

    A loop that took no batch from `recovery.resume` in an iteration does not show its end. A stage of a pipeline asks
    for a batch when the next iteration has begun, and others may wait for it. There nothing is put off.

    Args:
        group: all ranks; they put things off together, or not at all.
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
        """The loop asks for a batch. One that is fetched ahead by another thread says nothing."""
        if threading.get_ident() == self._thread:
            self._asked = True
            self.finish()

    def after_step(self) -> None:
        """A step is complete."""
        self._shows_end, self._asked = self._asked, False

    def put_off(self, act: Callable[[], None]) -> None:
        """Do something at the end of this iteration, or now; a collective, after a step."""
        if self._group.all(self._possible and self._shows_end):
            self._waiting.append(act)
        else:
            act()

    def finish(self) -> None:
        """Do what was put off: the iteration is over, or the next forward or update is about to begin."""
        while self._waiting:
            self._waiting.pop(0)()

    def drop(self) -> None:
        """Forget what was put off."""
        self._waiting.clear()
