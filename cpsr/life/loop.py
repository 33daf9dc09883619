"""The user's training loop: what it has beside its run, and the work deferred to the end of its iteration."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cpsr.config import CPSRConfig
from cpsr.elastic.global_batch import GlobalBatch
from cpsr.engines.adapter import EngineAdapter
from cpsr.job import Job
from cpsr.life.draws import DrawWarnings
from cpsr.life.events import EventCallbacks
from cpsr.life.run_state import RunState
from cpsr.ranks.group import Group
from cpsr.restart.probes import LossFunction, Probes
from cpsr.state.losses import LossRecorder, Step

__all__ = ["Loop", "LoopTail"]


@dataclass(frozen=True)
class _Waiting:
    act: Callable[[], None]
    at_request: bool  # a request ends the iteration
    saves: bool


class LoopTail:
    """Defers work to the end of the loop's iteration: until then the loop may still change the state of its step.

    Clipping, schedules, moving averages, counters and evaluations follow the step. A checkpoint captured at the step
    would miss their effects.

    An iteration ends when the loop requests its next batch from `recovery.resume`. Where some rank requests none, it
    ends when the next training forward or update begins. Random states and the position in the data are then those of
    the step, since the loop has drawn its next batch. A pipeline requests its batches inside `train_batch`, while other
    stages wait for them. Its iteration ends when `train_batch` is called.

    Args:
        group: all ranks.
        state: keeps random states and position from before the next batch is drawn.
        pipeline: whether the engine requests the batches.

    Attributes:
        ended: the loop has ended, or the user replaces its state: no step follows what is being done.
    """

    def __init__(self, group: Group, state: RunState, pipeline: bool) -> None:
        self._group = group
        self._state = state
        self._pipeline = pipeline
        self._thread = threading.get_ident()
        self._requests = False  # the loop has requested a batch in this life
        self._asked = False  # since the last step
        self._shows_end = False  # the iteration of the last step took a batch
        self._waiting: list[_Waiting] = []
        self.ended = False

    @property
    def is_here(self) -> bool:
        """Whether this is the thread that trains: others fetch batches ahead."""
        return threading.get_ident() == self._thread

    def on_request(self) -> None:
        """The loop requests a batch; requests of other threads are ignored."""
        if not self.is_here or self._pipeline:
            return
        self._requests = self._asked = True
        if not self._waiting:
            return
        self._state.release()
        waiting, self._waiting = self._waiting, [one for one in self._waiting if not one.at_request]
        for one in waiting:
            if one.at_request:
                one.act()
        if self._waiting:
            self._state.hold()

    def after_step(self) -> None:
        """A step is complete."""
        self._shows_end, self._asked = self._asked, False

    @property
    def saves(self) -> bool:
        """Whether the state is to be saved as soon as it has a position in the data."""
        return any(one.saves for one in self._waiting)

    def defer(self, act: Callable[[], None], *, saves: bool = False) -> None:
        """Call `act` at the end of this iteration, at one place on all ranks; a collective, after a step.

        Args:
            act: is called once.
            saves: it saves the state; between two steps on one batch, which no position tells, it waits for the last.
        """
        self._defer(act, at_request=self._group.all(self._requests), saves=saves)

    def defer_here(self, act: Callable[[], None], *, saves: bool = False) -> None:
        """As `defer`, on this rank alone: `act` is no collective."""
        self._defer(act, at_request=self._requests, saves=saves)

    def _defer(self, act: Callable[[], None], *, at_request: bool, saves: bool) -> None:
        # The next batch may be drawn without a request; or it is in hand, and a restart repeats what follows the step.
        if not (self._shows_end or self._pipeline) or self._state.draws.untrained:
            self._state.hold()
        self._waiting.append(_Waiting(act, at_request, saves and at_request))

    def finish(self, *, ended: bool = False) -> None:
        """Run the deferred work: the iteration is over, or the next forward or update is about to begin.

        Args:
            ended: no further step follows.
        """
        self.ended = ended
        inside = not ended and not self._pipeline and self._state.inside_batch
        waiting, self._waiting = self._waiting, []
        while waiting:
            one = waiting.pop(0)
            if inside and one.saves:
                self._waiting.append(one)
            else:
                one.act()
        if not self._waiting:
            self._state.release()

    def drop(self) -> None:
        """Drop the deferred work."""
        self._waiting.clear()
        self._state.release()


class Loop:
    """The training without its run: the engine, its losses, the user's registered objects and callbacks.

    Args:
        adapter: the engine.
        config: the run's configuration.
        loss_fn: the user's loss of a batch; None if the module returns it.
        probe_batches: the user's held-out batches; None keeps recent inputs.

    Attributes:
        tail: work deferred to the end of the loop's iteration; from `begin_life` on.
    """

    tail: LoopTail
    _warnings: DrawWarnings

    def __init__(
        self,
        adapter: EngineAdapter,
        config: CPSRConfig,
        loss_fn: LossFunction | None,
        probe_batches: Sequence[Any] | None,
    ) -> None:
        from cpsr.learning.learning import Learning  # with the predictor; who imports CPSR does not wait for it

        self.adapter = adapter
        self.loss_fn = loss_fn
        self.events = EventCallbacks()
        self.losses = LossRecorder()
        self.probes = Probes(self.adapter, config.restart.probe_batches, loss_fn, probe_batches)
        self.learning = Learning(self.adapter, config)
        waiting = partial(self.learning.bubbles.waiting, "data")
        batch = GlobalBatch(self.adapter, config.elastic.global_batch_size)
        self.state = RunState(
            self.adapter,
            self.losses,
            self.probes,
            self.learning.learner,
            waiting,
            batch,
            config.restart.hyperparameters,
            exact=config.mode == "exact",
        )

    def begin_life(self, job: Job) -> None:
        """A life begins."""
        self.tail = LoopTail(job.group, self.state, pipeline=job.adapter.pipeline is not None)
        self._warnings = DrawWarnings(job, self.state.draws)

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training forward begins, with these inputs."""
        self.state.draws.forward()
        self.probes.on_forward(args, kwargs)

    def after_step(self, step: Step) -> None:
        """A step is complete: what the loop draws from here on belongs to the next."""
        self.learning.bubbles.end_iteration()
        self.tail.after_step()
        self.state.end_step()
        self._warnings.after_step()
        if step.applied:
            self.state.count_update(step.learning_rate)

    def follow(self, iteration: int, saved_iteration: int | None) -> None:
        """Notify the learner and the user's callbacks of the newest checkpoint."""
        self.learning.at_step(saved_iteration, self.state.history_start)
        self.events.at_step(iteration, saved_iteration)

    def at_checkpoint(self, iteration: int) -> None:
        """A checkpoint has begun."""
        self._warnings.at_checkpoint()
        self.learning.at_checkpoint(iteration)
