"""The user's training loop: what it has beside its run, its steps, and work deferred to the end of its iteration."""

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import Optimizer

from cpsr.config import CPSRConfig
from cpsr.elastic.global_batch import GlobalBatch
from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.optimizer_state import learning_rates, mean_rate
from cpsr.engines.own_time import OwnTime
from cpsr.job import Job
from cpsr.journal import RankJournal, StepRow
from cpsr.life.drawn_batches import DrawWarnings
from cpsr.life.events import EventCallbacks
from cpsr.life.run_state import RunState
from cpsr.planner.plan import Plan, Situation
from cpsr.ranks.group import Group
from cpsr.restart.prediction import LossFunction, Probes
from cpsr.state.losses import LossRecorder, Step

__all__ = ["FAILURES_ITERATIONS", "Loop", "LoopTail", "Steps"]

TIMED_ITERATIONS = 50  # the planner's iteration time is the median of this many
FAILURES_ITERATIONS = 20  # between two checks whether a thread that learns or plans has failed
UNKNOWN_ITERATIONS = 20  # without a loss, before that is reported


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
        state: keeps random states and position from before the next batch is drawn.
        pipeline: whether the engine requests the batches.

    Attributes:
        ended: the loop has ended, or the user replaces its state: no step follows what is being done.
        thread: that trains; others fetch batches ahead.
        waiting: what is deferred, as the save of a state is.
    """

    def __init__(self, group: Group, state: RunState, pipeline: bool) -> None:
        self._group = group
        self._state = state
        self._pipeline = pipeline
        self.thread = threading.get_ident()
        self._requests = False  # the loop has requested a batch in this life
        self._asked = False  # since the last step
        self._shows_end = False  # the iteration of the last step took a batch
        self.waiting: list[_Waiting] = []
        self.ended = False

    def on_request(self) -> None:
        """The loop requests a batch; requests of other threads are ignored."""
        if self._pipeline or threading.get_ident() != self.thread:
            return
        self._requests = self._asked = True
        if not self.waiting:
            return
        self._state.release()
        waiting, self.waiting = self.waiting, [one for one in self.waiting if not one.at_request]
        for one in waiting:
            if one.at_request:
                one.act()
        if self.waiting:
            self._state.hold()

    def after_step(self) -> None:
        """A step is complete."""
        self._shows_end, self._asked = self._asked, False

    @property
    def saves(self) -> bool:
        """Whether the state is to be saved as soon as it has a position in the data."""
        return any(one.saves for one in self.waiting)

    @property
    def between_steps(self) -> bool:
        """Whether the loop trains once more on the batch of its last step: no position tells such a state."""
        return not self.ended and not self._pipeline and self._state.inside_batch

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
        self.waiting.append(_Waiting(act, at_request, saves and at_request))

    def finish(self, *, ended: bool = False) -> None:
        """Run the deferred work: the iteration is over, or the next forward or update is about to begin.

        Args:
            ended: no further step follows.
        """
        self.ended = ended
        waiting, self.waiting = self.waiting, []
        while waiting:
            one = waiting.pop(0)
            if one.saves and self.between_steps:
                self.waiting.append(one)
            else:
                one.act()
        self.ended = False
        if not self.waiting:
            self._state.release()

    def drop(self) -> None:
        """Drop the deferred work."""
        self.waiting.clear()
        self._state.release()


class Loop:
    """The training without its run: the engine, its losses, the user's registered objects and callbacks.

    Args:
        adapter: the engine.
        loss_fn: the user's loss of a batch; None if the module returns it.
        probe_batches: the user's held-out batches; None keeps recent inputs.

    Attributes:
        own: this rank's own time.
        tail: work deferred to the end of the loop's iteration; from `begin_life` on.
        warnings: of loops that take their batches otherwise; likewise.
    """

    tail: LoopTail
    warnings: DrawWarnings

    def __init__(
        self,
        adapter: EngineAdapter,
        config: CPSRConfig,
        loss_fn: LossFunction | None,
        probe_batches: Sequence[Any] | None,
    ) -> None:
        from cpsr.learning.learning import Learning  # with the predictor; who imports CPSR does not wait for it

        self.adapter = adapter
        self.events = EventCallbacks()
        self.own = OwnTime.of(adapter.device)
        self.losses = LossRecorder()
        kept = math.ceil(config.restart.probe_batches / len(adapter.data_parallel_ranks))
        self.probes = Probes(self.adapter, kept, loss_fn, probe_batches)
        self.learning = Learning(self.adapter, config)
        waiting = partial(self.learning.bubbles.waiting, "data")
        batch = GlobalBatch(self.adapter, config.elastic.global_batch_size)
        self.state = RunState(
            self.adapter,
            self.losses,
            self.probes,
            self.learning.learner,
            waiting,
            self.own.loading,
            batch,
            config.restart.hyperparameters,
            exact=config.mode == "exact",
        )

    def begin_life(self, job: Job) -> None:
        """A life begins."""
        self._followed: int | None = None  # the newest checkpoint that the learner knows
        self.tail = LoopTail(job.group, self.state, pipeline=job.adapter.pipeline is not None)
        self.warnings = DrawWarnings(job, self.state.draws)

    def after_step(self, step: Step) -> None:
        """A step is complete: what the loop draws from here on belongs to the next."""
        self.learning.bubbles.end_iteration()
        self.tail.after_step()
        self.state.end_step(step.learning_rate if step.applied else 0.0)

    def follow(self, iteration: int, saved_iteration: int | None) -> None:
        """A step is complete: tell the learner and the user's callbacks of the newest checkpoint."""
        self.warnings.after_step()
        if saved_iteration != self._followed or iteration % FAILURES_ITERATIONS == 0:
            self._followed = saved_iteration
            self.learning.at_step(saved_iteration, self.state.history_start)
        self.events.note_saved(saved_iteration)

    def at_checkpoint(self) -> None:
        """A checkpoint has begun."""
        self.warnings.at_checkpoint()


