"""The windows of one rank's life: one is replayed where the life began with it, then new ones are taken."""

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cpsr.checkpoint.commit import refuse_superseded
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_states import WINDOWS, describe
from cpsr.checkpoint.progress import mark_life
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.engines.moe.operators import experts_of
from cpsr.errors import CheckpointError, SaveError
from cpsr.job import Job
from cpsr.replay.conversion import Conversion
from cpsr.replay.recorder import FILES, FILES_WITH_PEERS, Recorder, Window
from cpsr.replay.schedule import WindowLayout, has_shifted, schedule, sparse_window, units_of
from cpsr.replay.stages import stage_logs

__all__ = ["Windows"]

_NO_PLACE = "the optimizer keeps tensors that windows have no place for (docs/optimizers.md)"


class Windows:
    """Called after each step; on the training thread.

    All ranks begin their windows after the same iterations, with as many iterations. What has its turn when is each
    rank's own affair: a rank replays its own part of the state, and gives the others compute weights that are right.

    Args:
        job: this rank's.
        memory: names and stamps of the files.
        pool: takes no snapshot while the state is not whole, and knows whether the loop changes weights meanwhile.

    Attributes:
        recorder: takes them.
        file_bytes: of each window, as long as the number of iterations stays the same.
        bytes_to_come: shared memory that this rank's windows take beyond what those of the life before have.
        replaying: the window that this life began with, until the state is whole again.
    """

    def __init__(self, job: Job, memory: SharedMemory, pool: SnapshotPool) -> None:
        self._job, self._memory, self._pool = job, memory, pool
        self._compute = job.adapter.compute_dtypes()
        self._popularity: Mapping[str, float] = {}
        self._order_units()
        self.replaying: Conversion | None = None
        self._steps = job.adapter.repeated_steps()
        self._layout, self._reordered = self._laid_out(job.config.replay.window_iterations or 1), False
        self.file_bytes = self._layout.size.bytes
        files = _files(job)
        self._arena = memory.arena
        self.bytes_to_come = max(0, files * self.file_bytes - self._arena.taken_by(WINDOWS, [job.group.rank]))
        watched = pool.engine.writes, pool.steps.after_step
        self.recorder = Recorder(memory, job.adapter.shard, self._report, files, *watched)
        self._off = self._without_place = False
        self._first: int | None = None
        self._agreed = -1, len(self._layout.turns)  # iteration of the agreement, and iterations of later windows
        self._logs = stage_logs(job, memory)
        self._keep_logs()

    def settle(self, path: Path) -> Path:
        """Keep the window that this life begins with, before the states of earlier lives are void.

        Args:
            path: of its file, in this machine's memory.

        Returns:
            Where it lies now.

        Raises:
            CheckpointError: it is damaged.
            OSError: it is not there any more, or another process has it.
        """
        left = describe(path)
        if left is None:
            raise CheckpointError(f"{path} holds no window any more")
        state = self.recorder.adopt(path)
        given = self._job, self._pool, state, left, self._steps, self._logs
        replaying = self.replaying = Conversion(*given, give_up=self.give_up)
        if self._job.config.replay.window_iterations is None:  # what was measured in the life before
            self._layout = self._laid_out(replaying.last - replaying.first + 1)
            self._agreed = -1, len(self._layout.turns)
            self._keep_logs()
        return state.path

    def start(self) -> None:
        """Take the memory of the windows; where a rank has too little, it takes none, and training goes on.

        A collective, after `settle`.
        """
        if self.replaying is not None:
            self.replaying.start()
        problem = None
        try:
            self.recorder.prepare(self._layout)
        except (OSError, SaveError) as error:
            problem = f"rank {self._job.group.rank}: {error}"
        problems = self._job.group.gather_present(problem)
        if problems:
            self._off = True
            if self.replaying is None:
                self.recorder.close(remove=True)
            message = "no windows are kept in this life, and a failure goes back to the newest checkpoint"
            self._report(f"{message}: {'; '.join(problems)}", once=True)

    @property
    def iterations(self) -> int | None:
        """Of windows that begin now, as agreed; None where none are taken."""
        return None if self._off else self._agreed[1]

    def replays(self) -> bool | None:
        """Whether this rank computes the steps of a window that is replayed; None where none is, any more."""
        return None if self.replaying is None else not self.replaying.rests

    def capture(
        self, iteration: int, small_state: Callable[[], Any], may_send: Callable[[], bool], *, may_begin: bool
    ) -> Window | None:
        """At the end of an iteration: capture its snapshot, or check what was repeated.

        Args:
            iteration: the finished one.
            small_state: gives it whole.
            may_send: says whether a window that ends here goes to the peers; asked after the same ones on all ranks.
            may_begin: whether a restart could go on from this iteration; else the next window begins later.

        Returns:
            A window that ends here and goes to the peers.

        Raises:
            RecoveryError: an iteration was not repeated as it was; see `Conversion.require_same`.
        """
        replaying = self.replaying
        if replaying is not None:
            if not replaying.check(iteration):
                return None
            self._end_replay()
        if self._off:
            return None
        step = self._step(iteration)
        if step > 0:
            outcome = None if self._steps is None else self._steps.outcome()
            return self.recorder.capture(iteration, outcome, send=step + 1 == len(self._layout.turns) and may_send())
        if not may_begin:
            return None
        if self._reordered or len(self._layout.turns) != self._iterations_from(iteration):
            self._layout, self._reordered = self._laid_out(self._iterations_from(iteration)), False
            self._keep_logs()
        self._first = iteration
        small = small_state if len(self._layout.turns) == 1 else partial(_complete, small_state)
        self.recorder.begin_window(self._layout, iteration, small)
        return self.recorder.capture(iteration, send=len(self._layout.turns) == 1 and may_send())

    def order(self, popularity: Mapping[str, float]) -> None:
        """Let the popular experts have their turns last, in windows that begin later; of this rank alone.

        Args:
            popularity: operator -> score of its expert, for this rank's experts; empty: the order stays.
        """
        if has_shifted(self._popularity, popularity):
            self._popularity = popularity
            self._order_units()

    def agree(self, iteration: int) -> None:
        """Find the number of iterations anew from what was measured, for windows that begin later; a collective.

        Args:
            iteration: the finished one: some ranks may have begun a window with it.
        """
        if self._job.config.replay.window_iterations is not None:
            return
        group = self._job.group
        wanted = max(group.gather(self._wanted_iterations()))
        if wanted != self._agreed[1]:
            wanted = min(group.gather(self._most_iterations(wanted)))
        self._agreed = iteration, wanted

    def forget(self) -> None:
        """The run has gone back, or elsewhere: no window leads there."""
        self._end_replay()
        self._first = None
        self.recorder.forget()
        if self._logs is not None:
            self._logs.forget()

    def give_up(self) -> None:
        """The window that is replayed is void, here and at the peers: the run leaves the branch that it belongs to."""
        self.recorder.forget()
        self._memory.branch += 1
        try:
            refuse_superseded(self._job.run.path, self._memory.life)
            mark_life(self._job.run.path, self._memory.life, self._memory.branch)
        except (OSError, CheckpointError) as error:
            self._report(f"that a window is void is not recorded, and a replica of it may be used again: {error}")

    def close(self, *, remove: bool) -> None:
        """Let the memory go; see `MemoryFile.close`."""
        self._end_replay(remove=remove)
        if self._logs is not None and self._job.adapter.pipeline is not None:
            self._job.adapter.pipeline.traffic.stop()
            self._logs.close(remove=remove)
        if self._steps is not None:
            self._steps.close()
        self.recorder.close(remove=remove)

    def _keep_logs(self) -> None:
        """Of what stages have sent since the oldest window that is left."""
        if self._logs is not None:
            self._logs.keep(self.recorder.files * len(self._layout.turns))

    def _step(self, iteration: int) -> int:
        """Its place in the window that was begun last; 0 where the next one begins with it."""
        step = 0 if self._first is None else iteration - self._first
        return step if 0 < step < len(self._layout.turns) else 0

    def _iterations_from(self, iteration: int) -> int:
        """Of a window that begins with this iteration."""
        agreed_at, iterations = self._agreed
        return iterations if iteration > agreed_at else len(self._layout.turns)

    def _end_replay(self, *, remove: bool = True) -> None:
        replaying, self.replaying = self.replaying, None
        if replaying is not None:
            replaying.close()
            if self._off:
                self.recorder.close(remove=remove)

    def _order_units(self) -> None:
        operators = self._job.shard.operators
        experts = experts_of(self._job.adapter.mixture, operators)
        self._units = units_of(self._job.shard, experts, self._popularity)
        self._active = [sum(operators[one].state_bytes for one in names) for names in self._units.values()]
        self._frozen = [sum(map(self._compute_bytes, names)) for names in self._units.values()]
        self._reordered = True  # since the last layout

    def _laid_out(self, iterations: int) -> WindowLayout:
        turns = schedule(self._units, self._active, self._frozen, iterations)
        return WindowLayout(self._job.shard, turns, self._compute)

    def _wanted_iterations(self) -> int:
        """The fewest that this rank's forward and backward hide; as now until a copy was measured."""
        budget = self.recorder.copies.bytes
        if budget is None or not self._units:
            return len(self._layout.turns)
        return len(sparse_window(self._active, self._frozen, budget)[0])

    def _most_iterations(self, wanted: int) -> int:
        """So many, or fewer where this machine lacks the memory: later turns keep weights of more iterations."""
        ranks = self._job.run.local_ranks
        room = self._arena.room_for(WINDOWS, ranks) / (len(ranks) * self.recorder.files)
        while wanted > 1 and self._laid_out(wanted).size.bytes > room:
            wanted = wanted * 3 // 4
        return wanted

    def _compute_bytes(self, name: str) -> int:
        values = self._job.shard.operators[name].parameter.values
        return math.prod(values.shape) * int(self._compute.get(name, values.dtype).itemsize)

    def _report(self, message: str, *, once: bool = False) -> None:
        without_place, self._without_place = self._without_place, message.endswith(_NO_PLACE)
        if (not once or self._job.group.rank == 0) and not (without_place and self._without_place):
            self._job.journal.event("window not kept", message, level=logging.WARNING)


def _complete(small_state: Callable[[], Any]) -> Any:
    """The small state; a window has it of its first iteration alone, and so no tensors of optimizers may be in it."""
    small = small_state()
    if small["engine"]["optimizer_state"]["rest"]:
        raise SaveError(_NO_PLACE)
    return small


def _files(job: Job) -> int:
    """How many windows have memory: with peers one more, for the one that they have."""
    alone = job.config.peers.replicas == 0 or len(job.run.local_ranks) == job.group.size
    return FILES if alone else FILES_WITH_PEERS
