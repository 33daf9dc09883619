"""Copies a rank's state into host buffers: by a thread, in pieces during waits, or on a stream of the device.

Copies on the host are planned once, in the order of the buffer, and hashed while the bytes are in the cache.
"""

import logging
import operator
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from cpsr.checkpoint.boundary import EarlierStep
from cpsr.checkpoint.buffers import HostBuffer, Span, cut, plan_spans
from cpsr.checkpoint.device_copy import EVENTS, DeviceCopy, StepEvents, device_of
from cpsr.checkpoint.direct_file import PieceHashes
from cpsr.checkpoint.host_snapshot import WHOLE, Contents
from cpsr.checkpoint.paced import CopyPace, PacedCopy, Piece, Split, Waits
from cpsr.checkpoint.parts import Segment
from cpsr.errors import SaveError, UnsupportedEngineError
from cpsr.state.codec import SmallState
from cpsr.state.device_values import Arrival, Deadline
from cpsr.state.shard import Shard

__all__ = ["Copying", "HostCopyPlan", "RunningCopy", "StateCopier", "copy_beside_training"]

# A piece is hashed right after it was copied, while a core's cache still has it: copy and hash together then take 1.2
# times the processor time of the copy alone, and 1.7 times one after the other.
HASHED_BYTES = 1 << 20
# Torch copies smaller tensors with the calling thread alone. Its copy of a larger one would start a second team of
# threads, for whose displaced members the training thread waits.
SMALL_ELEMENTS = 1 << 15

_Bytes = NDArray[numpy.uint8]


@dataclass(frozen=True)
class _HostPiece:
    """One copy: small tensors in one call, or bytes of a large one.

    Attributes:
        targets, sources: tensors; empty for bytes.
        target_bytes, source_bytes: of a large tensor; empty for tensors.
        end: byte of the buffer behind the piece.
    """

    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    target_bytes: _Bytes
    source_bytes: _Bytes
    end: int

    def copy(self) -> None:
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)
        else:
            numpy.copyto(self.target_bytes, self.source_bytes)


_NO_BYTES: _Bytes = numpy.empty(0, dtype=numpy.uint8)


class HostCopyPlan:
    """The copies that bring tensors of the host into one buffer, by its segments.

    Args:
        spans: in the order of the buffer, each within one segment.
        content: all bytes of the buffer.
        segments: of the buffer.
    """

    def __init__(self, spans: Iterable[Span], content: torch.Tensor, segments: Iterable[Segment]) -> None:
        self._content = content.numpy().data
        self._segments = tuple(segments)
        self._by_segment: list[list[_HostPiece]] = []
        left = list(reversed(list(spans)))
        for segment in self._segments:
            self._pieces: list[_HostPiece] = []
            self._by_segment.append(self._pieces)
            own = []
            while left and left[-1].offset < segment.end:
                own.append(left.pop())
            self._add_spans(own, content)

    def _add_spans(self, spans: Iterable[Span], content: torch.Tensor) -> None:
        small: list[tuple[torch.Tensor, torch.Tensor]] = []
        begin = end = 0
        for span in spans:
            target = content[span.offset : span.end].view(span.source.dtype).view(span.source.shape)
            if small and span.end - begin > HASHED_BYTES:
                self._add(small, end)
            if not small:
                begin = span.offset
            if span.source.numel() < SMALL_ELEMENTS or not span.source.is_contiguous():
                small.append((target, span.source))
            else:
                self._add(small, end)
                self._add_large(target, span.source, span.offset)
            end = span.end
        self._add(small, end)

    def _add(self, small: list[tuple[torch.Tensor, torch.Tensor]], end: int) -> None:
        if small:
            targets, sources = [target for target, _ in small], [source for _, source in small]
            self._pieces.append(_HostPiece(targets, sources, _NO_BYTES, _NO_BYTES, end))
            small.clear()

    def _add_large(self, target: torch.Tensor, source: torch.Tensor, offset: int) -> None:
        into, values = _bytes_of(target), _bytes_of(source)
        for start in range(0, values.nbytes, HASHED_BYTES):
            stop = min(start + HASHED_BYTES, values.nbytes)
            self._pieces.append(_HostPiece([], [], into[start:stop], values[start:stop], offset + stop))

    @property
    def calls(self) -> int:
        """Number of copies that it makes."""
        return sum(map(len, self._by_segment))

    def run(self, parts: Collection[str]) -> None:
        """Copy these parts."""
        with torch.no_grad():
            for _, _, pieces in self._chosen(parts):
                for piece in pieces:
                    piece.copy()

    def run_hashed(self, parts: Collection[str]) -> dict[int, bytes]:
        """Copy these parts; returns the hashes of the MiB of each of their segments, by its place."""
        digests = {}
        with torch.no_grad():
            for place, segment, pieces in self._chosen(parts):
                found, hashed = PieceHashes(), segment.begin
                for piece in pieces:
                    piece.copy()
                    found.take(self._content[hashed : piece.end])
                    hashed = piece.end
                found.take(self._content[hashed : segment.end])
                digests[place] = found.digests()
        return digests

    def _chosen(self, parts: Collection[str]) -> Iterator[tuple[int, Segment, list[_HostPiece]]]:
        for place, (segment, pieces) in enumerate(zip(self._segments, self._by_segment, strict=True)):
            if segment.part in parts:
                yield place, segment, pieces


