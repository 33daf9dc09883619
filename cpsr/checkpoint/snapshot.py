"""Device to host: the training state is copied into a preallocated buffer while the next forward runs."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from cpsr.checkpoint.boundary import BoundaryBuffers
from cpsr.checkpoint.buffers import HostBuffer, Span, cut, layout_bytes, plan_spans
from cpsr.checkpoint.memory import Kind, MemoryFile, SharedMemory
from cpsr.checkpoint.paced import CopyAccount, CopyPace, PacedCopy, Piece, Split, Waits, copy_on_host
from cpsr.checkpoint.partial import weights_of
from cpsr.checkpoint.shared import Shared
from cpsr.checkpoint.sparse import Sparse
from cpsr.codec import decode, encode
from cpsr.errors import SaveError
from cpsr.state import Shard

__all__ = ["Part", "Snapshot", "SnapshotPool"]

# What a rank contributes to a checkpoint: everything; all but the experts that are carried; to a partial one its
# weights, or those that it wrote before.
Part = Literal["whole", "sparse", "weights", "carried"]

_Source = tuple[int, int, torch.dtype]

logger = logging.getLogger(__name__)

# What is copied at a time where there are waits to copy in: less than a millisecond, so that it ends within short ones.
PIECE_BYTES = 4 << 20
BOUNDARY_SECONDS = 10.0  # for the device to finish a step whose orders it has; launchers kill after 30 s


@dataclass(eq=False)
class Snapshot:
    """One rank's state at one iteration, in host memory.

    Attributes:
        iteration: iteration at which it was taken.
        shard: views into one host buffer; empty until `SnapshotPool.finish` returned.
        scalars: plain data, a copy of its own.
        stall_seconds: how long the training thread was blocked by this snapshot so far.
        copy_seconds: how long the asynchronous copy itself took.
        part: what it holds; nothing was copied, and no buffer is held, where weights are carried.
        split: when its bytes were copied, where the pool copies in waits.
        sparse: which experts are written, where the run's checkpoints are sparse. Those that it says are taken over
            are missing in the shard until the pool has done that, with iterations of their own; it may fail to.
        shared: what other ranks write, where ranks share out what they hold alike.
    """

    iteration: int
    shard: Shard
    scalars: Any = None
    stall_seconds: float = 0.0
    copy_seconds: float = 0.0
    part: Part = "whole"
    split: Split | None = None
    sparse: Sparse | None = None
    shared: Shared | None = None

    @property
    def partial(self) -> bool:
        """Whether it holds weights alone."""
        return self.part in ("weights", "carried")

    @property
    def not_copied(self) -> frozenset[str]:
        """Operators that are not copied from the device."""
        if self.sparse is None or self.partial:
            return frozenset()
        return self.sparse.carried if self.part == "sparse" else self.sparse.taken_over

    @property
    def copied_bytes(self) -> int:
        """Of the weights and moments that were copied from the device; once it is finished."""
        left_out = self.not_copied
        return Shard({name: one for name, one in self.shard.operators.items() if name not in left_out}).state_bytes

    @property
    def is_of_its_iteration(self) -> bool:
        """Whether no operator in it was taken before the rest."""
        return all(one.iteration == self.iteration for one in self.shard.operators.values())

    @property
    def written(self) -> Shard:
        """What of the shard goes into the checkpoint."""
        own = self.shard if self.shared is None else self.shared.own(self.shard)
        return own if self.sparse is None else self.sparse.written(own)

    @property
    def compared(self) -> Shard:
        """What of the shard this rank holds anew at every checkpoint, so that checkpoints can be compared by it."""
        return self.shard if self.sparse is None else self.sparse.without_experts(self.shard)


class SnapshotPool:
    """The triple buffer: the snapshot being taken, the one being persisted, and the recovery buffer.

    `begin` and `finish` belong to the training thread; everything else may be called from any thread.

    Of a snapshot whose experts are not all copied the others are taken over, in the thread of copies, from the newest
    one of the saver's that was complete before, whose buffer is not taken meanwhile. `forget_after` ends that: nothing
    comes from a state that was given up.

    Args:
        template: the shard whose keys, shapes and dtypes every snapshot has.
        buffers: number of host buffers; with three of them one slow write skips no checkpoint yet.
        memory: where they lie in shared memory: whole snapshots then outlive the process, until their buffers are
            taken for newer ones.

    Attributes:
        shared_memory_problem: why they do not lie there after all; None where they do, or were not to.
    """

    def __init__(self, template: Shard, buffers: int = 3, memory: SharedMemory | None = None) -> None:
        self._device = next((tensor.device for _, tensor in template.tensors() if tensor.is_cuda), None)
        self._memory = memory
        self.shared_memory_problem: str | None = None
        self.on_sealed: Callable[[Path, Snapshot], None] | None = None
        self._buffers = self._made(template, buffers)
        self._stream: torch.cuda.Stream | None = None
        self._boundary: torch.cuda.Event | None = None
        self._boundary_buffers = BoundaryBuffers(template.others)
        if self._device is not None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call] # torch's stub has no types
            self._boundary = _event()
        self._held: dict[int, Snapshot] = {}  # index of a buffer that is in use -> its snapshot
        self._sealing: set[int] = set()  # buffers that are being hashed; their snapshots may be released meanwhile
        self._sealed: dict[int, int] = {}  # index of a buffer -> iteration of the whole state in it
        self._mixed: set[int] = set()  # of these, whose experts this pool has taken over from others
        self._source: tuple[int, Snapshot] | None = None  # index and snapshot from which the next one may take over
        self._taking_over: dict[int, tuple[int, Snapshot]] = {}  # index of a buffer -> where its experts come from
        self._filling: int | None = None  # of these, the one for which it is being done
        for index, buffer in enumerate(self._buffers):
            if buffer.memory is not None and buffer.memory.iteration >= 0:
                self._sealed[index] = buffer.memory.iteration
        self._placeholder = Shard({})  # the views of a snapshot are made by the thread that copies it
        self._lock = threading.Lock()
        self._running: tuple[Snapshot, Future[float] | PacedCopy | _DeviceCopy] | None = None
        self._pace: CopyPace | None = None
        self._recovery: Snapshot | None = None
        self._pins = 0
        self._planned: dict[Part, tuple[list[_Source], list[Span]]] = {}  # the spans of the shard seen last
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="cpsr-snapshot")

    @staticmethod
    def required_bytes(template: Shard, buffers: int = 3) -> int:
        """Host memory that a pool of this template takes."""
        return layout_bytes(template) * buffers

    @property
    def recovery(self) -> Snapshot | None:
        """The newest durable or restored state, None while there is none."""
        return self._recovery

    @property
    def copy_account(self) -> CopyAccount | None:
        """What the copies of all snapshots so far amounted to; None where they wait for nothing."""
        return None if self._pace is None else self._pace.account

    @property
    def source_iteration(self) -> int | None:
        """Of the snapshot from which one that begins now could take experts over; None where there is none."""
        source = self._source
        return None if source is None else source[1].iteration

    def copy_in(self, waits: Waits) -> None:
        """From now on copy what fits while the training thread waits, and the rest, as before, beside its work.

        For state on the host. What is copied from a GPU is given whole to a stream of its own, whose copies the device
        runs beside its kernels.
        """
        self._pace = CopyPace(waits)

    def begin(
        self,
        shard: Shard,
        iteration: int,
        scalars: Any,
        part: Part = "whole",
        sparse: Sparse | None = None,
        shared: Shared | None = None,
    ) -> Snapshot | None:
        """Start to copy the state; weights and moments must not change before `finish`.

        Args:
            shard: the engine's views, with the template's keys, shapes and dtypes.
            iteration: iteration that the state belongs to.
            scalars: plain data (see `cpsr.codec.encode`), copied before this returns, as are `shard.others`.
            part: `weights` leaves moments and buffers out, `sparse` the experts that are carried.
            sparse: which experts are written, and which are copied for a `whole` one: all where `source_iteration` is
                none, or no other buffer is free than that one's.
            shared: what other ranks write.

        Returns:
            The snapshot, not complete yet; None when every buffer is in use: this checkpoint is to be skipped.

        Raises:
            SaveError: the shard differs from the template, or the snapshot before was not finished.
            UnsupportedEngineError: the scalars hold an object that is not plain data.
        """
        started = time.perf_counter()
        if self._running is not None:
            raise SaveError(f"the snapshot of iteration {self._running[0].iteration} was not finished before the next")
        copied = decode(*encode(scalars))
        held = self._take(iteration)
        if held is None:
            return None
        buffer, snapshot = held
        try:
            snapshot.scalars, snapshot.part, snapshot.sparse, snapshot.shared = copied, part, sparse, shared
            self._reserve_source(snapshot)
            if not snapshot.partial:
                buffer.copy_others(shard)
            self._running = (snapshot, self._start(buffer, snapshot, shard))
        except BaseException:
            self._free(snapshot)
            raise
        snapshot.stall_seconds = time.perf_counter() - started
        return snapshot

    def finish(self) -> Snapshot | None:
        """Wait for the running copy; call it before the optimizer changes the state.

        Returns:
            The complete snapshot, None when none was running.

        Raises:
            SaveError: the copy failed; the buffer is free again and training can go on.
        """
        if self._running is None:
            return None
        started = time.perf_counter()
        snapshot, copy = self._running
        self._running = None
        try:
            snapshot.copy_seconds = copy.result()
            if isinstance(copy, PacedCopy):
                snapshot.split = copy.split
        except Exception as error:
            self._free(snapshot)
            raise SaveError(f"the snapshot of iteration {snapshot.iteration} failed: {error}") from error
        self._complete_later(snapshot)
        self.seal(snapshot)
        snapshot.stall_seconds += time.perf_counter() - started
        return snapshot

    def seal(self, snapshot: Snapshot, kind: Kind = "snapshot") -> "Future[None] | None":
        """Let a whole snapshot outlive the process, from when the returned future is done; None without shared memory.

        Its tensors and scalars must not change any more. What was restored with experts of other iterations, or has
        taken some over, is said to be `mixed`.
        """
        with self._lock:
            index = self._index(snapshot)
            if self._buffers[index].memory is None or snapshot.part != "whole":
                return None
            self._sealing.add(index)
        return self._worker.submit(self._seal, index, snapshot, kind)

    def mark_boundary(self) -> None:
        """A step is complete: keeps what `dump` needs and the next forward changes. On the training thread."""
        self._boundary_buffers.keep()
        if self._boundary is not None:
            self._boundary.record()

    def dump(self, shard: Shard, iteration: int, scalars: Any) -> None:
        """Copy the state into shared memory at once, since this rank is about to leave; from any thread.

        The training thread stands still, or is held back from the next update. A buffer in use by the recovery is
        taken where no other is free: that state is on the disk.

        Args:
            shard: the engine's views at a step boundary.
            iteration: of the last complete step.
            scalars: plain data to go with it.

        Raises:
            SaveError: there is no shared memory, no free buffer, or a value of the boundary is not known.
        """
        if self._memory is None or self.shared_memory_problem is not None:
            raise SaveError(f"there is no shared memory ({self.shared_memory_problem or 'it is turned off'})")
        running = self._running
        if running is not None and running[0].iteration == iteration and not running[0].not_copied:
            # It is that state, with all its scalars. The training thread goes on to finish and to submit it, if it can.
            running[1].result()
            self.seal(running[0])
        with self._lock:  # no snapshot takes experts over from now on: the buffer that has them may be needed
            self._source = None
            self._taking_over = {i: one for i, one in self._taking_over.items() if i == self._filling}
        self._settle()
        if iteration in [sealed for index, sealed in list(self._sealed.items()) if index not in self._mixed]:
            return
        copied = decode(*encode(scalars))
        others = Shard({}, self._boundary_buffers.at_boundary(shard.others))  # before a buffer is given up for it
        held = self._take(iteration) or self._take_recovery(iteration)
        if held is None:
            raise SaveError("every host buffer is in use")
        buffer, snapshot = held
        snapshot.scalars = copied
        try:
            if self._stream is None:
                buffer.copy_others(others)
                self._complete(buffer, snapshot, shard, copy_on_host)
            else:
                copy = _DeviceCopy(self._stream, shard, self._boundary)
                copy.prepare(lambda: buffer.copy_others(others))
                self._complete(buffer, snapshot, shard, copy.enqueue)
                copy.result()
            sealed = self.seal(snapshot, "departure")
            assert sealed is not None
            sealed.result()
        finally:
            self._free(snapshot)

    def forget_after(self, iteration: int) -> None:
        """Snapshots of later iterations count no more: the run has gone back behind them."""
        with self._lock:
            self._source = None
        self._settle()
        with self._lock:
            later = [index for index, sealed in self._sealed.items() if sealed > iteration]
        for index in later:
            self._unseal(index)

    def acquire(self, iteration: int, spare: Collection[str] = ()) -> Snapshot | None:
        """An empty snapshot to load a state into, None when every buffer is in use.

        Args:
            iteration: of that state.
            spare: names of the files in shared memory whose buffers are taken last: those that may be loaded. Another
                one may hold the same iteration, as an earlier life left it.
        """
        held = self._take(iteration, spare)
        if held is None:
            return None
        held[1].shard = held[0].shard_at(iteration)
        return held[1]

    def keep(self, snapshot: Snapshot) -> None:
        """Make this the recovery buffer and free the one before; while pinned the new one is freed instead."""
        with self._lock:
            self._index(snapshot)
            if self._pins and snapshot is not self._recovery:
                del self._held[self._index(snapshot)]
                return
            if self._recovery is not None and self._recovery is not snapshot:
                del self._held[self._index(self._recovery)]
            self._recovery = snapshot

    def release(self, snapshot: Snapshot) -> None:
        """Free the snapshot's buffer.

        Raises:
            ValueError: it is not in use (released twice), its copy is still running, or it is the pinned recovery.
        """
        with self._lock:
            if self._running is not None and self._running[0] is snapshot:
                raise ValueError(f"finish() the snapshot of iteration {snapshot.iteration} before releasing it")
            if snapshot is self._recovery:
                if self._pins:
                    raise ValueError(f"the recovery buffer (iteration {snapshot.iteration}) is pinned")
                self._recovery = None
            del self._held[self._index(snapshot)]

    def pin(self) -> None:
        """Hold the recovery buffer as it is until `unpin`; calls nest."""
        with self._lock:
            self._pins += 1

    def unpin(self) -> None:
        """Undo one `pin`; ValueError without one."""
        with self._lock:
            if not self._pins:
                raise ValueError("unpin() without pin()")
            self._pins -= 1

    def close(self, *, remove: bool = True) -> None:
        """Wait for a running copy and end the worker thread.

        Args:
            remove: nothing stays in shared memory; else it stays for the next life.
        """
        self._hurry()
        self._worker.shutdown(wait=True)
        for buffer in self._buffers:
            if buffer.memory is not None:
                buffer.memory.close(remove=remove)

    def _settle(self) -> None:
        """Wait for what is being sealed."""
        self._hurry()
        self._worker.submit(lambda: None).result()

    def _hurry(self) -> None:
        """Let a running copy wait for nothing any more."""
        running = self._running
        if running is not None and isinstance(running[1], PacedCopy):
            running[1].hurry()

    def _made(self, template: Shard, count: int) -> list[HostBuffer]:
        """The buffers; in the process's own memory where there is too little that is shared."""
        pinned = self._device is not None
        if self._memory is not None:
            files: list[MemoryFile] = []
            try:
                files = self._memory.files(count, layout_bytes(template))
                return [HostBuffer(template, pinned=pinned, memory=file) for file in files]
            except (OSError, SaveError) as error:
                self.shared_memory_problem = str(error)
                for file in files:
                    file.close(remove=file.iteration < 0)  # what an earlier process held is still good to restart from
        return [HostBuffer(template, pinned=pinned) for _ in range(count)]

    def _take(self, iteration: int, spare: Collection[str] = ()) -> tuple[HostBuffer, Snapshot] | None:
        """A free buffer: one that holds nothing, or else the oldest state, so that the newest stay the longest."""
        with self._lock:
            used = {*self._held, *self._sealing, *self._taking_over, *(i for i, _ in self._taking_over.values())}
            free = [i for i in range(len(self._buffers)) if i not in used]
            if not free:
                return None
            source = -1 if self._source is None else self._source[0]
            index = min(free, key=lambda i: (self._file_name(i) in spare, i == source, self._sealed.get(i, -1)))
            self._hold(index, iteration)
        self._unseal(index)
        return self._buffers[index], self._held[index]

    def _take_recovery(self, iteration: int) -> tuple[HostBuffer, Snapshot] | None:
        with self._lock:
            if self._recovery is None or self._pins:
                return None
            index, self._recovery = self._index(self._recovery), None
            self._hold(index, iteration)
        self._unseal(index)
        return self._buffers[index], self._held[index]

    def _file_name(self, index: int) -> str:
        memory = self._buffers[index].memory
        return "" if memory is None else memory.path.name

    def _hold(self, index: int, iteration: int) -> None:
        """Begin a snapshot in this buffer; with the lock held."""
        if self._source is not None and self._source[0] == index:
            self._source = None
        self._held[index] = Snapshot(iteration, self._placeholder)

    def _reserve_source(self, snapshot: Snapshot) -> None:
        """Keep the buffer from which a snapshot takes experts over; without one it copies them all."""
        if snapshot.part != "whole" or not snapshot.not_copied:
            return
        with self._lock:
            if self._source is not None:
                self._taking_over[self._index(snapshot)] = self._source
                return
        assert snapshot.sparse is not None
        snapshot.sparse = replace(snapshot.sparse, copied=None)

    def _complete_later(self, snapshot: Snapshot) -> None:
        """Have the experts taken over that were not copied; the next snapshot may then take over from this one.

        Both are asked for in the order of the snapshots, and one thread does them in this order.
        """
        if snapshot.part != "whole" or snapshot.sparse is None:
            return
        with self._lock:
            index = self._index(snapshot)
            self._source = index, snapshot
        if snapshot.not_copied:
            self._worker.submit(self._take_over, index, snapshot)

    def _take_over(self, index: int, snapshot: Snapshot) -> None:
        with self._lock:
            found = self._taking_over.get(index)
            self._filling = index
        try:
            if found is None:
                raise SaveError("the snapshot that has them was given up")
            wanted, older = snapshot.not_copied, found[1].shard.operators
            if missing := wanted - older.keys():
                raise SaveError(f"that of iteration {found[1].iteration} lacks {min(missing)}")
            buffer = self._buffers[index]
            spans = plan_spans(buffer, found[1].shard, left_out=older.keys() - wanted)
            copy_on_host(buffer.pairs(spans))
            own = snapshot.shard.operators
            snapshot.shard = buffer.shard({name: own.get(name, one).iteration for name, one in older.items()})
        except Exception as error:  # noqa: BLE001 - what was copied is whole, and is written to the disk
            logger.warning(
                "iteration %d is not whole in host memory, since experts could not be taken over: %s",
                snapshot.iteration,
                error,
            )
            with self._lock:
                if self._source is not None and self._source[1] is snapshot:
                    self._source = None
        finally:
            with self._lock:
                self._taking_over.pop(index, None)
                self._filling = None

    def _seal(self, index: int, snapshot: Snapshot, kind: Kind) -> None:
        memory, shared = self._buffers[index].memory, self._memory
        assert memory is not None
        assert shared is not None
        try:
            if snapshot.not_copied - snapshot.shard.operators.keys():
                return  # as was said when experts could not be taken over
            if kind == "snapshot" and not snapshot.is_of_its_iteration:
                kind = "mixed"
            memory.seal(
                shared.rank,
                shared.life,
                kind,
                snapshot.shard,
                snapshot.iteration,
                snapshot.scalars,
                branch=shared.branch,
            )
            self._sealed[index] = snapshot.iteration
            if snapshot.not_copied:
                self._mixed.add(index)
            if kind != "departure" and self.on_sealed is not None:
                self.on_sealed(memory.path, snapshot)
        except Exception as error:  # noqa: BLE001 - the snapshot itself is whole, and is written to the disk
            logger.warning("iteration %d is not held in shared memory: %s", snapshot.iteration, error)
        finally:
            with self._lock:
                self._sealing.discard(index)

    def _unseal(self, index: int) -> None:
        memory = self._buffers[index].memory
        if memory is not None:
            memory.unseal()
        self._sealed.pop(index, None)
        self._mixed.discard(index)

    def _free(self, snapshot: Snapshot) -> None:
        with self._lock:
            index = self._index(snapshot)
            self._taking_over.pop(index, None)
            del self._held[index]

    def _index(self, snapshot: Snapshot) -> int:
        for index, held in self._held.items():
            if held is snapshot:
                return index
        raise ValueError(f"the snapshot of iteration {snapshot.iteration} holds no buffer of this pool")

    def _start(self, buffer: HostBuffer, snapshot: Snapshot, shard: Shard) -> "Future[float] | PacedCopy | _DeviceCopy":
        if self._stream is None and self._pace is not None:
            paced = PacedCopy(self._pace)
            self._worker.submit(paced.run, lambda: self._pieces(buffer, snapshot, shard))
            return paced
        if self._stream is None:
            return self._worker.submit(self._copy_on_host, buffer, snapshot, shard)
        copy = _DeviceCopy(self._stream, shard)
        self._complete(buffer, snapshot, shard, copy.enqueue)
        return copy

    def _copy_on_host(self, buffer: HostBuffer, snapshot: Snapshot, shard: Shard) -> float:
        started = time.perf_counter()
        self._complete(buffer, snapshot, shard, copy_on_host)
        return time.perf_counter() - started

    def _pieces(self, buffer: HostBuffer, snapshot: Snapshot, shard: Shard) -> list[Piece]:
        """What `_copy_on_host` copies, in pieces."""
        spans = self._spans(buffer, snapshot, shard)
        snapshot.shard = _held(buffer, snapshot, shard)
        return list(buffer.pairs(cut(spans, PIECE_BYTES)))

    def _complete(
        self,
        buffer: HostBuffer,
        snapshot: Snapshot,
        shard: Shard,
        copy: Callable[[Iterator[Piece]], None],
    ) -> None:
        copy(buffer.pairs(self._spans(buffer, snapshot, shard)))
        snapshot.shard = _held(buffer, snapshot, shard)

    def _spans(self, buffer: HostBuffer, snapshot: Snapshot, shard: Shard) -> list[Span]:
        part = snapshot.part
        if snapshot.not_copied:  # other experts each time
            return plan_spans(buffer, shard, left_out=snapshot.not_copied)
        sources = [(tensor.data_ptr(), tensor.numel(), tensor.dtype) for _, tensor in shard.tensors()]
        if part not in self._planned or sources != self._planned[part][0]:
            self._planned[part] = (sources, plan_spans(buffer, shard, weights_only=part == "weights"))
        return self._planned[part][1]


