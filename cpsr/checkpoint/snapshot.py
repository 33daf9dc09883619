"""Snapshots of the training state: copied into preallocated host buffers while the next forward runs."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.boundary import DISTURBED, BoundaryBuffers, EarlierStep
from cpsr.checkpoint.buffers import close_buffers, make_buffers
from cpsr.checkpoint.copying import CopyEngine, CopyPlan, Publish
from cpsr.checkpoint.device import DeviceSteps
from cpsr.checkpoint.host_snapshot import WHOLE, Contents, Snapshot
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_states import Kind
from cpsr.checkpoint.occupancy import Occupancy
from cpsr.checkpoint.replicated import Replicas, state_hash
from cpsr.checkpoint.running_copy import RunningCopy
from cpsr.errors import SaveError, UnsupportedEngineError
from cpsr.state.codec import SCALARS, SmallState, encode
from cpsr.state.device_values import Deadline, to_host
from cpsr.state.frozen_parameters import FrozenWeights
from cpsr.state.shard import Shard

__all__ = ["Snapshot", "SnapshotPool"]

logger = logging.getLogger(__name__)

# In an emergency dump, for the device to do what it still can; launchers kill after 30 s.
BOUNDARY_SECONDS = 10.0
# Share of it for the running snapshot: behind a step that hangs it never completes.
RUNNING_SHARE = 0.5
# For a copy under way at the end of a life; after a dump that failed, the launcher's 30 s are half over.
CLOSE_SECONDS = 5.0


class SnapshotPool:
    """Host buffers for snapshots: one is filled, one holds the newest state, one is written, in any order.

    `begin` and `finish` belong to the training thread; everything else may be called from any thread.

    Args:
        template: the shard whose keys, shapes and dtypes every snapshot has.
        buffers: number of host buffers; with three, one slow write skips no checkpoint.
        memory: shared memory for them: whole snapshots then survive the process, until newer ones reuse their
            buffers.
        units: operator -> its part, for operators that a snapshot for host memory alone may leave out; see `Parts`.

    Attributes:
        shared_memory_problem: why they are not in shared memory; None where they are, or were not meant to be.
        engine: makes the copies, and seals them.
        steps: of the device.
        occupancy: which snapshot has which buffer.
        shares: whether ranks may leave copies to each other; no more once the device had no memory to compare them.
        obstacle: why the engine's state is not whole, so that no snapshot of it is taken; None where it is.
        on_sealed: called with file and iteration of each snapshot that counts from now on; in the engine's thread.
        on_counting: called once each of these is among those that this rank holds; likewise.

    Raises:
        UnsupportedEngineError: the template has tensors on several CUDA devices.
    """

    def __init__(
        self,
        template: Shard,
        buffers: int = 3,
        memory: SharedMemory | None = None,
        units: Mapping[str, str] | None = None,
    ) -> None:
        self.engine = CopyEngine.of("snapshot", template)
        device = self.engine.device
        self.steps = DeviceSteps(device)
        self._memory = memory
        self._buffers, self.shared_memory_problem = make_buffers(template, buffers, memory, device, units or {})
        files = [buffer.memory for buffer in self._buffers]
        self.occupancy = Occupancy(("", None) if file is None else (file.path.name, file.left) for file in files)
        self.engine.hashes &= self.survives  # else nobody asks for the hashes
        self.on_sealed: Callable[[Path, int], None] | None = None
        self.on_counting: Callable[[], None] = lambda: None
        self.obstacle: str | None = None
        self._boundary_buffers = BoundaryBuffers(template.others)
        self._replicas, self.shares = Replicas(), True
        self._newest: Snapshot | None = None  # from which the next one takes parts
        self._running: tuple[Snapshot, RunningCopy] | None = None
        self._late: list[tuple[Snapshot, RunningCopy]] = []  # of dumps that the device did not complete in time

    @property
    def survives(self) -> bool:
        """Whether its snapshots survive the process."""
        return self._memory is not None and self.shared_memory_problem is None

    @property
    def running(self) -> Snapshot | None:
        """The snapshot that is being copied."""
        return None if self._running is None else self._running[0]

    def begin(
        self,
        shard: Shard,
        iteration: int,
        scalars: Any,
        contents: Contents = WHOLE,
        *,
        disk: bool = True,
    ) -> Snapshot | None:
        """Start to copy the state; weights and moments should not change before `finish`.

        If the loop has ever changed them meanwhile, the copy is complete when this returns.

        Args:
            shard: the engine's views, with the template's keys, shapes and dtypes.
            iteration: iteration that the state belongs to.
            scalars: plain data (see `SmallState`). It may change once this has returned, and so may `shard.others`; a
                GPU copies both in the order of the stream on which the last step lies.
            contents: what is copied of each operator, and where on the disk it is written.
            disk: whether it will be written; a snapshot for host memory alone overwrites no state that a restart may
                need.

        Returns:
            The incomplete snapshot; None when no buffer is free: skip it.

        Raises:
            SaveError: the snapshot before was not finished.
            UnsupportedEngineError: the shard differs from the template, or the scalars are not plain data.
        """
        started = time.perf_counter()
        if self.obstacle is not None:
            raise SaveError(self.obstacle)
        if self._running is not None:
            raise SaveError(f"the snapshot of iteration {self._running[0].iteration} was not finished before the next")
        with self.steps.after_step():
            small = SmallState(scalars)
            carried = () if disk else contents.carried
            left = contents.left or ()
            snapshot = self._take(iteration, carried, left=left, keep_newest=not disk, due=self.survives)
            if snapshot is None:
                return None
            snapshot.contents, snapshot.disk = contents, disk
            try:
                self._start(snapshot, shard, small)
            except torch.OutOfMemoryError as error:
                self._give_up(snapshot)
                self.shares = False
                why = str(error).partition(". ")[0]
                raise SaveError(
                    f"the device has no memory to compare what ranks share ({why}); they stop that"
                ) from None
            except BaseException:
                self._give_up(snapshot)
                raise
        self._newest = snapshot
        snapshot.overlap_seconds = -time.perf_counter()
        snapshot.stall_seconds = time.perf_counter() - started
        return snapshot

    def _start(self, snapshot: Snapshot, shard: Shard, small: SmallState) -> None:
        buffer = self._buffers[snapshot.place]
        buffer.copy_others(shard)
        snapshot.shard, snapshot.scalars = partial(buffer.shard_of_parts, snapshot.taken_at), small.tree
        snapshot.encoded = small.encoded
        plan = partial(self._plan, snapshot, shard)
        copy = self.engine.start(
            plan,
            small,
            shard,
            snapshot.copied_parts,
            thorough=snapshot.disk,
            on_disturbed=partial(self._unseal, snapshot),
            beside=partial(self._look_at_replicas, snapshot, shard),
        )
        self._running = snapshot, copy
        if self.engine.copies_in_order:
            self.seal(snapshot, copied=copy)

    def _look_at_replicas(self, snapshot: Snapshot, shard: Shard) -> None:
        """While the state is that of the snapshot."""
        contents, parts = snapshot.contents, self._buffers[snapshot.place].held.parts
        if contents.left is None:
            return
        snapshot.samples = self._replicas.samples(shard, parts)
        if not snapshot.disk:
            return
        if self.engine.copies_weights_on_device:
            taken = contents.replicated.keys() - contents.carried
            snapshot.state_hashes = self._replicas.checksums(shard, parts, taken)
        else:
            left = contents.left - contents.carried
            snapshot.state_hashes = {name: state_hash(shard.operators[name]) for name in left}
        if snapshot.lacking and (moments := contents.without_experts(shard).second_moments()) is not None:
            snapshot.second_moments = to_host(moments)

    def _plan(self, snapshot: Snapshot, shard: Shard) -> CopyPlan:
        """Where the copies are made."""
        buffer = self._buffers[snapshot.place]
        return self.engine.plan(buffer.held, shard, partial(buffer.pairs, shard))

    def finish(self) -> Snapshot | None:
        """Wait for the running copy; call it before the optimizer changes the state.

        Returns:
            The complete snapshot, None when none was running.

        Raises:
            SaveError: the copy failed; the buffer is free again and training can go on.
            UnsupportedEngineError: the state has other tensors than the template; likewise.
        """
        if self._running is None:
            return None
        started = time.perf_counter()
        snapshot, running = self._running
        self._running = None
        try:
            self.engine.finish(running)
        except Exception as error:
            self._unseal(snapshot)
            self._give_up(snapshot)
            if isinstance(error, UnsupportedEngineError):
                raise
            raise SaveError(f"the snapshot of iteration {snapshot.iteration} failed: {error}") from error
        self.occupancy.copied(snapshot)
        snapshot.copy_seconds = running.seconds
        snapshot.overlap_seconds = running.overlap_seconds(snapshot.overlap_seconds + started)
        self.seal(snapshot)
        snapshot.stall_seconds += running.stall_seconds(time.perf_counter() - started)
        return snapshot

    def look(self) -> None:
        """A forward begins: copies of weights that the loop has changed for it, windows too, count no more."""
        self.engine.writes.look()

    def _unseal(self, snapshot: Snapshot) -> None:
        """Its copy is not that of one state."""
        if snapshot.sealed is not None:
            snapshot.sealed.result()  # a copy on the host
            self._buffers[snapshot.place].unseal()
            self.occupancy.forget(snapshot)

    def seal(
        self, snapshot: Snapshot, kind: Kind = "snapshot", copied: RunningCopy | None = None
    ) -> "Future[bool] | None":
        """Make a whole snapshot survive the process; the future says whether it does. None without shared memory.

        A snapshot is sealed once. Its tensors and scalars must not change any more.

        Args:
            snapshot: a complete one.
            kind: of the state.
            copied: a copy that this thread's worker completes before; its scalars are those of the snapshot.
        """
        if snapshot.sealed is None and self.survives:
            self.occupancy.begin_seal(snapshot)
            prepare = partial(self._prepare, snapshot, kind, copied)
            snapshot.sealed = self.engine.seal(prepare, partial(self._sealed, snapshot, kind), copied)
        return snapshot.sealed

    def _prepare(self, snapshot: Snapshot, kind: Kind, copied: RunningCopy | None) -> Publish | None:
        """In the engine's thread: carry over what the snapshot has left out, and describe all of it."""
        buffer = self._buffers[snapshot.place]
        file, held = buffer.memory, buffer.held
        assert file is not None
        try:
            if copied is not None:
                copied.result()
            if not snapshot.taken_at:  # it was loaded, not copied
                held.fill_loaded(snapshot.shard, snapshot.iteration)
                snapshot.taken_at = dict(held.taken_at)
            held.fill(snapshot.copied_parts, snapshot.iteration)
            if snapshot.source is not None:
                held.carry(snapshot.taken_at, self._buffers[snapshot.source].held)
            encoded = encode(snapshot.scalars, prefix=SCALARS) if snapshot.encoded is None else snapshot.encoded
            publish = file.prepare(kind, buffer.views, snapshot.iteration, encoded, held=held, samples=snapshot.samples)
            snapshot.hashed = held.by_address()
        except Exception as error:  # noqa: BLE001 - the snapshot itself is whole, and is written to the disk
            logger.warning("iteration %d is not held in shared memory: %s", snapshot.iteration, error)
            return None
        return publish

    def _sealed(self, snapshot: Snapshot, kind: Kind, counts: bool) -> None:
        """In the engine's thread: it can be restarted from now on, or never; nobody overwrites its buffer meanwhile."""
        buffer = self._buffers[snapshot.place]
        if not counts:
            self._newest = None
            buffer.held.overwrite(buffer.held.parts.names)  # its iteration may be tried again
        elif kind != "departure" and self.on_sealed is not None and buffer.memory is not None:
            try:
                self.on_sealed(buffer.memory.path, snapshot.iteration)
            except Exception as error:  # noqa: BLE001 - other machines lack it; this one has it
                logger.warning("iteration %d is not replicated: %s", snapshot.iteration, error)
        self.occupancy.end_seal(snapshot, sealed=counts)
        if counts and kind != "departure":
            self.on_counting()

    def mark_boundary(self) -> torch.cuda.Event | None:
        """Keep, at a step boundary, the values for `dump` that the next forward changes. On the training thread.

        Returns:
            The event that a GPU reaches once the step is complete there; None on the host.
        """
        self._boundary_buffers.keep()
        return self.steps.mark_boundary()

    def dump(
        self,
        shard: Callable[[], Shard],
        iteration: int,
        scalars: Callable[[], Any],
        earlier: Callable[[], EarlierStep | None] = lambda: None,
        frozen: FrozenWeights | None = None,
    ) -> int:
        """Copy the state into shared memory at once, for an emergency dump; from any thread.

        The training thread is stopped, or is kept from the next update. The device has `BOUNDARY_SECONDS` for all of
        it, so that a kernel that hangs, as those of a broken group do, keeps no rank from leaving.

        Args:
            shard: the engine's views at a step boundary; called once the device has finished that step.
            iteration: of the last complete step.
            scalars: plain data to go with it, see `SmallState`; called likewise.
            earlier: the last step that the device has completed; used where it hangs in a later one.
            frozen: parameters outside the optimizer; those that have moved go with the small state.

        Returns:
            The iteration of the state.

        Raises:
            SaveError: no shared memory, no free buffer, an unknown value of the boundary, or a device that hangs.
        """
        if self._memory is None or self.shared_memory_problem is not None:
            raise SaveError(f"there is no shared memory ({self.shared_memory_problem or 'it is turned off'})")
        if self.obstacle is not None:
            raise SaveError(f"{self.obstacle}, which stays in host memory")
        deadline = Deadline(BOUNDARY_SECONDS)
        self._seal_running(iteration, deadline.part(RUNNING_SHARE))
        self.settle()
        if iteration in self.occupancy.whole_iterations:
            return iteration
        if self.engine.writes.disturbed:
            raise SaveError(f"{DISTURBED}; {self._kept()}")
        snapshot, choice = None, earlier
        try:
            while snapshot is None:
                with self.steps.at_boundary(deadline, choice) as step:
                    if step is not None and step.iteration in self.occupancy.whole_iterations:
                        return step.iteration
                    views = shard()
                    tree = scalars() if step is None else step.scalars
                    small = SmallState(tree if frozen is None else {**tree, "frozen": self._moved(frozen, step)})
                    snapshot = self._copied(views, iteration, small, deadline, step)
                choice = lambda: None  # noqa: E731 - the device was only slow
        # After an error of a kernel every call of CUDA fails.
        except (SaveError, UnsupportedEngineError, RuntimeError) as error:
            raise SaveError(f"{error}; {self._kept()}") from error
        try:
            sealed = self.seal(snapshot, "departure")
            assert sealed is not None
            sealed.result()
        finally:
            self.occupancy.release(snapshot)
        return snapshot.iteration

    def watch(self, frozen: Mapping[str, torch.Tensor]) -> None:
        """Keep the values of these parameters at each step boundary, too, since they are written to."""
        self._boundary_buffers.watch(frozen)

    def _moved(self, frozen: FrozenWeights, step: EarlierStep | None) -> dict[str, Any]:
        if not frozen.tensors:
            return {}
        moved = {name: frozen.tensors[name] for name in frozen.moved()}
        word = frozen.word_without(tuple(moved))
        return {"word": word, "moved": self._boundary_buffers.at_boundary(moved, step)}

    def _seal_running(self, iteration: int, deadline: Deadline) -> None:
        """Use the running snapshot, if it is this state: it has all scalars. Take back what the loop has disturbed."""
        running = self._running
        if running is not None and (running[0].iteration != iteration or running[0].source is not None):
            running = None
        try:
            if running is not None:
                running[1].result(deadline)
            # For others the device is not waited for: it may hang, and the dump needs the time.
            if self.engine.writes.look(forward=False, deadline=deadline, wait=running is not None) or running is None:
                return
        except (SaveError, RuntimeError) as error:  # after an error of a kernel every call of CUDA fails
            logger.warning("no copy that is under way is used for the dump of iteration %d: %s", iteration, error)
            return
        snapshot, copy = running
        copy.confirm(unchanged=True)
        self.seal(snapshot)  # The training thread finishes and submits it, if it can.

    def _copied(
        self, shard: Shard, iteration: int, small: SmallState, deadline: Deadline, step: EarlierStep | None
    ) -> Snapshot | None:
        """A complete snapshot of a whole state; None where the device has left that step during the copy."""
        if step is not None:
            shard, iteration = step.views(shard), step.iteration
        others = self._boundary_buffers.at_boundary(shard.others, step)  # before it takes a buffer
        snapshot = self._take(iteration, keep_newest=True)  # a dump may fail
        if snapshot is None:
            raise SaveError("every host buffer is in use, or has a snapshot that all ranks may need")
        try:
            buffer = self._buffers[snapshot.place]
            buffer.copy_others(Shard({}, others))
            snapshot.shard, snapshot.scalars = partial(buffer.shard_of_parts, snapshot.taken_at), small.tree
            running = self.engine.copy_now(partial(self._plan, snapshot, shard), small)
        except BaseException:
            self.occupancy.release(snapshot)
            raise
        try:
            running.result(deadline)
        except BaseException:
            self._late.append((snapshot, running))  # the device may still write there
            raise
        if step is not None and step.overtaken():
            self.occupancy.release(snapshot)
            return None
        return snapshot

    def _kept(self) -> str:
        """What a restart finds in host memory nevertheless."""
        sealed = self.occupancy.sealed_iterations
        if not sealed:
            return "host memory has no snapshot of this rank"
        return f"host memory keeps the snapshot of iteration {max(sealed)}"

    def forget_after(self, iteration: int) -> None:
        """Invalidate snapshots of later iterations: the run has gone back behind them."""
        self.settle()
        self._newest = None
        for buffer in self._buffers:  # of iterations that come again none holds a part
            buffer.held.overwrite(buffer.held.parts.names)
        for index in self.occupancy.unseal_after(iteration):
            self._buffers[index].unseal()

    def acquire(self, iteration: int, spare: Collection[str] = (), *, keep_newest: bool = False) -> Snapshot | None:
        """An empty snapshot to load a state into, None when every buffer is in use.

        Args:
            iteration: of that state.
            spare: names of files in shared memory whose buffers are used last: the states that may be loaded. Another
                file of an earlier life may hold the same iteration.
            keep_newest: take no buffer whose state a kill needs now.
        """
        snapshot = self._take(iteration, spare=spare, keep_newest=keep_newest)
        if snapshot is not None:
            snapshot.shard = self._buffers[snapshot.place].shard_at(iteration)
            snapshot.taken_at = {}  # told by what is loaded
        return snapshot

    def release(self, snapshot: Snapshot) -> None:
        """Free the snapshot's buffer, where a sealed state stays until it is overwritten.

        Raises:
            ValueError: it is not in use (released twice), or its copy is still running.
        """
        if self._running is not None and self._running[0] is snapshot:
            raise ValueError(f"finish() the snapshot of iteration {snapshot.iteration} before releasing it")
        self.occupancy.release(snapshot)

    def close(self, *, remove: bool = True) -> None:
        """Wait for a running copy and end the worker thread.

        A buffer into which a device that hangs may still copy stays mapped, pinned and locked until the process ends.

        Args:
            remove: remove all from shared memory; else it stays for the next life.
        """
        self.engine.close()
        deadline = Deadline(CLOSE_SECONDS)
        copies = [*self._late, *([] if self._running is None else [self._running])]
        in_flight = {snapshot.place for snapshot, copy in copies if not copy.arrives(deadline)}
        close_buffers(self._buffers, self.engine.device, in_flight, remove=remove)

    def settle(self) -> None:
        """Wait for running seals."""
        self.engine.settle()

    def _take(
        self,
        iteration: int,
        left_out: Collection[str] = (),
        spare: Collection[str] = (),
        *,
        left: Collection[str] = (),
        keep_newest: bool = False,
        due: bool = False,
    ) -> Snapshot | None:
        """An empty snapshot in a free buffer, of all but these operators, which it takes from the one before.

        It lacks those that are left to other ranks.

        For the rest see `Occupancy.take`.

        Raises:
            SaveError: one has no part of its own.
        """
        now = Deadline(0.0)
        for late in [late for late in self._late if late[1].arrives(now)]:
            self._late.remove(late)
            self.occupancy.release(late[0])
        snapshot = self.occupancy.take(iteration, spare, keep_newest=keep_newest, due=due)
        if snapshot is None:
            return None
        buffer, before = self._buffers[snapshot.place], self._newest
        buffer.unseal()
        if before is not None and before.place == snapshot.place:
            self._newest = before = None
        older: Mapping[str, int] = {}
        parts = buffer.held.parts
        try:
            carried, snapshot.lacking = parts.of_all(left_out), parts.of_all(left)
        except SaveError:
            self.occupancy.release(snapshot)
            raise
        if carried and before is not None:
            older = {part: at for part, at in before.taken_at.items() if part in carried - snapshot.lacking}
            snapshot.source, here = before.place, buffer.held.taken_at
            snapshot.carried_bytes = sum(parts.bytes[part] for part, at in older.items() if here.get(part) != at)
        copied = parts.names - older.keys() - snapshot.lacking
        snapshot.taken_at, snapshot.part_bytes = {**older, **dict.fromkeys(copied, iteration)}, parts.bytes
        buffer.held.overwrite(copied | snapshot.lacking)
        return snapshot

    def _give_up(self, snapshot: Snapshot) -> None:
        """Its copy failed."""
        self._newest = None
        self.occupancy.release(snapshot)
