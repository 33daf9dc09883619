"""Copies tensors into host memory: by a thread, in pieces during waits, or on a stream of the device.

A copy is planned once, in the order of its buffer. On the host the bytes are hashed while they are in the cache.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from cpsr.checkpoint.boundary import DISTURBED, WriteWatch
from cpsr.checkpoint.device import device_of
from cpsr.checkpoint.direct_file import PieceHashes
from cpsr.checkpoint.parts import Held, Segment
from cpsr.checkpoint.running_copy import CopyPace, DeviceCopy, PacedCopy, Piece, RunningCopy, Waits
from cpsr.errors import SaveError
from cpsr.state.codec import SmallState
from cpsr.state.device_values import Arrival, Deadline, in_time
from cpsr.state.shard import OperatorState, Shard

__all__ = ["CopyEngine", "CopyPlan", "Publish"]

# A piece is hashed right after it was copied, while a core's cache still has it: copy and hash together then take 1.2
# times the processor time of the copy alone, and 1.7 times one after the other.
HASHED_BYTES = 1 << 20
# Torch copies so many with the calling thread alone. Its copy of more would start a second team of threads, for whose
# displaced members the training thread waits.
SMALL_ELEMENTS = 1 << 15

_Result = TypeVar("_Result")
# Copies on the host by one call; the address behind the last target, and their bytes.
_HostPiece = tuple[Callable[[], object], int, int]


class CopyPlan:
    """The copies that bring tensors into one buffer, or a range of it, by its segments.

    Args:
        pairs: target and source of each, in the order of the buffer, each within one segment; a target of another type
            gets converted values.
        held: what the buffer holds.
        begin: first byte of the range.
        end: byte after the last one; None: to the buffer's end.
    """

    def __init__(self, pairs: Iterable[Piece], held: Held, begin: int = 0, end: int | None = None) -> None:
        self._content, self._digests = held.content, held.digests  # not `held`, which has the plan
        self._segments: list[tuple[Segment, list[Piece]]] = []
        left = [(into, source.detach()) for into, source in pairs if into.numel()]
        left.reverse()
        start = held.content.data_ptr()
        for segment in held.parts.between(begin, len(held.content) if end is None else end):
            own = []
            while left and left[-1][0].data_ptr() < start + segment.end:
                own.append(left.pop())
            self._segments.append((segment, own))
        assert not left, "a copy lies in no segment of the range"

    @cached_property
    def _host_pieces(self) -> list[tuple[Segment, list[_HostPiece]]]:
        return [(segment, list(_in_pieces(pairs))) for segment, pairs in self._segments]

    def pairs(self, parts: Collection[str] | None = None) -> list[Piece]:
        """The copies of these parts; None: of all."""
        return [pair for segment, pairs in self._segments for pair in pairs if _is_of(segment, parts)]

    def run(self, parts: Collection[str] | None, paced: PacedCopy | None = None, *, hashed: bool) -> None:
        """Copy these parts with the calling thread.

        Args:
            parts: None for all.
            paced: says when each piece is copied; None: at once.
            hashed: also hash their segments, until the copy is needed; all other bytes of these are here already.
        """
        if paced is not None:
            paced.divide(sum(target.nbytes for target, _ in self.pairs(parts)))
        content, start = self._content.numpy().data, self._content.data_ptr()
        with torch.no_grad():
            for segment, pieces in self._host_pieces:
                if not _is_of(segment, parts):
                    continue
                found, at = PieceHashes(), segment.begin
                for copy, address, size in pieces:
                    if paced is not None:
                        paced.turn(size)
                    copy()
                    hashed = hashed and (paced is None or not paced.is_hurried)  # later, when nobody waits for it
                    if hashed:
                        end = address - start
                        found.take(content[at:end])
                        at = end
                if hashed:
                    found.take(content[at : segment.end])
                    self._digests[segment] = found.digests()


def _is_of(segment: Segment, parts: Collection[str] | None) -> bool:
    return parts is None or segment.part in parts


def _in_pieces(pairs: Iterable[Piece]) -> Iterator[_HostPiece]:
    """Copies of about a MiB each, in order, none of which starts threads.

    Each is one call without the interpreter's lock: two threads that hand it to each other at every tensor would both
    wait more than they work.
    """
    joined: list[Piece] = []
    for target, source in pairs:
        chunks = [(target, source)]
        if source.numel() > SMALL_ELEMENTS and (source.dim() == 1 or source.is_contiguous()):
            chunks = _split(target, source, SMALL_ELEMENTS)  # otherwise there is no flat view
        for chunk in chunks:
            if joined and _end_of(chunk[0]) - joined[0][0].data_ptr() > HASHED_BYTES:
                yield _piece(joined)
                joined = []
            joined.append(chunk)
    if joined:
        yield _piece(joined)


def _piece(pairs: Sequence[Piece]) -> _HostPiece:
    targets, sources = map(list, zip(*pairs, strict=True))
    return partial(torch._foreach_copy_, targets, sources), _end_of(targets[-1]), sum(map(_bytes, targets))


def _split(target: torch.Tensor, source: torch.Tensor, elements: int) -> list[Piece]:
    """The same copy in pieces of at most so many elements."""
    return [*zip(torch.split(target.view(-1), elements), torch.split(source.view(-1), elements), strict=True)]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes


def _end_of(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() + tensor.nbytes


# The sources of all plans, and the plans for each buffer by their key.
_Plans = tuple[dict[str, OperatorState], WeakKeyDictionary[Held, dict[int, CopyPlan]]]
Publish = Callable[[], None]  # declares what is in a buffer complete, by one store


class CopyEngine:
    """Copies into the buffers of one kind and seals them: one copy at a time, in the order of its calls.

    Args:
        name: of the thread that does all of it but copies on a device.
        device: CUDA device of the buffers' sources, or of a part of them; None: all are on the host.
        writes: whether the loop changes weights while they are copied.
        weights_there: whether weights and moments are on that device. Those on the host are copied on the host.

    Attributes:
        device: as given.
        writes: as given.
        pace: plans copies in waits; None where copies do not use waits.
        hashes: whether what is copied on the host is hashed; not where a device has buffers, which may come later.
    """

    def __init__(
        self, name: str, device: torch.device | None, writes: WriteWatch | None = None, *, weights_there: bool = True
    ) -> None:
        self._worker = ThreadPoolExecutor(1, f"cpsr-{name}", self._begin)
        self._thread = -1
        self.device, self.writes = device, WriteWatch() if writes is None else writes
        self.pace: CopyPace | None = None
        self.hashes = device is None
        self._stream: torch.cuda.Stream | None = None
        if device is not None and weights_there:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's stub has no types
        self._plans: _Plans = {}, WeakKeyDictionary()
        self._running: RunningCopy | None = None
        self._closed = False

    def _begin(self) -> None:
        self._thread = threading.get_ident()

    @staticmethod
    def of(name: str, template: Shard, writes: WriteWatch | None = None) -> "CopyEngine":
        """One for shards whose tensors lie where this has them.

        Raises:
            UnsupportedEngineError: it has tensors on several CUDA devices.
        """
        device, weights = device_of(template), device_of(Shard(template.operators))
        return CopyEngine(name, device, writes, weights_there=weights is not None)

    @property
    def copies_weights_on_device(self) -> bool:
        """Whether weights and moments are on the device."""
        return self._stream is not None

    @property
    def copies_in_order(self) -> bool:
        """Whether a copy is complete when the thread comes to what it was given next."""
        return self.device is None

    def copy_in(self, waits: Waits) -> None:
        """From now on copy as much as fits into the training thread's waits, and the rest beside its work, as before.

        Only for state on the host: a GPU runs the copies on their own stream beside its kernels.
        """
        self.pace = CopyPace(waits)

    def plan(
        self, held: Held, shard: Shard, make: Callable[[], Iterable[Piece]], key: int = 0, **between: int
    ) -> CopyPlan:
        """The plan of copies into a buffer: as the last time, while the operators are the same.

        An engine makes new ones where a tensor was replaced, or lies elsewhere; nobody changes these.

        Args:
            held: what the buffer holds.
            shard: with the sources.
            make: gives the pairs.
            key: of several plans for one buffer.
            between: `begin` and `end` of `CopyPlan`.
        """
        known, plans = self._plans  # another thread may replace them
        if shard.operators is not known:
            _, plans = self._plans = shard.operators, WeakKeyDictionary()  # plans keep the memory of what was replaced
        own = plans.setdefault(held, {})
        if key not in own:
            own[key] = CopyPlan(make(), held, **between)
        return own[key]

    def start(
        self,
        plan: Callable[[], CopyPlan],
        small: SmallState | None,
        shard: Shard,
        parts: Collection[str] | None = None,
        *,
        thorough: bool = False,
        early: bool = True,
        on_disturbed: Callable[[], None] = lambda: None,
        beside: Callable[[], object] = lambda: None,
    ) -> RunningCopy:
        """Start a copy; `finish` it before its sources change. If the loop ever changes them, it is complete now.

        Args:
            plan: gives the copies; called where they are made.
            small: the small state that goes with them, if any does.
            shard: the sources.
            parts: that are copied; None: all.
            thorough: whether changes of the weights are looked for in each row.
            early: confirm it now, if nothing has changed in the snapshots before.
            on_disturbed: called where the loop has changed the sources, and the copy is given up; from any thread,
                perhaps twice.
            beside: looks at the sources before the copy is complete, in the thread, or on a device by what it enqueues.
        """
        writes = self.writes
        if not writes.disturbed:
            writes.begin(self, shard, thorough=thorough, on_change=partial(self._take_back, on_disturbed))
        try:
            running = self._started(plan, parts, small, beside)
        except BaseException:
            writes.end(self)
            raise
        self._running = running
        if writes.disturbed:
            running.hurry()
            running.result()
        if writes.disturbed or (early and writes.trusted):
            running.confirm(unchanged=True)
        return running

    def copy_now(self, plan: Callable[[], CopyPlan], small: SmallState) -> RunningCopy:
        """Copy with this thread, or on its current stream of the device; nothing changes the sources meanwhile."""
        if self._stream is not None:
            return DeviceCopy(torch.cuda.current_stream(self.device), plan().pairs(), small)
        running = RunningCopy(small, self.arrival())
        running.copied = Future()
        running.copied.set_result(self._copy_on_host(plan, None, lambda: None))
        return running

    def _started(
        self,
        plan: Callable[[], CopyPlan],
        parts: Collection[str] | None,
        small: SmallState | None,
        beside: Callable[[], object],
    ) -> RunningCopy:
        if self._stream is not None:
            return DeviceCopy(self._stream, plan().pairs(parts), small, beside)
        paced = None if self.pace is None else PacedCopy(self.pace, small, self.arrival())
        running = RunningCopy(small, self.arrival()) if paced is None else paced
        running.copied = self._worker.submit(self._copy_on_host, plan, parts, beside, paced)
        return running

    def _copy_on_host(
        self,
        plan: Callable[[], CopyPlan],
        parts: Collection[str] | None,
        beside: Callable[[], object],
        paced: PacedCopy | None = None,
    ) -> float:
        """Returns the seconds it took, without those in which it waited for its turn."""
        started = time.perf_counter()
        plan().run(parts, paced, hashed=self.hashes)
        beside()
        return time.perf_counter() - started - (0.0 if paced is None else paced.blocked_seconds)

    @torch.no_grad()
    def copy_beside(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy what a device has, and may change as soon as this has returned, in the order of its current stream."""
        stream = self._stream
        assert stream is not None
        kept = source.clone()
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            target.copy_(kept, non_blocking=True)
        kept.record_stream(stream)

    def arrival(self) -> Arrival | None:
        """Completes with all copies that the device has to make now; None where it makes none.

        Those of weights and moments are on their stream; where these are on the host, those of buffers on the current.
        """
        if self.device is None:
            return None
        with torch.cuda.stream(self._stream):
            return Arrival(self.device)

    def arrives(self, deadline: Deadline) -> bool:
        """Whether the device makes all its copies before the deadline, so that it writes no more into the buffers."""

        def wait() -> None:
            if (arrival := self.arrival()) is not None:
                arrival.wait("its copies", deadline)

        return in_time(wait)

    def finish(self, running: RunningCopy) -> None:
        """Wait until everything is here; on the training thread, before it changes the sources.

        Raises:
            SaveError: the sources have changed.
            Exception: a copy failed. Either way it is not confirmed.
        """
        try:
            running.mark_needed()
            running.result()
            if self.writes.look(forward=False):
                raise SaveError(DISTURBED)
        except BaseException:
            running.confirm(unchanged=False)
            raise
        finally:
            self.writes.end(self)
            self._running = None
        running.confirm(unchanged=True)

    def _take_back(self, on_disturbed: Callable[[], None]) -> None:
        """The running copy is not that of one state; a copy in waits goes on without them."""
        running = self._running  # another thread may finish it
        if running is not None:
            running.confirm(unchanged=False)
            running.hurry()
        on_disturbed()

    def submit(self, work: Callable[..., _Result], *given: Any) -> Future[_Result]:
        """Let the thread do this, after all that it was given before."""
        return self._worker.submit(work, *given)

    def seal(
        self,
        prepare: Callable[[], Publish | None],
        then: Callable[[bool], None] = lambda counts: None,
        copied: RunningCopy | None = None,
    ) -> Future[bool]:
        """Let a complete buffer count, once its copy is confirmed; the future says whether that is so, or may be.

        Args:
            prepare: writes all else into it; None where that failed, and was reported. In the thread.
            then: told whether the buffer counts; in the thread.
            copied: the copy; None: it was confirmed before.
        """
        return self._worker.submit(_seal, prepare, lambda counts: self._in_thread(partial(then, counts)), copied)

    def _in_thread(self, work: Callable[[], object]) -> None:
        """Let the thread do this; at once where it calls itself, so that `settle` waits for it, or has ended."""
        if self._closed or threading.get_ident() == self._thread:
            work()
        else:
            self.submit(work)

    def settle(self) -> None:
        """Wait for what the thread was given, until it is closed; a running copy uses no more waits."""
        if self._closed:
            return
        running = self._running
        if running is not None:
            running.hurry()
        self._worker.submit(lambda: None).result()

    def close(self, *, wait: bool = True) -> None:
        """End the thread, after all that it has to do; do not wait where a device hangs for which it waits."""
        if wait:
            self.settle()  # what that has led to is still accepted
        self._closed = True
        self._worker.shutdown(wait=wait)


def _seal(prepare: Callable[[], Publish | None], then: Callable[[bool], None], copied: RunningCopy | None) -> bool:
    publish = prepare()
    if publish is None:
        then(False)
        return False

    def count(unchanged: bool) -> None:
        if unchanged:
            publish()
        then(unchanged)

    if copied is None:
        count(True)
    else:
        copied.when_confirmed(count)
    return True
