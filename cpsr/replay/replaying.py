"""The replay of the window that a life began with, until the state is whole on all ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cpsr.checkpoint.memory_states import MemoryState
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.job import Job
from cpsr.replay.conversion import REPEATED, VOID, Conversion
from cpsr.replay.frozen import FrozenGradients
from cpsr.replay.resting import Rest, rest_of
from cpsr.replay.stage_logs import StageLogs

__all__ = ["Replaying"]


class Replaying:
    """Of one rank, which computes the iterations again or, in a pipeline, may rest.

    Args:
        job: this rank's.
        pool: takes no snapshot while the state is not whole.
        window: that is replayed, as one of this life.
        left: the same, as the life before left it.
        frozen: leaves out gradients.
        logs: of this rank's stage.

    Attributes:
        last: iteration of the window after which its operators are whole.
        until: iteration after which the state is whole on all ranks.

    Raises:
        CheckpointError: the window is damaged.
    """

    def __init__(
        self,
        job: Job,
        pool: SnapshotPool,
        window: MemoryState,
        left: MemoryState,
        frozen: FrozenGradients,
        logs: StageLogs,
    ) -> None:
        self._job, self._pool, self._left, self._frozen, self._logs = job, pool, left, frozen, logs
        self._conversion = Conversion(window, job.adapter)
        self._rest: Rest | None = None
        self.first, self.last = self._conversion.first, self._conversion.last
        self._end_at(self.last)

    def rest(self) -> None:
        """Find which stages of a pipeline need not compute; a collective, once the window is kept on all ranks."""
        if not self._logs.of_pipeline:
            return
        window = self._left, self.last, self._conversion.small_state()
        rest = self._rest = rest_of(self._job, self._pool, *window, self._logs.upstream)
        if rest is None:
            return
        self._end_at(rest.choice.until)
        if rest.here:
            self._logs.repeat(rest)
        if self._job.group.rank == 0:
            stages = ", ".join(map(str, rest.choice.stages))
            message = (
                f"stages {stages} have the state of iteration {self.until} and rest: the others replay iterations "
                f"{self.first + 1} to {self.until} from what these had sent"
            )
            self._job.journal.event("stages rest", message, self.first)

    def start(self) -> None:
        """Agree on what is left out; a collective, once states of the life before are void."""
        self._frozen.plan(self._conversion)
        self._logs.pause(paused=self._frozen.leaves_out)
        if self._rest is not None and self._rest.snapshot is not None:
            self._pool.seal(self._rest.snapshot, "departure")  # stamped with this life, which may end before its rest

    def after_step(self, iteration: int, forget: Callable[[], None]) -> None:
        """Right after a step, before anything looks at its state.

        Args:
            iteration: of the step.
            forget: makes the window void.
        """
        if iteration <= self.last and not self.rests:
            with self._void_after_an_error(forget):
                self._conversion.after_step(iteration)
        if self._rest is not None and iteration == self.until:
            self._rest.end(self._job.adapter, self._pool)
            self._logs.go_on()

    def check(self, iteration: int, forget: Callable[[], None]) -> bool:
        """At the end of an iteration: compare it with the first time.

        Returns:
            Whether the state is whole.

        Raises:
            RecoveryError: see `Conversion.require_same`.
        """
        if iteration <= self.last and not self.rests:
            with self._void_after_an_error(forget):
                self._conversion.require_same(iteration, REPEATED if self._frozen.leaves_out else VOID)
        if iteration < self.until:
            return False
        left_out = f"layers were called {self._frozen.left_out} times without gradients of their weights"
        message = f"the iterations from {self.first + 1} to {self.until} are replayed: the state is whole; {left_out}"
        self._job.journal.event("replayed", message, iteration)
        return True

    def close(self) -> None:
        """It has ended, or is given up."""
        if self._rest is not None and self._rest.snapshot is not None:
            self._pool.release(self._rest.snapshot)
            self._logs.go_on()
        self._frozen.end()
        self._logs.pause(paused=False)
        self._pool.obstacle = None
        self._conversion.close()

    @property
    def rests(self) -> bool:
        """Whether this rank computes nothing, until its rest ends."""
        return self._rest is not None and self._rest.here

    def _end_at(self, until: int) -> None:
        self.until = until
        self._pool.obstacle = (
            f"the state is whole again after iteration {until}: until then the window of iterations {self.first} to "
            f"{self.last} is replayed"
        )

    @contextmanager
    def _void_after_an_error(self, forget: Callable[[], None]) -> Iterator[None]:
        """The window is not used again: the next life would fail as this one, unless it leaves nothing out."""
        try:
            yield
        except BaseException:
            if not self._frozen.leaves_out:
                forget()
            raise