class Steps:
    """Times the steps of one life, and passes them on once their losses have arrived from the device.

    Args:
        adapter: the engine.
        journal: of this rank.
        losses: of its steps.
        registered: optimizers that the user has registered so far.

    Attributes:
        iteration: of the newest step, or of the state that has taken its place; 0 before the first.
        learning_rate: of the newest update.
        rates: its learning rates by parameter group, those of registered optimizers last.
    """

    def __init__(
        self, adapter: EngineAdapter, journal: RankJournal, losses: LossRecorder, registered: Sequence[Optimizer]
    ) -> None:
        self._optimizers, self._registered = adapter.optimizers, registered
        self._journal = journal
        self._losses = losses
        self.iteration = 0
        self.before_update()
        self._seconds: deque[float] = deque(maxlen=TIMED_ITERATIONS)
        self._ended = time.perf_counter()
        # Iterations of this life without a loss; None once one has come, or was reported missing.
        self._without_loss: int | None = 0 if journal.rank == 0 else None

    def start_clock(self) -> None:
        """Training begins: the time before does not count to its first step."""
        self.resume_clock()
        self.before_update()

    def resume_clock(self) -> None:
        """The time since the last step does not count to the next one."""
        self._ended = time.perf_counter()

    def before_update(self) -> None:
        """An update begins: it uses the current learning rates."""
        rates = learning_rates(self._optimizers)
        self.learning_rate = mean_rate(rates)
        self.rates = [*rates, *learning_rates(self._registered)] if self._registered else rates

    def end(self, iteration: int, applied: bool) -> Step:
        """A step is complete."""
        now, self.iteration = time.perf_counter(), iteration
        seconds, self._ended = now - self._ended, now
        self._seconds.append(seconds)
        step = Step(iteration, self.learning_rate, seconds, applied)
        if arrived := self._losses.end_iteration(step):
            self._forward(arrived)
        return step

    @property
    def median_seconds(self) -> float:
        """Of the last steps; 0 before the first."""
        return statistics.median(self._seconds) if self._seconds else 0.0

    def situation(self, iteration: int, peak_learning_rate: float, plan: Plan) -> Situation:
        """The planner's view of the training now."""
        return Situation(iteration, self.learning_rate, peak_learning_rate, self.median_seconds, plan)

    def flush(self, *, wait: bool) -> None:
        """Forward the losses that have arrived; at the end of a life wait for the others."""
        self._forward(self._losses.flush(wait))

    def _forward(self, steps: Sequence[Step]) -> None:
        if steps:
            self._journal.record(*(StepRow(life=self._journal.life, **step._asdict()) for step in steps))
            self._report_missing(steps)

    def _report_missing(self, steps: Sequence[Step]) -> None:
        """Say once, after the first iterations of a life, that the run knows no loss."""
        if self._without_loss is None:
            return
        self._without_loss += len(steps)
        if any(step.loss is not None for step in steps):
            self._without_loss = None
        elif self._without_loss >= UNKNOWN_ITERATIONS:
            self._journal.event(
                "no loss",
                f"no loss is known after {self._without_loss} iterations, because the model does not return it: the "
                "loss curve stays empty, predicted states cannot be checked, and planner.policy theorem1 never moves "
                "the interval. Call recovery.log_loss(loss) before optimizer.step()",
                steps[-1].iteration,
            )
            self._without_loss = None
