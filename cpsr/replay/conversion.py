"""Makes a whole state of a window while the training loop repeats its iterations.

The loop goes on from the window's first iteration, with its data and random states. After each repeated step the
operators whose turn it was get the state of that iteration, and those whose turn is still to come the compute weights
of that iteration. So every forward and backward is that of the first time, and so is every gradient. After the last
step of the window each operator is what a whole snapshot of that iteration would have held, bit for bit.

Source: moevement, section 3.3. The paper's frozen operators take part in no update; here their update is overwritten,
and their weight gradients are left out where the engine can.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cpsr.checkpoint.assemble import Piece, Wanted, pieces_of, wanted_of
from cpsr.checkpoint.memory_states import MemoryState, OpenState, fill
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.engines.weight_sample import sampled
from cpsr.errors import CheckpointError, RecoveryError
from cpsr.job import Job
from cpsr.replay.schedule import SAMPLED_ELEMENTS, compute_key, sample_key
from cpsr.replay.stages import Rest, StageLogs, rest_of
from cpsr.state.codec import same_bits
from cpsr.state.shard import OperatorState, Shard

if TYPE_CHECKING:  # imports DeepSpeed
    from cpsr.engines.deepspeed_repeated import DeepSpeedRepeatedSteps

__all__ = ["Conversion", "load_window"]

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
        fill([window], wanted_of(Shard({}, into.others)), state.path)
        for name, anchor in window.taken_at(into).items():
            if anchor < state.iteration:
                raise CheckpointError(f"the window holds {name} of iteration {anchor}, before its first")
            operator = into.operators[name]
            _fill(window, anchor, state.iteration, state.iteration, operator)
            for moment in operator.moments.values() if anchor > state.iteration else ():
                moment.zero_()  # until its own come
        return window.scalars()["start"]


class Conversion:
    """The replay of the window that a life began with, until the state is whole on all ranks.

    This rank computes the iterations again or, in a pipeline, may rest. What an operator whose turn is still to come on
    every rank becomes in a repeated step is overwritten after it. So its weight gradients are left out, where what the
    step makes of all gradients together comes from the first time. That is done in the first life after the window's
    own alone: if it ends early, whatever the reason, the next life computes every gradient.

    Args:
        job: this rank's; its engine has what `load_window` gave.
        pool: takes no snapshot while the state is not whole.
        window: that is replayed, as one of this life.
        left: the same, as the life before left it.
        steps: leaves out gradients; None where the engine computes all.
        logs: of this rank's stage; None where nothing is logged, on all ranks.
        give_up: makes the window void, on every machine.

    Attributes:
        first: iteration of the window that the loop goes on from.
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
        steps: "DeepSpeedRepeatedSteps | None",
        logs: StageLogs | None,
        give_up: Callable[[], None],
    ) -> None:
        self._job, self._pool, self._left, self._steps, self._logs = job, pool, left, steps, logs
        pipeline = job.adapter.pipeline
        self._give_up, self._traffic = give_up, None if pipeline is None else pipeline.traffic
        self._window, self._name = OpenState(window), window.path.name
        self._anchors = window.ages  # by operator, the iteration at which the window has it whole
        scalars = self._window.scalars()
        self._start = scalars["start"]  # the small state of the first iteration
        self._outcomes: list[Any] = scalars["outcomes"]  # of the steps after that, or None
        self._sealed_in_life = int(scalars["life"])
        self._rest: Rest | None = None
        self._turns: dict[str, int] = {}  # of operators, the first on any rank; empty: nothing is left out
        self.first, self.last = window.iteration, int(scalars["last"])
        self._end_at(self.last)

    @property
    def rests(self) -> bool:
        """Whether this rank computes nothing, until its rest ends."""
        return self._rest is not None and self._rest.snapshot is not None

    def rest(self) -> None:
        """Find which stages of a pipeline need not compute; a collective, once the window is kept on all ranks."""
        if self._logs is None or self._traffic is None:
            return
        rest = self._rest = rest_of(self._job, self._pool, self._left, self.last, self._start, self._logs)
        if rest is None:
            return
        self._end_at(rest.until)
        if rest.steps is not None:
            self._traffic.repeat(rest.steps)
        if self._job.group.rank == 0:
            stages = ", ".join(map(str, rest.stages))
            message = (
                f"stages {stages} have the state of iteration {self.until} and rest: the others replay iterations "
                f"{self.first + 1} to {self.until} from what these had sent"
            )
            self._job.journal.event("stages rest", message, self.first)

    def start(self) -> None:
        """Agree on what is left out; a collective, once states of the life before are void.

        The one that this rank rests on is stamped with this life.
        """
        first_time = self._job.journal.life == self._sealed_in_life + 1
        able = self._steps is not None and first_time and None not in self._outcomes
        anchors = self._job.group.gather(self._anchors if able else None)
        for own in anchors if None not in anchors else ():
            for name, turn in own.items():
                self._turns[name] = min(turn, self._turns.get(name, turn))
        if self._logs is not None:
            self._logs.paused = bool(self._turns)
        self._leave_out(self.first + 1)
        if self._rest is not None and self._rest.snapshot is not None:
            self._pool.seal(self._rest.snapshot, "departure")

    def after_step(self, iteration: int) -> None:
        """Right after a step, before anything looks at its state: give the engine what the window has of it."""
        self._repeat(self._convert, iteration)
        if self._rest is not None and self._traffic is not None and iteration == self.until:
            self._rest.end(self._job.adapter, self._pool)
            self._traffic.go_on()
        self._leave_out(iteration + 1)

    def check(self, iteration: int) -> bool:
        """At the end of an iteration: compare it with the first time.

        Returns:
            Whether the state is whole.

        Raises:
            RecoveryError: see `require_same`.
        """
        self._repeat(self.require_same, iteration)
        if iteration < self.until:
            return False
        calls = 0 if self._steps is None else self._steps.left_out
        left_out = f"layers were called {calls} times without gradients of their weights"
        message = f"the iterations from {self.first + 1} to {self.until} are replayed: the state is whole; {left_out}"
        self._job.journal.event("replayed", message, iteration)
        return True

    def require_same(self, iteration: int) -> None:
        """Compare the weights with those of the first time, when the loop has finished a repeated iteration.

        Raises:
            RecoveryError: they differ: what was repeated is not what was trained.
        """
        step = iteration - self.first
        for name, operator in self._job.adapter.shard().operators.items():
            values, few = operator.parameter.values.detach(), f"other/{sample_key(step, name)}"
            if self._anchors[name] >= iteration:
                whole = self._anchors[name] == iteration
                key = f"param/{name}" if whole else f"other/{compute_key(step, name)}"
                before, cause = self._window.as_it_is(key), _WRITES
            elif few in self._window.tensors:
                values, before, cause = sampled(values, SAMPLED_ELEMENTS), self._window.as_it_is(few), _DIFFERS
            else:
                continue
            if not same_bits(values.to(before.device), before.to(values.dtype)):
                raise RecoveryError(
                    f"iteration {iteration} was repeated from the window of iterations {self.first} to {self.last}, "
                    f"and {name} is not what it was the first time. {cause} The window ({self._name}) is not used "
                    "again, on any machine: the next start goes back to the newest checkpoint, or to the beginning. "
                    "Set replay.enabled to false if this repeats"
                )

    def close(self) -> None:
        """It has ended, or is given up."""
        if self._rest is not None and self._rest.snapshot is not None:
            self._pool.release(self._rest.snapshot)
            if self._traffic is not None:
                self._traffic.go_on()
        if self._steps is not None:
            self._steps.repeat(None)
        if self._logs is not None:
            self._logs.paused = False
        self._pool.obstacle = None
        del self._window

    def _convert(self, iteration: int) -> None:
        with torch.no_grad():
            for name, operator in self._job.adapter.shard().operators.items():
                if self._anchors[name] >= iteration:  # the others are left to the training
                    _fill(self._window, self._anchors[name], self.first, iteration, operator)
        self._job.adapter.push_down()

    def _repeat(self, act: Callable[[int], None], iteration: int) -> None:
        """Act on an iteration that this rank repeats. An error makes the window void: the next life would fail too."""
        if iteration > self.last or self.rests:
            return
        try:
            act(iteration)
        except Exception:
            self._give_up()
            raise

    def _leave_out(self, iteration: int) -> None:
        """The next step is that of this iteration."""
        if self._steps is not None and self._turns:
            outcome = self._outcomes[iteration - self.first - 1] if iteration <= self.last else None
            self._steps.repeat(outcome, [name for name, turn in self._turns.items() if turn >= iteration])

    def _end_at(self, until: int) -> None:
        self.until = until
        self._pool.obstacle = (
            f"the state is whole again after iteration {until}: until then the window of iterations {self.first} to "
            f"{self.last} is replayed"
        )


def _fill(window: OpenState, anchor: int, first: int, iteration: int, operator: OperatorState) -> None:
    """Write what a window that begins at `first` has of an operator at this iteration: all of it, or compute weights.

    It has it whole at the iteration `anchor`, which is not before this one.
    """
    if anchor == iteration:
        wanted = {key: Wanted(piece, target) for key, piece, target in pieces_of(operator)}
        # Zeros that are one number cannot be written: the optimizer has still to create that moment.
        for key in [key for key, one in wanted.items() if one.target.numel() > 1 and one.target.stride() == (0,)]:
            del wanted[key]
            if bool(window.as_it_is(key).any()):
                raise CheckpointError(f"the optimizer has no {key} yet, and had it the first time")
        fill([window], wanted, window.state.path)
        return
    values, key = operator.parameter.values, f"other/{compute_key(iteration - first, operator.name)}"
    dtype = window.as_it_is(key).dtype
    weights = values if dtype == values.dtype else torch.empty(values.shape, dtype=dtype, device="cpu")
    fill([window], {key: Wanted(Piece(tuple(values.shape), dtype, 0, values.numel()), weights)}, window.state.path)
    if weights is not values:
        values.copy_(weights)