def _held(buffer: HostBuffer, snapshot: Snapshot, shard: Shard) -> Shard:
    """The buffer's views of what the snapshot holds."""
    left_out = snapshot.not_copied
    held = buffer.shard({name: one.iteration for name, one in shard.operators.items() if name not in left_out})
    return weights_of(held) if snapshot.partial else held


class _DeviceCopy:
    """Copies on a stream of their own, after everything that the current stream was given so far.

    Args:
        stream: for the copies.
        shard: the sources.
        after: what to wait for instead of the current stream, which may never come to its end.
    """

    def __init__(self, stream: torch.cuda.Stream, shard: Shard, after: torch.cuda.Event | None = None) -> None:
        self._stream = stream
        self._after = after
        self._shard = shard  # keeps the sources alive until the copy is through
        self._start = _event()
        self._end = _event()

    def enqueue(self, pairs: Iterator[Piece]) -> None:
        if self._after is None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        else:
            self._stream.wait_event(self._after)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            self._start.record(self._stream)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self._end.record(self._stream)

    def prepare(self, copy_more: Callable[[], None]) -> None:
        """Copy something else first, in the same order.

        Raises:
            SaveError: what is to be waited for does not come: the device hangs in the step before.
        """
        assert self._after is not None
        deadline = time.monotonic() + BOUNDARY_SECONDS
        while not self._after.query():  # type: ignore[no-untyped-call] # torch's stub has no types
            if time.monotonic() > deadline:
                raise SaveError(f"the device has not come to the end of the step within {BOUNDARY_SECONDS:g} s")
            time.sleep(BOUNDARY_SECONDS / 1000)
        with torch.cuda.stream(self._stream):
            copy_more()

    def result(self) -> float:
        """Wait; the seconds that the copy took on the device."""
        self._end.synchronize()
        milliseconds: float = self._start.elapsed_time(self._end)
        return milliseconds / 1000.0


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch's stub has no types
