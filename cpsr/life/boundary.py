"""Step boundaries: when the state is consistent, its publication, and its emergency dump."""

import logging
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack

import torch

from cpsr.checkpoint.progress import ProgressCounter, progress_path
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.engines import TorchAdapter
from cpsr.errors import SaveError
from cpsr.job import Ending, Job, Rewind
from cpsr.life.publication import Publication
from cpsr.life.run_state import RunState
from cpsr.ranks.emergency_dump import EmergencyDump
from cpsr.ranks.exits import Exit, lost_another, note_exit
from cpsr.ranks.heartbeat import Liveness
from cpsr.ranks.neighbour import Neighbour

__all__ = ["Boundary"]

# At the end of a life, for a device that still has steps in its queue.
DEVICE_SECONDS = 10.0


class Boundary:
    """Publishes each step that is complete: the step counter, the heartbeat, and the state for an emergency dump.

    Attributes:
        emergency_dump: dumps the state when this rank leaves a broken group.
        liveness: watches the other ranks.
        no_dump: why no dump may be left, as while the state may still be discarded; None: one may.
        changing: whether an update or another change of the state has begun, and not ended.
    """

    def __init__(self, job: Job, pool: SnapshotPool, state: RunState) -> None:
        self._job, self._pool, self._state = job, pool, state
        self.no_dump: str | None = None
        self.changing = False
        self._thread = threading.get_ident()
        state.frozen.on_moved = self._on_frozen_moved
        config, rank = job.config, job.group.rank
        counter, copier = ProgressCounter(progress_path(config.run_dir, rank)), pool.copier
        # Alone, no step waits for another rank.
        self._publication = Publication(counter, copier.events, copier.updates if job.group.size > 1 else None)
        self.emergency_dump = EmergencyDump(
            self._dump,
            self._report_dump,
            config.ranks.sigterm_grace_seconds,
            lambda: self.liveness.obstacle(),
            job.journal.flush,
        )
        self.liveness = Liveness(
            config.run_dir,
            job.journal.life,
            rank,
            job.group.size,
            config.ranks,
            self._give_up,
            job.journal.event,
        )
        watching = config.ranks.heartbeat_timeout_seconds is not None
        self._neighbour = Neighbour(job.group, self.liveness.lost) if watching else None
        self.liveness.start()
        self._publication.start()

    @property
    def published(self) -> int:
        """The newest step that the device has completed; where state is on the host not kept."""
        return self._publication.published

    def prepare(self) -> None:
        """Before the first step: mark its boundary, and prepare a dump."""
        self._pool.copier.prepare_dump(self._state.left)
        self._pool.mark_boundary()

    def begin_change(self) -> None:
        """From here on the state belongs to no iteration, until the next `publish` or `rewound`."""
        self.changing = True
        self.emergency_dump.begin_update()

    def before_update(self) -> None:
        """The next update is about to be launched, while the device may not have completed this step."""
        self._publication.before_update(self._state.left)

    def begin_update(self) -> None:
        """The optimizer begins: see `begin_change`."""
        self.begin_change()
        self._publication.begin_update()

    def end_change(self, iteration: int) -> None:
        """The state is again that after `iteration`."""
        self.changing = False
        self.emergency_dump.end_update(iteration)

    def sign(self) -> None:
        """A forward, a loss or an update: training makes progress, and the device may have completed steps."""
        self.liveness.sign()
        self._publication.poll()

    def request(self) -> None:
        """The loop asks for a batch, for which it may wait long.

        Raises:
            UnsupportedEngineError: inside a step, to which the batch would be counted.
        """
        self._publication.poll()
        adapter = self._job.adapter
        if self.changing and isinstance(adapter, TorchAdapter) and threading.get_ident() == self._thread:
            adapter.require_complete_step()

    def publish(self, iteration: int) -> None:
        """The host has launched a step: the state is that after it."""
        self._mark(iteration)
        self.liveness.step(iteration)

    def reset(self, iteration: int) -> None:
        """The state is that of another iteration, possibly an earlier one."""
        self._publication.reset(iteration, self._state.batches)

    def rewound(self, to: Rewind) -> None:
        """The state is that of another iteration; unless it was not changed, and stays that of the last step."""
        if self.emergency_dump.updating:
            self.reset(to.iteration)
            self._mark(to.iteration)

    def _mark(self, iteration: int) -> None:
        self._publication.step(iteration, self._state.batches, self._pool.mark_boundary())
        self.end_change(iteration)

    def busy(self) -> AbstractContextManager[None]:
        """No step ends inside, on purpose."""
        return self.liveness.busy()

    def leave_in_order(self) -> None:
        """All ranks end together: stop watching the others, and dump nothing."""
        self.emergency_dump.leave_in_order()
        self.liveness.finish()

    def abandon(self, error: BaseException | None) -> None:
        """The group is broken: dump the state of the last boundary, and stop watching the others."""
        self.liveness.settle()
        note_exit(self._job.run.path, self._job.journal.life, Exit(self._job.group.rank, error=_one_line(error)))
        # The error itself is the script's to print; what SystemExit says would be seen nowhere else.
        named = _one_line(error) if isinstance(error, SystemExit) else type(error).__name__
        self.emergency_dump.dump(f"the training loop was left with {named}")
        self.liveness.close(ended=False)
        self._close_neighbour(ended=False)

    def close(self, ending: Ending) -> None:
        """Close the counter, which keeps its value; the heartbeat shows how this rank has ended."""
        with ExitStack() as closing:  # an error of one keeps none of the others open
            # Last, since a dump publishes. Only at an error may the device hang.
            closing.callback(self._publication.close, DEVICE_SECONDS if ending.in_order else 0.0)
            closing.callback(self.emergency_dump.close)
            closing.callback(lambda: self._close_neighbour(ended=ending.in_order))
            closing.callback(lambda: self.liveness.close(ended=ending.in_order))

    def _close_neighbour(self, *, ended: bool) -> None:
        if self._neighbour is not None:
            self._neighbour.close(ended=ended)

    def _give_up(self, reason: str) -> None:
        """Another rank is gone, or training hangs: end this process, from another thread."""
        rank = self._job.group.rank
        left = Exit(rank, error=reason) if lost_another(reason) else Exit(rank, left=reason)
        note_exit(self._job.run.path, self._job.journal.life, left)
        self.emergency_dump.leave(reason)

    def _dump(self, iteration: int) -> int:
        """Dump the state before this rank leaves a broken group; returns its iteration."""
        if self.no_dump is not None:
            raise SaveError(self.no_dump)
        if self._state.repeats_batches:
            raise SaveError("the loop was between two steps on one batch, which no position in the data tells")
        state, adapter = self._state, self._job.adapter
        if adapter.scalars(on_device=True).get("module") is not None:
            raise SaveError(
                "the module keeps state outside of its first buffers (its extra state, or a buffer that has grown), "
                "which a forward may have changed since the step"
            )
        dumped = self._pool.dump(adapter.shard, iteration, state.left, self._publication.earlier, frozen=state.frozen)
        self._publication.poll()  # the dump waited for the device, which has completed the step
        return dumped

    def _report_dump(self, kind: str, message: str, iteration: int | None, level: int) -> None:
        """A restart in mode exact takes no dump: a line that names its iteration would announce another one."""
        unused = self._job.config.mode == "exact" and kind == "dumped"
        self._job.journal.event(kind, message, iteration, logging.DEBUG if unused else level)

    def _on_frozen_moved(self, moved: Mapping[str, torch.Tensor]) -> None:
        """Parameters outside the optimizer were written to: from now on an emergency dump has them, too."""
        self._pool.watch(moved)
        self._job.journal.event(
            "frozen weights changed",
            f"{len(moved)} parameters outside the optimizer (the first is {min(moved)!r}) were written to: snapshots "
            f"have their {sum(values.nbytes for values in moved.values())} bytes as they then are. Once they have "
            "rested from one checkpoint to the next they are written to a file of their own",
            self._job.adapter.iteration,
        )


def _one_line(error: BaseException | None) -> str:
    """An exception's kind and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
