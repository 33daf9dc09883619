"""Publishes the steps that are complete on the device: the host launches them before, and may be ahead of it."""

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

import torch

from cpsr.checkpoint.progress import ProgressCounter
from cpsr.checkpoint.step_events import StepEvents

__all__ = ["Publication"]

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.01  # at the end of a life
THREAD_NAME = "cpsr-publication"
BESIDE_SECONDS = 1.0  # between two looks beside the training thread
CLOSE_SECONDS = 5.0  # the thread ends at once, unless the driver does not answer


@dataclass(frozen=True)
class _Step:
    event: torch.cuda.Event
    iteration: int
    batches: int


class Publication:
    """The step counter of a rank, never ahead of its device.

    A step that is still queued dies with the process: it counts neither as trained, nor its batches as used. On the
    host a step is complete when it is reported. `step` and `reset` belong to the training thread.

    Args:
        counter: what a restart reads.
        events: of the step boundaries on the device; None on the host.
    """

    def __init__(self, counter: ProgressCounter, events: StepEvents | None) -> None:
        self._counter = counter
        self._events = events
        self._pending: deque[_Step] = deque()  # oldest first
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
            if self._pending and self._pending[-1].event is event:  # all are held: it took over the last one's
                self._pending.pop()
            else:
                self._events.hold(event)
            self._pending.append(_Step(event, iteration, batches))
        self.poll()

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

    def _forget(self) -> None:
        while self._pending:
            self._release(self._pending.popleft())

    def _release(self, step: _Step) -> None:
        assert self._events is not None
        self._events.release(step.event)
