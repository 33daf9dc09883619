"""This rank's host memory: the buffers of its snapshots, what of them outlives the process, and replicas elsewhere."""

import logging
from collections.abc import Sequence

from cpsr.checkpoint.memory import SharedMemory, remove_held
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.config import CPSRConfig
from cpsr.group import Group
from cpsr.peers.replicator import Replicator, Tell
from cpsr.rundir import RunDirectory
from cpsr.state import Shard

__all__ = ["HostMemory"]


class HostMemory:
    """The pool of snapshots in shared memory, and its replication to other machines; opening it is a collective.

    Args:
        run: whose files they are.
        life: of the run, stamped on what is sealed.
        group: the ranks.
        shard: the template of the buffers.
        data_parallel_ranks: this rank's data-parallel group, itself included.
        config: the run's configuration.
        tell: records an event.

    Attributes:
        pool: the buffers.
    """

    def __init__(
        self,
        run: RunDirectory,
        life: int,
        group: Group,
        shard: Shard,
        data_parallel_ranks: Sequence[int],
        config: CPSRConfig,
        tell: Tell,
    ) -> None:
        self._run = run
        self._first_on_machine = group.rank == run.local_ranks[0]
        memory = SharedMemory(run.run_id, group.rank, life) if config.checkpoint.shared_memory else None
        self._memory = memory
        self.pool = SnapshotPool(shard, memory=memory)
        self._replicator: Replicator | None = None
        problem = self.pool.shared_memory_problem
        if problem is not None:
            tell(
                "no shared memory",
                f"snapshots do not outlive the process, since /dev/shm cannot hold {self.pool.required_bytes(shard)} "
                f"bytes for this rank ({problem}): a restart begins from the disk. Enlarge it (docker: --shm-size), or "
                "set checkpoint.shared_memory to false",
                None,
                logging.WARNING,
            )
        # All ranks or none: what one sends another takes.
        if group.all(memory is not None and problem is None and config.peers.replicas > 0):
            assert memory is not None
            checkpoints = run.path / "checkpoints"
            self._replicator = Replicator(
                run.run_id, memory, group, data_parallel_ranks, shard, config.peers, tell, checkpoints=checkpoints
            )
            self.pool.on_sealed = self._replicator.offer

    @property
    def branch(self) -> int:
        """How often this life has gone back to an earlier state."""
        return 0 if self._memory is None else self._memory.branch

    def begin(self, iteration: int) -> None:
        """A life goes on from this iteration: what leads elsewhere, and what is of ranks that have moved away, goes."""
        self.pool.forget_after(iteration)
        if self._first_on_machine:
            remove_held(self._run.run_id, keep_ranks=self._run.local_ranks, replicas=False)
        if self._replicator is not None:
            self._replicator.remove_stale()

    def forget_after(self, iteration: int) -> None:
        """Snapshots of later iterations count no more, here and elsewhere: the run has gone back behind them.

        What is sealed from now on is of another branch: a replica whose holder is not reached stays as it is, and a
        restart must tell it from those that come.
        """
        self.pool.forget_after(iteration)
        if self._memory is not None:
            self._memory.branch += 1
        if self._replicator is not None:
            self._replicator.forget_after(iteration)

    def close(self, *, in_order: bool, safe: bool) -> None:
        """Let the memory go.

        Args:
            in_order: all ranks end together; after a failure the next life looks here first.
            safe: the last state is on the disk; where that refused it, it is nowhere else.
        """
        if self._replicator is not None:
            self._replicator.close(remove=in_order, together=in_order)
        self.pool.close(remove=in_order and safe)
        if in_order and safe and self._first_on_machine:
            remove_held(self._run.run_id)  # also what a life that had to do without shared memory did not take over