def _bytes_of(tensor: torch.Tensor) -> _Bytes:
    array: _Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array


def copy_beside_training(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, whatever its type, with the calling thread alone.

    Args:
        pairs: contiguous targets, and sources.
    """
    with torch.no_grad():
        for target, source in pairs:
            if target.dtype == source.dtype and source.is_contiguous():
                numpy.copyto(_bytes_of(target), _bytes_of(source))
                continue
            into, values = target.reshape(-1), source.detach().reshape(-1)
            for start in range(0, values.numel(), SMALL_ELEMENTS - 1):
                into[start : start + SMALL_ELEMENTS - 1].copy_(values[start : start + SMALL_ELEMENTS - 1])


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


class RunningCopy:
    """What must arrive before a snapshot may be sealed or written.

    Args:
        copy: of weights and moments.
        small: the small state.
        arrival: of the buffers, where `copy` does not show it.

    Attributes:
        seconds: that `copy` took, once it is complete.
    """

    def __init__(self, copy: Copying, small: SmallState, arrival: Arrival | None) -> None:
        self._copy = copy
        self._small = small
        self._arrival = arrival
        self._lock = threading.Lock()
        self._scalars: list[Any] = []  # one, once it is complete
        self._confirmed: bool | None = None
        self._waiting: list[Callable[[bool], None]] = []
        self.seconds = 0.0

    def confirm(self, *, unchanged: bool) -> None:
        """The copy is, or is not, that of one state; only the first call counts. From any thread."""
        with self._lock:
            if self._confirmed is not None:
                return
            self._confirmed, waiting = unchanged, self._waiting
        for act in waiting:
            act(unchanged)

    def when_confirmed(self, act: Callable[[bool], None]) -> None:
        """Call `act` with whether its sources stayed unchanged, once that is known: here, or in `confirm`."""
        with self._lock:
            if self._confirmed is None:
                self._waiting.append(act)
                return
        act(self._confirmed)

    def arrives(self, deadline: Deadline) -> bool:
        """Whether the device sends everything before the deadline, so that it writes no more into the buffer."""
        try:
            deadline.wait_for(self._is_sent, "a copy")
        except (SaveError, RuntimeError):  # it hangs, or fails at every call after an error of a kernel
            return False
        return True

    def _is_sent(self) -> bool:
        sent = self._copy.here if isinstance(self._copy, DeviceCopy) else True
        return sent and self._small.here and (self._arrival is None or self._arrival.here)

    @property
    def split(self) -> Split | None:
        """When its bytes were copied, where the pool copies in waits."""
        return self._copy.split if isinstance(self._copy, PacedCopy) else None

    def hurry(self) -> None:
        """Stop using waits; returns at once."""
        if isinstance(self._copy, PacedCopy):
            self._copy.hurry()

    def mark_needed(self) -> None:
        """On the training thread, before it waits for the copy."""
        if isinstance(self._copy, DeviceCopy):
            self._copy.mark_needed()

    def stall_seconds(self, waited_seconds: float) -> float:
        """How much of the training thread's wait this copy has cost the training."""
        if isinstance(self._copy, DeviceCopy):
            return min(waited_seconds, self._copy.delay_seconds())
        return waited_seconds

    def overlap_seconds(self, host_seconds: float) -> float:
        """How much time the copy had, by the device's clock where it copies; 0: not known."""
        return self._copy.overlap_seconds() if isinstance(self._copy, DeviceCopy) else host_seconds

    @property
    def encoded(self) -> tuple[Any, dict[str, Any]] | None:
        """The small state as `cpsr.state.codec.encode` gives it; None where a device had a part of it."""
        return self._small.encoded

    def result(self, deadline: Deadline | None = None) -> Any:
        """Wait until everything is here; from any thread, any number of times.

        Args:
            deadline: for the device alone: copies on the host come to their end by themselves.

        Returns:
            The small state.

        Raises:
            SaveError: the device hangs, and the deadline has passed.
            Exception: a copy failed.
        """
        self.seconds = self._copy.result(deadline) if isinstance(self._copy, DeviceCopy) else self._copy.result()
        if self._arrival is not None:
            self._arrival.wait("the copy of the buffers", deadline)
        self._small.wait(deadline)
        with self._lock:
            if not self._scalars:
                self._scalars.append(self._small.tree())
            return self._scalars[0]
