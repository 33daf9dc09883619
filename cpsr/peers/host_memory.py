"""This rank's host memory: the buffers of its snapshots, what of them outlives the process, and replicas elsewhere."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cpsr.checkpoint.arena import Arena, Sealed
from cpsr.checkpoint.buffers import slab_size
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_owners import copied_from, free_orphans, mark_owner, remove_unused
from cpsr.checkpoint.memory_states import BUFFERS, SHARED_MEMORY
from cpsr.checkpoint.progress import mark_life
from cpsr.checkpoint.resources import host_buffers
from cpsr.checkpoint.run_directory import RunDirectory
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.checkpoint.tiers import Source
from cpsr.errors import CheckpointError, RecoveryError, RunMismatchError
from cpsr.job import Job
from cpsr.peers.peer import fetched_path
from cpsr.ranks.group import Group, this_node
from cpsr.replay.windows import Windows

if TYPE_CHECKING:  # loaded when a run opens, by what the job uses
    from cpsr.experts.in_memory import InMemory
    from cpsr.peers.replicator import Outgoing, Replicator

__all__ = ["HostMemory", "claim_memory"]

logger = logging.getLogger(__name__)


def claim_memory(run: RunDirectory, group: Group, *, shared: bool) -> None:
    """Free the memory of runs that are gone on this machine, and mark this run's as its own; a collective.

    Args:
        run: that is about to take memory.
        group: the ranks.
        shared: whether its buffers are to lie in shared memory.

    Raises:
        RunMismatchError: states there are of the directory of which this one is a copy.
    """
    original = None
    if group.rank == run.local_ranks[0]:
        original = copied_from(run.run_id, run.path)
    if found := group.gather_present(None if original is None else str(original)):
        raise RunMismatchError(
            f"{run.path} is a copy of {found[0]}, of which states are in the memory of a machine of this job: it would "
            f"go on from them, and overwrite them. Nothing was trained. Go on in {found[0]}; where that run has ended, "
            f"`cpsr release {found[0]}` on each machine frees its memory, and the copy goes on from its checkpoints"
        )
    if group.rank == run.local_ranks[0]:
        try:
            for orphan in free_orphans():
                if orphan.standing == "freed":
                    message = "%.1f MB of host memory are free again: run %s had left them, and %s"
                    logger.info(message, orphan.bytes / 1e6, orphan.run_id, orphan.why)
            if shared:
                mark_owner(run.run_id, run.path, this_node())
        except OSError as error:
            message = (
                "memory of runs that are gone in %s is not freed, or memory of this run is not marked as its own: %s"
            )
            logger.warning(message, SHARED_MEMORY, error)
    group.barrier()


class HostMemory:
    """The pool of snapshots in shared memory, and its replication to other machines; opening it is a collective.

    Args:
        job: this rank's; its shard is the template of the buffers.
        units: operator -> its part of a buffer; see `SnapshotPool`.
        experts: select those that replicas hold; None: all.
        alike: see `Replicator`.

    Attributes:
        pool: the buffers.
        survives: whether the snapshots of every rank survive its process.
        windows: sparse snapshots of every iteration; None where they are not wanted, or would not survive.
        replicates: whether replicas are sent and held; alike on all ranks. There are none on a single machine.
    """

    def __init__(
        self,
        job: Job,
        units: Mapping[str, str] | None = None,
        experts: "InMemory | None" = None,
        *,
        alike: bool,
    ) -> None:
        run, group, shard, config, report = job.run, job.group, job.shard, job.config, job.journal.event
        self._run = run
        self._group, self._rank = group, group.rank
        self._first_on_machine = group.rank == run.local_ranks[0]
        memory = SharedMemory(run.run_id, group.rank, job.journal.life) if config.checkpoint.shared_memory else None
        self._memory = memory
        buffers = _buffers(job) if memory is not None else host_buffers(config)
        self.pool = SnapshotPool(shard, buffers, memory, units)
        self._replicator: Replicator | None = None
        self._images: dict[Path, Sealed] = {}  # of this branch, by the file that each was in
        problem = self.pool.shared_memory_problem
        if problem is not None:
            report(
                "no shared memory",
                f"snapshots do not outlive the process, so that a restart begins from the disk: this rank's "
                f"{buffers * slab_size(shard).bytes} bytes of host buffers are not in {SHARED_MEMORY}, since "
                f"{problem}",
                None,
                logging.WARNING,
            )
        # All ranks or none: what one sends another takes.
        self.survives, sends = group.each([self.pool.survives, config.peers.replicas > 0])
        self._life, self._sealed, self._marked = job.journal.life, 0, False
        self.windows: Windows | None = None
        self._adopted: tuple[Path, int] | None = None  # file and first iteration of the window that is replayed
        if config.replay.enabled and self.survives:
            assert memory is not None
            self.windows = Windows(job, memory, self.pool)
            self.windows.recorder.on_sealed = self._follow_window
        elif group.rank == 0 and self.survives:
            self.pool.on_counting = self._note_common
        self.replicates = self.survives and sends and len(run.local_ranks) < group.size
        if self.replicates:
            assert memory is not None
            from cpsr.peers import replicator

            self._replicator = replicator.Replicator(
                memory,
                group,
                job.adapter.data_parallel_ranks,
                shard,
                config.peers.replicas,
                report,
                alike=alike,
                window_bytes=0 if self.windows is None else self.windows.file_bytes,
                bytes_to_come=0 if self.windows is None else self.windows.bytes_to_come,
                experts=experts,
            )
            if self.windows is None:
                self.pool.on_sealed = self._note_sealed

    def after_step(self, iteration: int) -> None:
        """Right after a step, before anything looks at its state: replay what a window has of it."""
        if self.windows is not None and self.windows.replaying is not None:
            self.windows.replaying.after_step(iteration)

    @property
    def links(self) -> "Sequence[Outgoing]":
        """To the ranks on other machines that hold replicas of this rank's states; empty where none does."""
        return () if self._replicator is None else self._replicator.outgoing

    @property
    def branch(self) -> int:
        """How often this life has gone back to an earlier state."""
        return 0 if self._memory is None else self._memory.branch

    def settle(self, sources: Sequence[Source]) -> None:
        """What this life begins with is there for it, before the states of the life before are void; a collective.

        Args:
            sources: where each rank's state came from.

        Raises:
            RecoveryError: it is not there any more, on every rank.
        """
        self.pool.settle()
        entry = sources[self._rank].entry if sources else None
        if self.windows is None or entry is None or entry.kind != "window":
            return
        arena, here = Arena(self._run.run_id), entry.node == this_node()
        path = arena.directory / entry.name if here else fetched_path(arena, self._rank, entry)
        problem = None
        try:
            self._adopted = self.windows.settle(path), entry.iteration
        except (OSError, CheckpointError) as error:
            problem = f"rank {self._rank}: {error}"
        problems = self._group.gather_present(problem)
        if problems:
            self.windows.give_up()  # the next life would fail as this one
            raise RecoveryError(
                f"the window that begins with iteration {entry.iteration} cannot be kept for this life: "
                f"{'; '.join(problems)}. Nothing was trained; the next start goes back to the newest checkpoint, or "
                "to the beginning"
            )
        if self.windows.replaying is not None:
            self.windows.replaying.rest()

    def begin(self, iteration: int) -> None:
        """A life goes on from this iteration: what leads elsewhere goes, and all that no rank here has in use.

        This bounds what a life keeps on a machine, whatever earlier ones left there. States of ranks that have moved to
        other machines go, and replicas that are no longer wanted. All of it goes where this life has no shared memory.
        """
        self.pool.forget_after(iteration)
        self.pool.occupancy.forget_earlier()
        self.pool.occupancy.skip(iteration)  # it was sealed for this life, or never will be
        if self._first_on_machine:
            held = () if self._replicator is None else self._replicator.held(*self._run.local_ranks)
            remove_unused(self._run.run_id, keep=held)
        if self._adopted is not None:
            if self._rank == 0:
                self._mark_held()
            if self._replicator is not None:  # replicas of the life before are void from now on
                self._replicator.offer(Sealed.at(*self._adopted))
        if self.windows is not None:
            self.windows.start()

    def forget_after(self, iteration: int) -> None:
        """Snapshots of later iterations count no more, here and elsewhere: the run has gone back behind them.

        States sealed from now on belong to another branch. By that a restart distinguishes them from what is left of
        those before, here and at the holders of replicas, once `mark_life` has recorded it.
        """
        self.pool.forget_after(iteration)
        if self.windows is not None:
            self.windows.forget()
        self.pool.occupancy.rewind(iteration)
        self._sealed, self._marked = 0, False
        self._images.clear()
        if self._replicator is not None:
            self._replicator.forget()
        if self._memory is not None:
            self._memory.branch += 1

    def _note_sealed(self, path: Path, iteration: int) -> None:
        """A snapshot is sealed; in the engine's thread."""
        self._images[path] = Sealed.at(path, iteration)

    def send(self, iteration: int) -> bool:
        """Begin to send this rank's snapshot of an iteration of this branch to the peers; whether it is there."""
        found = next((image for image in list(self._images.values()) if image.iteration == iteration), None)
        if found is None or self._replicator is None:
            return False
        self._replicator.offer(found)
        return True

    def send_whole(self) -> None:
        """See `Replicator.send_whole`."""
        if self._replicator is not None:
            self._replicator.send_whole()

    def _follow_window(self, path: Path, iteration: int, *, send: bool) -> None:
        """A window is sealed; in its worker."""
        if self._rank == 0:
            self._count_sealed()
        if send and self._replicator is not None:
            self._replicator.offer(Sealed.at(path, iteration))

    def _note_common(self) -> None:
        """Record that every rank has a state of this branch, once rank 0 knows that (rank 0)."""
        if not self._marked and self.pool.occupancy.common >= 0:
            self._marked = True
            self._mark_held()

    def _count_sealed(self) -> None:
        """Record, at rank 0's second window of a branch, that all ranks have one: the ranks take them together."""
        self._sealed += 1
        if self._sealed == 2:
            self._mark_held()

    def _mark_held(self) -> None:
        """Record that every rank has a state of this branch in memory."""
        try:
            mark_life(self._run.path, self._life, self.branch, holds_states=True)
        except OSError as error:
            logger.warning(
                "that this life holds states in memory is not recorded, for the class of failures: %s", error
            )

    def close(self, *, in_order: bool, safe: bool) -> None:
        """Let the memory go.

        Args:
            in_order: all ranks end together; after a failure the next life looks here first.
            safe: the last state is on the disk; where that refused it, it is nowhere else.
        """
        if self._replicator is not None:
            self._replicator.close(remove=in_order, together=in_order)
        if self.windows is not None:
            self.windows.close(remove=in_order and safe)
        self.pool.close(remove=in_order and safe)
        if in_order and safe:
            remove_unused(self._run.run_id)  # also what a life that had to do without shared memory did not take over


def _buffers(job: Job) -> int:
    """How many buffers each rank has: with peers one more, for the state that they have, where all have the memory.

    Where windows go to the peers, it is they that have one more.
    Without it the next snapshots overwrite that state before the next replica is complete. A machine that is lost then
    leaves no iteration that every rank has.
    """
    run, buffers = job.run, host_buffers(job.config)
    if job.config.peers.replicas == 0 or len(run.local_ranks) == job.group.size or job.config.replay.enabled:
        return buffers
    needed = (buffers + 1) * slab_size(job.shard).bytes * len(run.local_ranks)
    return buffers + int(job.group.all(needed <= Arena(run.run_id).room_for(BUFFERS, run.local_ranks)))
