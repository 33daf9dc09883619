"""Publishes the steps that are complete on the device: the host launches them before, and may be ahead of it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cpsr.checkpoint.boundary import EarlierStep
from cpsr.checkpoint.device_copy import StepEvents
from cpsr.checkpoint.progress import ProgressCounter
from cpsr.errors import UnsupportedEngineError
from cpsr.state.codec import host_copy

__all__ = ["Publication"]

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.01  # at the end of a life
THREAD_NAME = "cpsr-publication"
BESIDE_SECONDS = 1.0  # between two looks beside the training thread
CLOSE_SECONDS = 5.0  # the thread ends at once, unless the driver does not answer


@dataclass(eq=False)
class _Step:
    event: torch.cuda.Event
    iteration: int
    batches: int
    boundary: int
    begins: torch.cuda.Event | None  # before its update; None: not known
    small: Any = None  # the small state before the next update


class Publication:
    """The step counter of a rank, never ahead of its device.

    A step that is still queued dies with the process: it counts neither as trained, nor its batches as used. On the
    host a step is complete when it is reported. `step` and `reset` belong to the training thread.

    Args:
        counter: what a restart reads.
        events: of the step boundaries on the device; None on the host.
        updates: for the begin of updates there; None: no earlier step is ever dumped.

    Attributes:
        published: the newest step that the device has completed; on the host not kept.
    """

    def __init__(self, counter: ProgressCounter, events: StepEvents | None, updates: StepEvents | None = None) -> None:
        self._counter = counter
        self._events = events
        self._updates = updates
        self._pending: deque[_Step] = deque()  # oldest first
        self._complete: _Step | None = None  # the newest that is published
        self.published = 0
        self._begun: torch.cuda.Event | None = None  # of the update under way
        self._polling = threading.Lock()  # around the device's answers, for which no other thread waits
        self._changing = threading.Lock()  # around the steps and the counter, for a few lines
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Also look once a second: the training thread may wait long for its data, or hang.

        On a thread of its own, since the driver may let it wait while the training thread's launches do.
        """
        if self._events is not None:
            self._thread = threading.Thread(target=self._look, name=THREAD_NAME, daemon=True)
            self._thread.start()

    def _look(self) -> None:
        while not self._closing.wait(BESIDE_SECONDS):
            try:
                self.poll()
            except RuntimeError as error:  # the training thread meets it, too, and reports it
                logger.debug("the device does not answer: %s", error)
                return

    def step(self, iteration: int, batches: int, event: torch.cuda.Event | None) -> None:
        """Publish this iteration once its event is complete.

        Args:
            iteration: that the host has launched.
            batches: used up to it.
            event: of its boundary; None on the host.
        """
        if event is None or self._events is None:
            self._counter.publish(iteration, batches)
            return
        with self._changing:
            begins, self._begun = self._begun, None
            if self._pending and self._pending[-1].event is event:  # all are held: it took over the last one's
                begins = self._pending.pop().begins  # what follows the step before begins there
            else:
                self._events.hold(event)
                if begins is not None and self._updates is not None:
                    self._updates.hold(begins)
            self._pending.append(_Step(event, iteration, batches, self._events.recorded, begins))
        self.poll()

    def before_update(self, small: Callable[[], Any]) -> None:
        """Keep the small state of the last step, which the device may not have completed."""
        if self._updates is None:
            return
        try:
            kept = host_copy(small())
        except UnsupportedEngineError as error:
            self._updates = None
            logger.info("an emergency dump waits for the newest step, and takes no earlier one: %s", error)
            return
        with self._changing:
            newest = self._pending[-1] if self._pending else self._complete
            if newest is not None:
                newest.small = kept

    def begin_update(self) -> None:
        """The host launches an update: mark its begin on the device."""
        if self._events is not None:
            self._events.updating()
        if self._updates is not None and self._begun is None:
            self._begun = self._updates.record()

    def earlier(self) -> EarlierStep | None:
        """The last step that the device has completed, if later ones wait there; on any thread.

        Raises:
            RuntimeError: the device has failed.
        """
        self.poll()
        with self._changing:
            complete, updates = self._complete, self._updates
            following = self._pending[0] if self._pending else None
        if complete is None or complete.small is None or updates is None:
            return None
        if following is None or (begins := following.begins) is None:
            return None

        def overtaken() -> bool:
            begun = updates.reached(begins)
            with self._changing:  # once that step is published, the event may be another's
                return begun or not self._pending or self._pending[0] is not following

        if overtaken():
            return None
        return EarlierStep(complete.iteration, complete.boundary, complete.small, overtaken)

    def poll(self) -> None:
        """Publish the steps that are complete by now, the newest last; on any thread, without waiting.

        Raises:
            RuntimeError: the device has failed.
        """
        # A second thread need not wait: the first one publishes.
        if self._events is None or not self._pending or not self._polling.acquire(blocking=False):
            return
        try:
            while (step := self._oldest()) is not None and self._events.reached(step.event):
                self._publish(step)
        finally:
            self._polling.release()

    def reset(self, iteration: int, batches: int) -> None:
        """The state is that of another iteration: steps that are still pending lead elsewhere."""
        with self._changing:
            self._forget()
            self._counter.reset(iteration, batches)
            self.published = iteration

    def close(self, wait_seconds: float) -> None:
        """Publish what the device completes within this time, and close the counter, which keeps its value."""
        deadline = time.monotonic() + wait_seconds
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        try:
            self.poll()
            while self._pending and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                self.poll()
        except RuntimeError as error:  # a life that ends with an error raises that
            logger.warning("the device has failed, and its last %d steps do not count: %s", len(self._pending), error)
        finally:
            with self._changing:
                self._forget()
                self._counter.close()

    def _oldest(self) -> _Step | None:
        with self._changing:
            return self._pending[0] if self._pending else None

    def _publish(self, step: _Step) -> None:
        with self._changing:
            if not self._pending or self._pending[0] is not step:  # forgotten, or taken over, while the device answered
                return
            self._pending.popleft()
            self._counter.publish(step.iteration, step.batches)
            self._release(step)
            self._complete = step
            self.published = step.iteration

    def _forget(self) -> None:
        self._complete = self._begun = None
        while self._pending:
            self._release(self._pending.popleft())

    def _release(self, step: _Step) -> None:
        assert self._events is not None
        self._events.release(step.event)
        if step.begins is not None and self._updates is not None:
            self._updates.release(step.begins)
