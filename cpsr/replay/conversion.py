"""Makes a whole state of a window while the training loop repeats its iterations.

The loop goes on from the window's first iteration, with its data and random states. After each repeated step the
operators whose turn it was get the state of that iteration, and those whose turn is still to come the compute weights
of that iteration. So every forward and backward is that of the first time, and so is every gradient. After the last
step of the window each operator is what a whole snapshot of that iteration would have held, bit for bit.

Source: moevement, section 3.3. The paper's frozen operators take part in no update; here their update is overwritten,
and their weight gradients are left out where the engine can.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from cpsr.checkpoint.memory_reader import OpenState, ages_in_memory
from cpsr.checkpoint.memory_states import MemoryState
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.engines.adapter import EngineAdapter, RepeatedSteps
from cpsr.engines.weight_sample import sampled
from cpsr.errors import CheckpointError, RecoveryError
from cpsr.job import Job
from cpsr.replay.schedule import SAMPLED_ELEMENTS, compute_key, sample_key
from cpsr.replay.stages import Rest, StageLogs, rest_of
from cpsr.state.codec import same_bits
from cpsr.state.shard import OperatorState, Shard

__all__ = ["Conversion", "Replaying", "load_window"]

_DIFFERS = "Something in the step is not deterministic, or its data, code or libraries are others than before."
_WRITES = (
    "It was given its values right after the step, and the loop has written to it since: what the loop does after a "
    "step cannot be repeated so."
)


def load_window(state: MemoryState, into: Shard) -> Any:
    """Copy what a window has of its first iteration into the views of `into`; moments that it lacks become zero.

    Returns:
        The small state of that iteration.

    Raises:
        CheckpointError: the window is no longer whole, or of another model or split; `into` holds anything.
    """
    with OpenState(state) as window, torch.no_grad():
        anchors = window.taken_at(into)
        for name, values in into.others.items():
            values.copy_(window.tensor(f"other/{name}", values))
        for name, operator in into.operators.items():
            _fill(window, anchors[name], state.iteration, state.iteration, operator)
        return window.scalars()["start"]


class Conversion:
    """One window, from its first iteration to its last.

    Args:
        state: the window, of this life.
        adapter: the engine, which has what `load_window` gave.

    Attributes:
        first: the iteration that the loop goes on from.
        last: the iteration after which the state is whole.
        anchors: by operator, the iteration at which the window has it whole.
        outcomes: of the steps after the first iteration, as `RepeatedSteps.outcome` gave them, or None.
        sealed_in_life: number of the life that took the window.

    Raises:
        CheckpointError: the window is no longer whole.
    """

    def __init__(self, state: MemoryState, adapter: EngineAdapter) -> None:
        self._window, self._adapter = OpenState(state), adapter
        self._name = state.path.name
        self.anchors: Mapping[str, int] = ages_in_memory(state)
        scalars = self._window.scalars()
        self.first, self.last = state.iteration, int(scalars["last"])
        self.outcomes: list[Any] = scalars["outcomes"]
        self.sealed_in_life = int(scalars["life"])

    def small_state(self) -> Any:
        """Of the first iteration."""
        return self._window.scalars()["start"]

    def after_step(self, iteration: int) -> None:
        """Give the engine what the window has of this iteration; a collective where `push_down` is one."""
        with torch.no_grad():
            for name, operator in self._adapter.shard().operators.items():
                _fill(self._window, self.anchors[name], self.first, iteration, operator, evolving=True)
        self._adapter.push_down()

    def require_same(self, iteration: int) -> None:
        """Compare the weights with those of the first time, when the loop has finished a repeated iteration.

        Raises:
            RecoveryError: they differ: what was repeated is not what was trained.
        """
        step = iteration - self.first
        for name, operator in self._adapter.shard().operators.items():
            values, few = operator.parameter.values.detach(), f"other/{sample_key(step, name)}"
            if self.anchors[name] >= iteration:
                before, cause = self._weights(name, step), _WRITES
            elif self._window.has(few):
                values, before, cause = sampled(values, SAMPLED_ELEMENTS), self._window.as_it_is(few), _DIFFERS
            else:
                continue
            if not same_bits(values.to(before.device), before.to(values.dtype)):
                raise RecoveryError(
                    f"iteration {iteration} was repeated from the window of iterations {self.first} to {self.last}, "
                    f"and {name} is not what it was the first time. {cause} The window ({self._name}) is not used "
                    "again: the next start goes on from another state. Set replay.enabled to false if this repeats"
                )

    def _weights(self, name: str, step: int) -> torch.Tensor:
        whole = self.anchors[name] == self.first + step
        return self._window.as_it_is(f"param/{name}" if whole else f"other/{compute_key(step, name)}")

    def close(self) -> None:
        """Let the file go."""
        del self._window


def _fill(
    window: OpenState, anchor: int, first: int, iteration: int, operator: OperatorState, *, evolving: bool = False
) -> None:
    """What a window has of an operator at this iteration.

    Args:
        window: of it.
        anchor: iteration at which the window has the operator whole.
        first: iteration of the window.
        iteration: the present one.
        operator: views that are written.
        evolving: an operator with an earlier anchor is left to the training.
    """
    values, name = operator.parameter.values, operator.name
    if anchor == iteration:
        values.copy_(window.tensor(f"param/{name}", values))
        for moment, target in operator.moments.items():
            source = window.tensor(f"moment/{moment}/{name}", target)
            if not _is_absent(target):
                target.copy_(source)
            elif bool(source.any()):
                raise CheckpointError(f"the optimizer has no {moment} of {name} yet, and had it the first time")
    elif anchor > iteration:
        values.copy_(window.as_it_is(f"other/{compute_key(iteration - first, name)}").view(values.shape))
        for target in operator.moments.values() if not evolving else ():
            target.zero_()  # until its own come
    elif not evolving:
        raise CheckpointError(f"the window holds {name} of iteration {anchor}, before its first")


def _is_absent(moment: torch.Tensor) -> bool:
    """Whether the optimizer has still to create it: its zeros are one number, which cannot be written."""
    return moment.numel() > 1 and moment.stride() == (0,)


class Replaying:
    """The replay of the window that a life began with, until the state is whole on all ranks.

    This rank computes the iterations again or, in a pipeline, may rest. What an operator whose turn is still to come on
    every rank becomes in a repeated step is overwritten after it. So its weight gradients are left out, where what the
    step makes of all gradients together comes from the first time. That is done in the first life after the window's
    own alone: if it ends early, whatever the reason, the next life computes every gradient.

    Args:
        job: this rank's.
        pool: takes no snapshot while the state is not whole.
        window: that is replayed, as one of this life.
        left: the same, as the life before left it.
        steps: leaves out gradients; None where the engine computes all.
        logs: of this rank's stage.

    Attributes:
        first: iteration that the loop goes on from.
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
        steps: RepeatedSteps | None,
        logs: StageLogs,
    ) -> None:
        self._job, self._pool, self._left, self._steps, self._logs = job, pool, left, steps, logs
        self._conversion = Conversion(window, job.adapter)
        self._rest: Rest | None = None
        self._turns: dict[str, int] = {}  # of operators, the first on any rank; empty: nothing is left out
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
        """Agree on what is left out; a collective, once states of the life before are void.

        The one that this rank rests on is stamped with this life.
        """
        conversion = self._conversion
        first_time = self._job.journal.life == conversion.sealed_in_life + 1
        able = self._steps is not None and first_time and None not in conversion.outcomes
        anchors = self._job.group.gather(dict(conversion.anchors) if able else None)
        for own in anchors if None not in anchors else ():
            for name, turn in own.items():
                self._turns[name] = min(turn, self._turns.get(name, turn))
        self._logs.pause(paused=bool(self._turns))
        self._leave_out(self.first + 1)
        if self._rest is not None and self._rest.snapshot is not None:
            self._pool.seal(self._rest.snapshot, "departure")

    def after_step(self, iteration: int, forget: Callable[[], None]) -> None:
        """Right after a step, before anything looks at its state.

        Args:
            iteration: of the step.
            forget: makes the window void.
        """
        if iteration <= self.last and not self.rests:
            with _void_after_an_error(forget):
                self._conversion.after_step(iteration)
        if self._rest is not None and iteration == self.until:
            self._rest.end(self._job.adapter, self._pool)
            self._logs.go_on()
        self._leave_out(iteration + 1)

    def check(self, iteration: int, forget: Callable[[], None]) -> bool:
        """At the end of an iteration: compare it with the first time.

        Returns:
            Whether the state is whole.

        Raises:
            RecoveryError: see `Conversion.require_same`.
        """
        if iteration <= self.last and not self.rests:
            with _void_after_an_error(forget):
                self._conversion.require_same(iteration)
        if iteration < self.until:
            return False
        calls = 0 if self._steps is None else self._steps.left_out
        left_out = f"layers were called {calls} times without gradients of their weights"
        message = f"the iterations from {self.first + 1} to {self.until} are replayed: the state is whole; {left_out}"
        self._job.journal.event("replayed", message, iteration)
        return True

    def close(self) -> None:
        """It has ended, or is given up."""
        if self._rest is not None and self._rest.snapshot is not None:
            self._pool.release(self._rest.snapshot)
            self._logs.go_on()
        if self._steps is not None:
            self._steps.repeat(None)
        self._logs.pause(paused=False)
        self._pool.obstacle = None
        self._conversion.close()

    def _leave_out(self, iteration: int) -> None:
        """The next step is that of this iteration."""
        if self._steps is not None and self._turns:
            outcome = self._conversion.outcomes[iteration - self.first - 1] if iteration <= self.last else None
            self._steps.repeat(outcome, [name for name, turn in self._turns.items() if turn >= iteration])

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
def _void_after_an_error(forget: Callable[[], None]) -> Iterator[None]:
    """The window is not used again: the next life would fail as this one."""
    try:
        yield
    except BaseException:
        forget()
        raise
