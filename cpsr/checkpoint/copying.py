"""Copies a rank's state into host buffers: by a thread, in pieces during waits, or on a stream of the device."""

import logging
import operator
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from cpsr.checkpoint.boundary import EarlierStep
from cpsr.checkpoint.buffers import HostBuffer, Span, cut, plan_spans
from cpsr.checkpoint.contents import WHOLE, Contents
from cpsr.checkpoint.device_copy import DeviceCopy, device_of
from cpsr.checkpoint.host_copy import HostCopyPlan
from cpsr.checkpoint.paced import CopyAccount, CopyPace, PacedCopy, Piece, Waits
from cpsr.checkpoint.step_events import EVENTS, StepEvents
from cpsr.errors import SaveError, UnsupportedEngineError
from cpsr.state.codec import SmallState
from cpsr.state.device_values import Arrival, Deadline
from cpsr.state.shard import Shard

__all__ = ["Copying", "StateCopier"]

logger = logging.getLogger(__name__)

# Size of one copy during waits: less than a millisecond, so that it ends within short waits.
PIECE_BYTES = 4 << 20
# Of the time of a dump, for steps that the host has launched: behind a collective of a dead rank they never end.
NEWEST_SHARE = 0.5
PREPARE_SECONDS = 10.0  # for the device, when a life begins

Copying = Future[float] | PacedCopy | DeviceCopy

# Makes the snapshot's views of the buffer, on the thread that copies.
_Put = Callable[[], None]


