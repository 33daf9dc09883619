"""Defers work until the loop has finished what follows an optimizer step."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from cpsr.ranks.group import Group
from cpsr.saving.run_state import RunState

__all__ = ["LoopTail"]


@dataclass(frozen=True)
class _Waiting:
    act: Callable[[], None]
    at_request: bool  # a request ends the iteration
    saves: bool


class LoopTail:
    """Defers work to the end of the loop's iteration: until then the loop may still change the state of its step.

    Clipping, schedules, moving averages, counters and evaluations follow the step. A checkpoint captured at the step
    would miss their effects.

    An iteration ends when the loop requests its next batch from `recovery.resume`. Where some rank requests none, it
    ends when the next training forward or update begins. Random states and the position in the data are then those of
    the step, since the loop has drawn its next batch. A pipeline requests its batches inside `train_batch`, while other
    stages wait for them. Its iteration ends when `train_batch` is called.

    Args:
        group: all ranks.
        state: keeps random states and position from before the next batch is drawn.
        pipeline: whether the engine requests the batches.

    Attributes:
        ended: the loop has ended, or the user replaces its state: no step follows what is being done.
    """

    def __init__(self, group: Group, state: RunState, pipeline: bool) -> None:
        self._group = group
        self._state = state
        self._pipeline = pipeline
        self._thread = threading.get_ident()
        self._requests = False  # the loop has requested a batch in this life
        self._asked = False  # since the last step
        self._shows_end = False  # the iteration of the last step took a batch
        self._waiting: list[_Waiting] = []
        self.ended = False

    @property
    def is_here(self) -> bool:
        """Whether this is the thread that trains: others fetch batches ahead."""
        return threading.get_ident() == self._thread

    def on_request(self) -> None:
        """The loop requests a batch; requests of other threads are ignored."""
        if not self.is_here or self._pipeline:
            return
        self._requests = self._asked = True
        if not self._waiting:
            return
        self._state.release()
        waiting, self._waiting = self._waiting, [one for one in self._waiting if not one.at_request]
        for one in waiting:
            if one.at_request:
                one.act()
        if self._waiting:
            self._state.hold()

    def after_step(self) -> None:
        """A step is complete."""
        self._shows_end, self._asked = self._asked, False

    @property
    def saves(self) -> bool:
        """Whether the state is to be saved as soon as it has a position in the data."""
        return any(one.saves for one in self._waiting)

    def defer(self, act: Callable[[], None], *, saves: bool = False) -> None:
        """Call `act` at the end of this iteration, at one place on all ranks; a collective, after a step.

        Args:
            act: is called once.
            saves: it saves the state; between two steps on one batch, which no position tells, it waits for the last.
        """
        self._defer(act, at_request=self._group.all(self._requests), saves=saves)

    def defer_here(self, act: Callable[[], None], *, saves: bool = False) -> None:
        """As `defer`, on this rank alone: `act` is no collective."""
        self._defer(act, at_request=self._requests, saves=saves)

    def _defer(self, act: Callable[[], None], *, at_request: bool, saves: bool) -> None:
        # The next batch may be drawn without a request; or it is in hand, and a restart repeats what follows the step.
        if not (self._shows_end or self._pipeline) or self._state.draws.untrained:
            self._state.hold()
        self._waiting.append(_Waiting(act, at_request, saves and at_request))

    def finish(self, *, ended: bool = False) -> None:
        """Run the deferred work: the iteration is over, or the next forward or update is about to begin.

        Args:
            ended: no further step follows.
        """
        self.ended = ended
        inside = not ended and not self._pipeline and self._state.inside_batch
        waiting, self._waiting = self._waiting, []
        while waiting:
            one = waiting.pop(0)
            if inside and one.saves:
                self._waiting.append(one)
            else:
                one.act()
        if not self._waiting:
            self._state.release()

    def drop(self) -> None:
        """Drop the deferred work."""
        self._waiting.clear()
        self._state.release()
