"""What a life tells the user's callbacks: how it began, roll-backs, commits, and its end after SIGTERM."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cpsr.checkpoint.run_directory import RunDirectory
from cpsr.job import Job, Rewind
from cpsr.journal import Beginning
from cpsr.restart import restored_state as restart

__all__ = ["Committed", "Event", "EventCallback", "EventCallbacks", "Leaving", "Restored", "RolledBack"]

logger = logging.getLogger(__name__)

StateSource = Literal["nothing", "disk", "memory", "emergency dump", "prediction"]


@dataclass(frozen=True)
class Restored:
    """A life has begun; the first event of each, on every rank.

    Attributes:
        iteration: where training continues; 0 from scratch. A logger has heard of later steps before.
        failure_iteration: the step of the failure; None where the run had not failed.
        checkpoint_iteration: the checkpoint that the state comes from; None from scratch.
        source: what this state is made of; the newest part where ranks differ.
        predicted: whether the state of some rank was predicted, so that the run never had it as a whole.
        lost_iterations: steps before the failure that are trained again.
        reason: one sentence for people.
        ranks: number of them.
        previous_ranks: of the life before; those of this one where there was none.
    """

    iteration: int
    failure_iteration: int | None
    checkpoint_iteration: int | None
    source: StateSource
    predicted: bool
    lost_iterations: int
    reason: str
    ranks: int
    previous_ranks: int


@dataclass(frozen=True)
class RolledBack:
    """The run continues from an earlier step in the same process, on every rank; its loop goes on from there.

    Attributes:
        from_iteration: the last step that was discarded.
        to_iteration: where training continues.
        reason: a clause.
    """

    from_iteration: int
    to_iteration: int
    reason: str


@dataclass(frozen=True)
class Committed:
    """A checkpoint is complete on the disk, on rank 0 alone.

    Attributes:
        iteration: of the checkpoint; the run is some steps further.
    """

    iteration: int


@dataclass(frozen=True)
class Leaving:
    """All ranks leave after this step, whose state has been saved; on every rank.

    Attributes:
        iteration: the last step of this life.
        reason: `sigterm`.
        saved: whether the state is committed.
    """

    iteration: int
    reason: str
    saved: bool


Event = Restored | RolledBack | Committed | Leaving
EventCallback = Callable[[Event], object]


class EventCallbacks:
    """The user's callbacks of one run, called on the training thread; an error in one is recorded, training goes on."""

    def __init__(self) -> None:
        self._callbacks: list[EventCallback] = []
        self._job: Job | None = None
        self._defer: Callable[[Callable[[], None]], None] = lambda act: act()
        self._first: Restored | None = None
        self._saved: int | None = None  # newest checkpoint

    def add(self, callback: EventCallback) -> None:
        """Call it with every event from now on, and first with the one that began this life, if that has begun."""
        self._callbacks.append(callback)
        if self._first is not None:
            self._call(callback, self._first)

    def begin_life(self, job: Job, saved_iteration: int | None, defer: Callable[[Callable[[], None]], None]) -> None:
        """A life begins.

        Args:
            job: this rank's.
            saved_iteration: its newest checkpoint.
            defer: has something done when the loop has finished its iteration.
        """
        self._job, self._saved, self._defer, self._first = job, saved_iteration, defer, None

    def opened(self, restored: restart.Restored, run: RunDirectory) -> None:
        """The life is open, and began so."""
        iteration, failure = restored.restored_iteration, restored.failure_iteration
        self._first = Restored(
            iteration,
            failure,
            restored.checkpoint_iteration,
            _source(restored),
            restored.predicted,
            restored.lost_iterations,
            restored.reason,
            run.ranks,
            run.previous_ranks,
        )
        self._emit(self._first)

    def note_saved(self, saved_iteration: int | None) -> None:
        """This is the newest checkpoint."""
        if saved_iteration == self._saved:
            return
        self._saved = saved_iteration
        if saved_iteration is not None and self._job is not None and self._job.group.rank == 0:
            self._emit(Committed(saved_iteration))

    def rewound(self, to: Rewind, newest_iteration: int) -> None:
        """Tell once the loop has finished the discarded step, which it may still log.

        Args:
            to: the new state.
            newest_iteration: of the last step before.
        """
        self._saved = to.checkpoint_iteration
        if to.iteration < newest_iteration:
            event = RolledBack(newest_iteration, to.iteration, to.reason)
            self._defer(lambda: self._emit(event))

    def leaving(self, iteration: int, *, saved: bool) -> None:
        """All ranks leave after SIGTERM."""
        self._emit(Leaving(iteration, "sigterm", saved))

    def _emit(self, event: Event) -> None:
        for callback in self._callbacks:
            self._call(callback, event)

    def _call(self, callback: EventCallback, event: Event) -> None:
        try:
            callback(event)
        except Exception as error:  # of a logger, for which no training ends
            name = getattr(callback, "__qualname__", type(callback).__qualname__)
            message = (
                f"the callback {name} of recovery.on_event failed at {type(event).__name__} with "
                f"{type(error).__name__}: {error}. Training goes on; the callback is called again at the next event"
            )
            logger.debug("%s", message, exc_info=True)
            if self._job is not None:
                self._job.journal.event("callback failed", message, self._job.adapter.iteration, logging.ERROR)


def _source(restored: restart.Restored) -> StateSource:
    if restored.predicted:
        return "prediction"
    if restored.beginning is Beginning.SCRATCH:
        return "nothing"
    if restored.beginning is Beginning.EMERGENCY_DUMP:
        return "emergency dump"
    tiers = {source.tier for source in restored.sources}
    return "emergency dump" if "departure" in tiers else "memory" if "memory" in tiers else "disk"