class StateCopier:
    """Starts the copies of snapshots, and makes those of an emergency dump.

    Weights and moments on the host are copied on the host, also where the buffers beside them are on a device.

    Args:
        template: every shard has its tensors where this has them.
        worker: the thread that copies on the host.

    Attributes:
        device: CUDA device with a part of the state, None where all of it is on the host.
        pace: plans copies in waits; None where copies do not use waits.
        events: of the step boundaries on that device; None on the host.
        updates: events at which updates begin there, one more than the steps that may wait; None on the host.

    Raises:
        UnsupportedEngineError: the state is on several devices.
    """

    def __init__(self, template: Shard, worker: ThreadPoolExecutor) -> None:
        self._worker = worker
        self.pace: CopyPace | None = None
        self._planned: tuple[list[torch.Tensor], list[Span]] | None = None  # of the shard seen last
        self._host_plans: dict[int, tuple[list[Span], HostCopyPlan]] = {}  # by buffer
        self.device = device_of(template)
        self._stream: torch.cuda.Stream | None = None
        self._dumps: torch.cuda.Stream | None = None  # no dump waits behind a snapshot that waits for a hung step
        self.events: StepEvents | None = None
        self.updates: StepEvents | None = None
        if self.device is not None:
            self._dumps = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call] # torch's stub has no types
            self.events, self.updates = StepEvents(self.device), StepEvents(self.device, EVENTS + 1)
            if device_of(Shard(template.operators)) is not None:
                self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def copy_in(self, waits: Waits) -> None:
        """From now on copy as much as fits into the training thread's waits, and the rest beside its work, as before.

        Only for state on the host: a GPU runs the copies on their own stream beside its kernels.
        """
        self.pace = CopyPace(waits)

    @property
    def account(self) -> CopyAccount | None:
        """Totals over the copies of all snapshots so far; None where copies do not use waits."""
        return None if self.pace is None else self.pace.account

    def mark_boundary(self) -> torch.cuda.Event | None:
        """Called when the host has launched a step; its event, None on the host."""
        return None if self.events is None else self.events.record()

    def start(self, buffer: HostBuffer, shard: Shard, contents: Contents, put: _Put) -> Copying:
        """Start to copy the weights and moments of a snapshot.

        Args:
            buffer: the target.
            shard: the sources, which must not change before the copy is through.
            contents: of the snapshot.
            put: makes the snapshot's views of the buffer.
        """
        if self._stream is not None:
            copy = DeviceCopy(self._stream, shard)
            self._copy(buffer, shard, contents, put, copy.enqueue)
            return copy
        if self.pace is not None:
            paced = PacedCopy(self.pace)
            self._worker.submit(paced.run, lambda: self._pieces(buffer, shard, contents, put))
            return paced
        return self._worker.submit(self._copy_on_host, buffer, shard, contents, put)

    def arrival(self) -> Arrival | None:
        """Completes with the copies of buffers, which `Copying` does not show where weights are on the host alone."""
        return Arrival(self.device) if self.device is not None and self._stream is None else None

    @contextmanager
    def after_step(self) -> Iterator[None]:
        """Inside, work follows the last step and precedes the next one. On the training thread.

        A loop may train on a stream of its own, and ask for its batches outside of it.
        """
        stream = None if self.events is None else self.events.stream
        if stream is None or stream == (current := torch.cuda.current_stream(self.device)):
            yield
            return
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield

    def prepare_dump(self, scalars: Callable[[], Any]) -> None:
        """Copy a small state as a dump does: later, kernels may hang while memory is taken and code is loaded.

        Args:
            scalars: as for a dump.
        """
        if self.device is None or self._dumps is None:
            return
        self._dumps.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self._dumps):
                SmallState(scalars()).wait(Deadline(PREPARE_SECONDS))
        except (SaveError, UnsupportedEngineError, RuntimeError) as error:  # also of too little memory
            logger.warning("an emergency dump is not prepared: %s", error)

    @contextmanager
    def at_boundary(
        self, deadline: Deadline, earlier: Callable[[], EarlierStep | None]
    ) -> Iterator[EarlierStep | None]:
        """Wait until the device has finished the step; inside, work goes to a stream on which nothing hangs.

        From any thread.

        Args:
            deadline: for the device.
            earlier: the last step that the device has completed, if its state can be copied.

        Yields:
            None, or the step before those in which the device hangs.

        Raises:
            SaveError: the device hangs, there is no such step, and the deadline has passed.
        """
        events = self.events
        if events is None:
            yield None
            return
        step = None
        try:
            deadline.part(NEWEST_SHARE).wait_for(lambda: events.reached(events.newest), "the step")
        except SaveError:
            step = earlier()
            if step is None:
                deadline.wait_for(lambda: events.reached(events.newest), "the step")
        with torch.cuda.stream(self._dumps):
            yield step

    def copy_now(self, buffer: HostBuffer, shard: Shard, put: _Put) -> Copying:
        """Copy a whole state; inside `at_boundary`, from any thread.

        Args:
            buffer: the target.
            shard: the engine's weights and moments, and the buffers of the boundary.
            put: makes the snapshot's views of the buffer.
        """
        buffer.copy_others(shard)
        if self._stream is not None and self._dumps is not None:
            copy = DeviceCopy(self._dumps, shard)
            self._copy(buffer, shard, WHOLE, put, copy.enqueue)
            return copy
        done: Future[float] = Future()
        done.set_result(self._copy_on_host(buffer, shard, WHOLE, put))
        return done

    def _copy_on_host(self, buffer: HostBuffer, shard: Shard, contents: Contents, put: _Put) -> float:
        """Returns the seconds it took."""
        started = time.perf_counter()
        plan, parts = self._host_plan(buffer, shard, contents), _copied(buffer, contents)
        if buffer.memory is not None and self.device is None:
            buffer.held.digests |= plan.run_hashed(parts)  # all their bytes are here: nothing arrives from a device
        else:
            plan.run(parts)
        put()
        return time.perf_counter() - started

    def _host_plan(self, buffer: HostBuffer, shard: Shard, contents: Contents) -> HostCopyPlan:
        spans = self._spans(buffer, shard, contents)
        kept = self._host_plans.get(id(buffer))
        if kept is None or kept[0] is not spans:
            plan = HostCopyPlan(spans, buffer.content, buffer.held.parts.segments)
            kept = self._host_plans[id(buffer)] = (spans, plan)
        return kept[1]

    def _pieces(self, buffer: HostBuffer, shard: Shard, contents: Contents, put: _Put) -> list[Piece]:
        """What `_copy_on_host` copies, in pieces."""
        spans = _of_parts(self._spans(buffer, shard, contents), buffer, contents)
        put()
        return list(buffer.pairs(cut(spans, PIECE_BYTES)))

    def _copy(
        self,
        buffer: HostBuffer,
        shard: Shard,
        contents: Contents,
        put: _Put,
        copy: Callable[[Iterator[Piece]], None],
    ) -> None:
        copy(buffer.pairs(_of_parts(self._spans(buffer, shard, contents), buffer, contents)))
        put()

    def _spans(self, buffer: HostBuffer, shard: Shard, contents: Contents) -> list[Span]:
        # An engine makes new views where a tensor was replaced, or lies elsewhere.
        sources = [tensor for _, tensor in Shard(shard.operators).tensors()]
        planned = self._planned
        if planned is None or len(sources) != len(planned[0]) or any(map(operator.is_not, sources, planned[0])):
            planned = self._planned = (sources, plan_spans(buffer, shard))
        return planned[1]


def _copied(buffer: HostBuffer, contents: Contents) -> frozenset[str]:
    """The parts of the buffer that a snapshot copies."""
    return buffer.held.parts.besides(contents.uncopied)


def _of_parts(spans: list[Span], buffer: HostBuffer, contents: Contents) -> list[Span]:
    """The copies of those parts."""
    if not contents.uncopied:
        return spans
    copied, segments = _copied(buffer, contents), buffer.held.parts.segments
    begins = [segment.begin for segment in segments]
    return [span for span in spans if segments[bisect_right(begins, span.offset) - 1].part in copied]
