"""The windows of one rank's life: one is replayed where the life began with it, then new ones are taken."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cpsr.checkpoint.memory import SharedMemory, shared_memory_left
from cpsr.checkpoint.memory_removal import bytes_in_memory, room_in_memory
from cpsr.checkpoint.memory_states import PAGE_BYTES, MemoryState, memory_state
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.engines.kept_views import KeptViews
from cpsr.engines.moe.naming import experts_of
from cpsr.errors import CheckpointError, SaveError
from cpsr.experts.copy_budget import CopyBudget
from cpsr.job import Job
from cpsr.replay.conversion import REPEATED, VOID, Conversion
from cpsr.replay.frozen import FrozenGradients
from cpsr.replay.layout import WindowLayout
from cpsr.replay.recorder import FILES, FILES_WITH_PEERS, OnSealed, Recorder, Window
from cpsr.replay.resting import Rest, rest_of
from cpsr.replay.schedule import has_shifted, schedule, units_of, window_iterations
from cpsr.replay.upstream import LoggedSteps, Upstream

__all__ = ["Windows"]


class Windows:
    """Called after each step; on the training thread.

    All ranks begin their windows after the same iterations, with as many iterations. What has its turn when is each
    rank's own affair: a rank replays its own part of the state, and gives the others compute weights that are right.

    Args:
        job: this rank's.
        memory: names and stamps of the files.
        pool: takes no snapshot while the state is not whole.

    Attributes:
        file_bytes: of each window, as long as the number of iterations stays the same.
        bytes_to_come: shared memory that this rank's windows take beyond what those of the life before have.
    """

    def __init__(self, job: Job, memory: SharedMemory, pool: SnapshotPool) -> None:
        self._job, self._pool = job, pool
        self._compute = job.adapter.compute_dtypes()
        self._popularity: Mapping[str, float] = {}
        self._order_units()
        self._conversion: Conversion | None = None
        self._frozen = FrozenGradients(job)
        self._layout, self._reordered = self._laid_out(job.config.replay.window_iterations or 1), False
        self.file_bytes = PAGE_BYTES + self._layout.bytes
        files = _files(job, self.file_bytes)
        there = bytes_in_memory(job.run.run_id, [job.group.rank], prefix="window-")
        self.bytes_to_come = max(0, files * self.file_bytes - there)
        self._recorder: Recorder | None = Recorder(memory, KeptViews(job.adapter), self._report, files)
        self._off = False
        self._first: int | None = None
        self._agreed = -1, len(self._layout.turns)  # iteration of the agreement, and iterations of later windows
        self._copies = CopyBudget()
        self._left: MemoryState | None = None  # the window that is replayed, as the life before left it
        self._rest: Rest | None = None
        self._traffic = job.adapter.stage_traffic
        self._upstream: Upstream | None = None
        if self._traffic is not None and self._traffic.obstacle is None:
            self._upstream = Upstream(memory, job.adapter.device, self._report_log, self._room_for_logs)
            self._upstream.keep(files * len(self._layout.turns))  # since the first of the oldest window that is left
            self._traffic.follow(self._upstream)
        elif self._traffic is not None:
            self._report(f"a lost stage replays together with all others: {self._traffic.obstacle}", once=True)

    def follow(self, on_sealed: OnSealed) -> None:
        """Call this for each window that is sealed; from another thread."""
        if self._recorder is not None:
            self._recorder.on_sealed = on_sealed

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
        assert self._recorder is not None
        self._left = memory_state(path)
        path = self._recorder.adopt(path)
        state = memory_state(path)
        if state is None:
            raise CheckpointError(f"{path} holds no window any more")
        conversion = self._conversion = Conversion(state, self._job.adapter)
        if self._job.config.replay.window_iterations is None:  # what was measured in the life before
            self._layout = self._laid_out(conversion.last - conversion.first + 1)
            self._agreed = -1, len(self._layout.turns)
        self._obstruct(conversion)
        return path

    def rest(self) -> None:
        """Find which stages of a pipeline need not replay; a collective, once the window is kept on all ranks."""
        conversion, traffic = self._conversion, self._traffic
        if traffic is None or conversion is None or self._left is None:
            return
        window = self._left, conversion.last, conversion.small_state()
        rest = self._rest = rest_of(self._job, self._pool, *window, self._upstream)
        if rest is None or self._upstream is None:
            return
        self._obstruct(conversion)
        if rest.here:
            traffic.repeat(LoggedSteps(rest.logs, rest.choice.ranks, self._upstream.forget))
        if self._job.group.rank == 0:
            stages = ", ".join(map(str, rest.choice.stages))
            message = (
                f"stages {stages} have the state of iteration {rest.choice.until} and rest: the others replay "
                f"iterations {conversion.first + 1} to {rest.choice.until} from what these had sent"
            )
            self._job.journal.event("stages rest", message, conversion.first)

    def start(self) -> None:
        """Take the memory of the windows; where a rank has too little, it takes none, and training goes on.

        A collective, after `settle`.
        """
        assert self._recorder is not None
        if self._conversion is not None:
            self._frozen.plan(self._conversion)
        if self._rest is not None and self._rest.snapshot is not None:
            self._pool.seal(self._rest.snapshot, "departure")  # stamped with this life, which may end before its rest
        problem = None
        try:
            self._recorder.prepare(self._layout)
        except (OSError, SaveError) as error:
            problem = f"rank {self._job.group.rank}: {error}"
        problems = [one for one in self._job.group.gather(problem) if one is not None]
        if problems:
            self._off = True
            if self._conversion is None:
                self._recorder.close(remove=True)
                self._recorder = None
            message = "no windows are kept in this life, and a failure goes back to the newest checkpoint"
            self._report(f"{message}: {'; '.join(problems)}", once=True)

    @property
    def iterations(self) -> int | None:
        """Of windows that begin now, as agreed; None where none are taken."""
        return None if self._off or self._recorder is None else self._agreed[1]

    def before_update(self) -> None:
        """The optimizer is about to change the state."""
        copied = None if self._recorder is None else self._recorder.finish()
        if copied is not None:
            self._copies.note(copied.bytes, copied.seconds, copied.overlap_seconds)

    def after_step(self, iteration: int) -> None:
        """Right after a step, before anything looks at its state."""
        conversion, rest = self._conversion, self._rest
        if conversion is not None and iteration <= conversion.last and not (rest is not None and rest.here):
            with self._void_after_an_error():
                conversion.after_step(iteration)
        self._frozen.after_step(iteration)
        if rest is not None and iteration == rest.choice.until:
            rest.end(self._job.adapter, self._pool)
            if self._traffic is not None:
                self._traffic.go_on()

    def ends_after(self, iteration: int) -> bool:
        """Whether a window ends with this iteration; the same on all ranks, right after the step."""
        if self._recorder is None or self._off or (self._conversion is not None and iteration < self._whole_at):
            return False
        step = self._step(iteration)
        return self._iterations_from(iteration) == 1 if step == 0 else step + 1 == len(self._layout.turns)

    def take(self, iteration: int, capture: Callable[[], Any], *, send: bool = False) -> Window | None:
        """At the end of an iteration: take its snapshot, or check what was repeated.

        Args:
            iteration: the finished one.
            capture: gives the whole small state.
            send: whether a window that ends here goes to the peers; the same on all ranks.

        Returns:
            A window that ends here and goes to the peers.

        Raises:
            RecoveryError: an iteration was not repeated as it was; see `Conversion.require_same`.
        """
        if self._conversion is not None:
            self._check(self._conversion, iteration)
        if self._conversion is not None or self._recorder is None or self._off:
            return None
        step = self._step(iteration)
        if step > 0:
            return self._recorder.take(step, iteration, self._frozen.outcome, send=send)
        if self._reordered or len(self._layout.turns) != self._iterations_from(iteration):
            self._layout, self._reordered = self._laid_out(self._iterations_from(iteration)), False
            if self._upstream is not None:
                self._upstream.keep(self._recorder.files * len(self._layout.turns))
        self._first = iteration
        return self._recorder.begin(self._layout, iteration, capture, send=send)

    def order(self, popularity: Mapping[str, float]) -> None:
        """Let the popular experts have their turns last, in windows that begin later; of this rank alone.

        Args:
            popularity: operator -> score of its expert, for this rank's experts; empty: the order stays.
        """
        if has_shifted(self._popularity, popularity):
            self._popularity = popularity
            self._order_units()

    def replicated(self, iteration: int | None) -> None:
        """Other machines have this window of every rank; see `Recorder.replicated`."""
        if self._recorder is not None:
            self._recorder.replicated(iteration)

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
        self._end_conversion()
        self._first = None
        if self._recorder is not None:
            self._recorder.forget()
        if self._upstream is not None:
            self._upstream.forget()

    def close(self, *, remove: bool) -> None:
        """Let the memory go; see `MemoryFile.close`."""
        self._end_conversion()
        if self._traffic is not None:
            self._traffic.stop()
        if self._upstream is not None:
            self._upstream.close(remove=remove)
        self._frozen.close()
        if self._recorder is not None:
            self._recorder.close(remove=remove)

    def _step(self, iteration: int) -> int:
        """Its place in the window that was begun last; 0 where the next one begins with it."""
        step = 0 if self._first is None else iteration - self._first
        return step if 0 < step < len(self._layout.turns) else 0

    def _iterations_from(self, iteration: int) -> int:
        """Of a window that begins with this iteration."""
        agreed_at, iterations = self._agreed
        return iterations if iteration > agreed_at else len(self._layout.turns)

    @contextmanager
    def _void_after_an_error(self) -> Iterator[None]:
        """The window is not used again: the next life would fail as this one, unless it leaves nothing out."""
        try:
            yield
        except BaseException:
            if self._recorder is not None and not self._frozen.leaves_out:
                self._recorder.forget()
            raise

    @property
    def _whole_at(self) -> int:
        """The iteration at which the state is whole again on all ranks."""
        assert self._conversion is not None
        return self._conversion.last if self._rest is None else self._rest.choice.until

    def _obstruct(self, conversion: Conversion) -> None:
        self._pool.obstacle = (
            f"the state is whole again after iteration {self._whole_at}: until then the window of iterations "
            f"{conversion.first} to {conversion.last} is replayed"
        )

    def _check(self, conversion: Conversion, iteration: int) -> None:
        if iteration <= conversion.last and not (self._rest is not None and self._rest.here):
            with self._void_after_an_error():
                conversion.require_same(iteration, REPEATED if self._frozen.leaves_out else VOID)
        if iteration >= self._whole_at:
            message = f"the iterations from {conversion.first + 1} to {self._whole_at} are replayed"
            self._end_conversion()
            left_out = f"layers were called {self._frozen.left_out} times without gradients of their weights"
            self._job.journal.event("replayed", f"{message}: the state is whole; {left_out}", iteration)

    def _end_conversion(self) -> None:
        conversion, rest, self._conversion, self._rest = self._conversion, self._rest, None, None
        if rest is not None and rest.snapshot is not None and self._traffic is not None:
            self._pool.release(rest.snapshot)
            self._traffic.go_on()
        self._frozen.end()
        if conversion is not None:
            self._pool.obstacle = None
            conversion.close()

    def _order_units(self) -> None:
        operators = self._job.shard.operators
        experts = experts_of(self._job.adapter.expert_naming(), operators)
        self._units = units_of(self._job.shard, experts, self._popularity)
        self._active = [sum(operators[one].state_bytes for one in names) for names in self._units.values()]
        self._reordered = True  # since the last layout

    def _laid_out(self, iterations: int) -> WindowLayout:
        turns = schedule(self._units, self._active, iterations)
        return WindowLayout(self._job.shard, turns, self._compute)

    def _wanted_iterations(self) -> int:
        """The fewest that this rank's forward and backward hide; as now until a copy was measured."""
        budget = self._copies.bytes
        if budget is None or not self._units:
            return len(self._layout.turns)
        frozen = [sum(map(self._compute_bytes, names)) for names in self._units.values()]
        return window_iterations(self._active, frozen, budget)

    def _most_iterations(self, wanted: int) -> int:
        """So many, or fewer where this machine lacks the memory: later turns keep weights of more iterations."""
        ranks = self._job.run.local_ranks
        left = room_in_memory(self._job.run.run_id, ranks, prefix="window-")
        room = left / (len(ranks) * (FILES if self._recorder is None else self._recorder.files))
        while wanted > 1 and self._bytes_of(wanted) > room:
            wanted = wanted * 3 // 4
        return wanted

    def _bytes_of(self, iterations: int) -> int:
        """Of a window of so many iterations."""
        turns = schedule(self._units, self._active, iterations)
        return sum(self._active) + sum(step * sum(map(self._compute_bytes, names)) for step, names in enumerate(turns))

    def _compute_bytes(self, name: str) -> int:
        values = self._job.shard.operators[name].parameter.values
        return math.prod(values.shape) * int(self._compute.get(name, values.dtype).itemsize)

    def _room_for_logs(self) -> int:
        """For this rank: half of what is left is for later windows, and for others."""
        return shared_memory_left() // (2 * len(self._job.run.local_ranks))

    def _report_log(self, message: str, level: int) -> None:
        if level == logging.INFO and self._job.group.rank != self._job.adapter.data_parallel_ranks[0]:
            return  # the first of each stage is enough
        self._job.journal.event("stages logged", message, level=level)

    def _report(self, message: str, *, once: bool = False) -> None:
        if not once or self._job.group.rank == 0:
            self._job.journal.event("window not kept", message, level=logging.WARNING)


def _files(job: Job, file_bytes: int) -> int:
    """How many windows have memory: with peers one more, for the one that they have, where all have room for it."""
    ranks = job.run.local_ranks
    if job.config.peers.replicas == 0 or len(ranks) == job.group.size:
        return FILES
    left = room_in_memory(job.run.run_id, ranks, prefix="window-")
    return FILES_WITH_PEERS if job.group.all(FILES_WITH_PEERS * file_bytes * len(ranks) <= left) else FILES
