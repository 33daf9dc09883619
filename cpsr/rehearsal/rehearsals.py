"""When a recovery is rehearsed, and the use of the result."""

import logging
import math
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from cpsr.engines.random_states import capture_random_states
from cpsr.job import Job, Part, Rewind
from cpsr.journal import RehearsalRow
from cpsr.learning.learning import Learning
from cpsr.rehearsal.batches import TrainedBatches
from cpsr.rehearsal.budget import RehearsalBudget, rehearsal_account
from cpsr.rehearsal.rehearsal import ASKED_TO_LEAVE, Obstacle, Prepared, Rehearsal, Rehearsed
from cpsr.restart.lag import SLOPE_LOSSES_MAX, SLOPE_LOSSES_MIN
from cpsr.restart.probes import LossFunction
from cpsr.restart.restore import Restorer
from cpsr.saving.run_state import RunState
from cpsr.saving.saver import Saver
from cpsr.state.losses import Step
from cpsr.state.scalars import Scalars

__all__ = ["Rehearsals", "rehearsed_horizon"]

logger = logging.getLogger(__name__)

MIN_CHECKPOINTS = 4  # one more than the line needs: a rehearsal from the minimum says little
# Failures come at any time in an interval: rehearsed ones are spread over it by the golden ratio, which leaves no
# large gap after any number of them.
GOLDEN_RATIO = (math.sqrt(5.0) - 1.0) / 2.0
FIRST_FRACTION = 0.5
# A prediction that was vetoed or diverged costs at least as much as recomputing the horizon, plus the time until it was
# detected. How much more has not been measured, so the error is as large as the horizon.
UNUSABLE_LAG_HORIZONS = 2.0
UNUSABLE_ERROR_HORIZONS = 1.0
# The same computation gives the same loss, except for kernels that sum in another order; a smoothed or an added loss
# differs far more. For a loss in half precision the tolerance is two of its steps.
LOSS_TOLERANCE = 1e-4
LOSS_TOLERANCE_STEPS = 2
# Polling interval for SIGTERM while waiting for the disk.
SETTLE_SLICE_SECONDS = 0.5
# One kill during a rehearsal may be chance, although rehearsals take less than 1% of the time; two are not.
KILLED_MAX = 1


class Rehearsals(Part):
    """The rehearsals of one life of a run; everything here runs on the training thread.

    Rank 0 decides that one is due, and proposes a checkpoint c in the regular vote at a step boundary. Once all ranks
    have agreed, at iteration f, each begins to keep its training batches; `rehearsal.iterations` later the failure at f
    is rehearsed. Until one is prepared, steps only count seconds.

    Args:
        job: this rank's.
        restorer: restores the state as after a failure.
        saver: knows the newest checkpoint and the interval.
        learning: predicts the rehearsed state, and learns from the result.
        state: the small exact state.
        loss_fn: the user's loss of a batch; None if the module returns it.
        stopping: whether this rank was asked to leave.

    Attributes:
        prepared: the rehearsal for which batches are kept; None between rehearsals.
        not_before: the iteration from which the next one may be proposed.
        looked_at: the newest checkpoint, if its history was too short.
    """

    def __init__(
        self,
        job: Job,
        restorer: Restorer,
        saver: Saver,
        learning: Learning,
        state: RunState,
        loss_fn: LossFunction | None,
        stopping: Callable[[], bool],
    ) -> None:
        self._adapter, self._group, self._journal, config = job.adapter, job.group, job.journal, job.config
        self._store = saver.store
        self._saver = saver
        self._state = state
        self._learner = learning.learner
        self._config = config.rehearsal
        self._vote_iterations = config.ranks.stop_check_iterations
        self._loss_given = loss_fn is not None
        self._stopping = stopping
        self._rehearsal = Rehearsal(job.adapter, saver.pool, restorer, learning, state, loss_fn, stopping)
        account = rehearsal_account(job.journal)
        self._budget = RehearsalBudget(self._config.budget_fraction, account.trained_seconds, account.spent_seconds)
        self._count = account.count
        self._losses: deque[tuple[int, float]] = deque(maxlen=SLOPE_LOSSES_MAX)
        self.prepared: Prepared | None = None
        self._dealt = self._dealt_last = 0  # batches of the iteration in progress, and of the last
        self._compared = False
        self._loss_expected: torch.Tensor | None = None  # of the next micro-batch, by loss_fn
        self._overhead_seconds = 0.0  # of the last rehearsal, beside its training
        self.not_before = 0
        self.looked_at: int | None = None
        self._off = False
        state.on_batch.append(self._on_batch)
        if config.mode == "exact":
            self._turn_off("mode 'exact' never predicts", logging.DEBUG)
        elif self._config.budget_fraction == 0:
            self._turn_off("rehearsal.budget_fraction is 0", logging.DEBUG)
        elif account.killed > KILLED_MAX:
            self._turn_off(
                f"{account.killed} earlier lives of this run ended during one (the journal's rehearsals that still say "
                "'running'); a new run_dir rehearses again",
                logging.WARNING,
            )

    # Called during the iteration

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training forward begins."""
        if self.prepared is not None and not self._loss_given:
            self.prepared.batches.add(args, kwargs)

    def _on_batch(self, batch: Any) -> None:
        self._dealt += 1
        if self.prepared is None or not self._loss_given:
            return
        batches = self.prepared.batches
        batches.add((batch,), {})
        if self._compared:
            return
        self._compared = True
        started = perf_counter()
        loss = self._rehearsal.loss_before_training(batch, batches.problem)
        batches.seconds += perf_counter() - started
        if isinstance(loss, torch.Tensor):
            self._loss_expected = loss
        elif batches.problem is None:
            batches.give_up(loss)

    def on_loss(self, loss: torch.Tensor) -> None:
        """One micro-batch's detached training loss."""
        if self.prepared is None:
            return
        self.prepared.batches.add_loss(loss)
        expected, self._loss_expected = self._loss_expected, None
        if expected is not None and not _same_loss(expected, loss):
            self.prepared.batches.give_up(
                f"loss_fn gives {float(expected):.6g} for a batch whose training loss is {float(loss):.6g}: rehearsals "
                "need the loss that is trained on, for the batch that the loop has just taken"
            )

    def on_steps(self, steps: Sequence[Step]) -> None:
        """Finished iterations whose losses have arrived."""
        self._losses.extend((step.iteration, step.loss) for step in steps if step.loss is not None)

    # At a step boundary

    def end_iteration(self, iteration: int, applied: bool, seconds: float) -> bool:
        """Count a step.

        Args:
            iteration: the step that was completed.
            applied: False when its update was skipped.
            seconds: its wall time.

        Returns:
            Whether a rehearsal is due; the same on every rank.
        """
        self._budget.train(seconds)
        self._dealt_last, self._dealt = self._dealt, 0
        prepared = self.prepared
        if prepared is None:
            return False
        prepared.batches.end_iteration(applied)
        return iteration - prepared.failure_iteration >= self._config.iterations

    def propose(self, iteration: int) -> int:
        """The checkpoint that a rehearsal should start from; 0 if none is due, and on ranks other than 0."""
        if self._off or self.prepared is not None or self._group.rank != 0 or iteration < self.not_before:
            return 0
        if not self._budget.allows(self._expected_seconds()):
            return 0
        obstacle = self._adapter.rehearsal_obstacle(self._loss_given)
        if obstacle is not None:
            self._turn_off(obstacle)
            return 0
        checkpoint = self._saver.saved_iteration
        if (
            checkpoint is None
            or checkpoint == self.looked_at
            or iteration - checkpoint < rehearsed_horizon(self._count, self._saver.plan.interval_iterations)
        ):
            return 0
        if len(self._losses) < SLOPE_LOSSES_MIN:
            return 0
        start = self._state.history_start
        whole = {info.iteration: info.world_size for info in self._store.catalogue() if not info.partial}
        enough = sum(start <= known <= checkpoint for known in whole) >= MIN_CHECKPOINTS
        if not enough or whole.get(checkpoint) != self._group.size:  # the first ones of another number of ranks
            self.looked_at = checkpoint
            return 0
        self._store.pinned_iteration = checkpoint
        self.not_before = iteration + self._config.iterations + 2 * self._vote_iterations  # agreed later
        return checkpoint

    def prepare(self, checkpoint_iteration: int, iteration: int) -> None:
        """All ranks have agreed: keep the training batches from here on; a collective."""
        if not self._state.history_start <= checkpoint_iteration < iteration:  # the state was replaced meanwhile
            self._release(checkpoint_iteration)
            return
        per_iteration = self._adapter.micro_batches_per_iteration
        # Otherwise a rank would wait for the others with its first batch.
        if self._loss_given and not self._group.all(self._dealt_last == per_iteration):
            self._release(checkpoint_iteration)
            self._turn_off(
                f"loss_fn needs {per_iteration} batches an iteration from recovery.resume on every rank, and a rank "
                f"takes another number (rank {self._group.rank}: {self._dealt_last})"
            )
            return
        batches = TrainedBatches(per_iteration, self._adapter.device, self._config.batches_limit_bytes)
        self._compared = False
        self.prepared = Prepared(checkpoint_iteration, iteration, batches, capture_random_states(self._adapter))

    def rehearse(self, iteration: int, capture: Callable[[], Scalars]) -> None:
        """Run the prepared rehearsal; a collective.

        Args:
            iteration: the step that was completed.
            capture: captures this rank's small exact state.

        Raises:
            RecoveryError: the exact state could not be put back.
        """
        prepared, self.prepared = self.prepared, None
        assert prepared is not None
        started = perf_counter()
        expected = self._expected_seconds()
        row = RehearsalRow(
            id=uuid.uuid4().hex,
            life=self._journal.life,
            iteration=iteration,
            failure_iteration=prepared.failure_iteration,
            checkpoint_iteration=prepared.checkpoint_iteration,
            outcome="running",
            cost_seconds=expected,
        )
        self._journal.record(row)
        settled = self._settle(expected)  # as long as the rehearsal: a disk that needs longer is too busy for one
        result = self._rehearsal.run(prepared, capture, self._obstacle(prepared.batches, settled), self._losses)
        self._store.pinned_iteration = None
        self._count += 1
        self.not_before = iteration + self._config.min_interval_iterations
        cost = perf_counter() - started + prepared.batches.seconds
        self._budget.spend(cost)
        if result.outcome == "measured":
            self._overhead_seconds = max(cost - result.train_seconds, 0.0)
        self._report(_finished(row, result, cost, self._budget.iteration_seconds), result)
        if result.lasting is not None:
            self._turn_off(result.lasting)

    def rewound(self, to: Rewind) -> None:
        """Drop the prepared rehearsal: its batches no longer lead to the current state."""
        self.prepared = self._loss_expected = self.looked_at = None
        self._store.pinned_iteration = None
        self.not_before = 0  # iterations and their checkpoints may be repeated
        self._losses.clear()

    def _release(self, checkpoint_iteration: int) -> None:
        if self._store.pinned_iteration == checkpoint_iteration:  # another may have been proposed since
            self._store.pinned_iteration = None

    def _expected_seconds(self) -> float:
        return self._config.iterations * self._budget.iteration_seconds + self._overhead_seconds

    def _settle(self, timeout_seconds: float) -> bool:
        """Wait for checkpoints that are being written; False after the timeout, or if the job was asked to leave."""
        until = perf_counter() + timeout_seconds
        while not self._saver.settle(min(SETTLE_SLICE_SECONDS, max(until - perf_counter(), 0.0))):
            if self._stopping() or perf_counter() >= until:
                return False
        return True

    def _obstacle(self, batches: TrainedBatches, settled: bool) -> Obstacle | None:
        """The obstacle to a due rehearsal on this rank; None if there is none."""
        loop = self._adapter.rehearsal_obstacle(self._loss_given)
        if loop is not None:
            return Obstacle(loop, lasting=True)
        if batches.problem is not None:
            return Obstacle(batches.problem, batches.hopeless)
        if self._stopping():
            return Obstacle(ASKED_TO_LEAVE, lasting=False)
        return None if settled else Obstacle("the disk is still writing checkpoints", lasting=False)

    def _report(self, row: RehearsalRow, result: Rehearsed) -> None:
        """Report the result to journal, log and predictor."""
        self._journal.record(row)
        if self._group.rank == 0:
            # A failure before the prediction is a finding: a restart would have met it too (a damaged checkpoint, say).
            unready = row.outcome == "refused" and not row.method
            level = logging.ERROR if row.outcome == "failed" else logging.WARNING if unready else logging.INFO
            message = (
                f"rehearsed a failure at iteration {row.failure_iteration} from checkpoint {row.checkpoint_iteration} "
                f"in {row.cost_seconds:.1f} s: {row.outcome}, {row.reason}; the exact state is back"
            )
            self._journal.event("rehearsal", message, row.iteration, level)
        if result.outcome == "failed":
            self._turn_off("the last one failed; training went on from its exact state", logging.ERROR)
        learned = _learned(row, result)
        if learned is not None:
            self._learner.record(learned)

    def _turn_off(self, why: str, level: int = logging.INFO) -> None:
        self._off = True
        if self._group.rank == 0:
            self._journal.event("rehearsals off", f"no recovery is rehearsed in this life: {why}", None, level)


def rehearsed_horizon(count: int, interval_iterations: int) -> int:
    """Least iterations between the checkpoint and the failure of the next rehearsal, from 1 to the interval.

    A lower bound: the rehearsal also waits for the budget and for the vote of all ranks. If the checkpoint is late, it
    starts from an older one.

    Args:
        count: rehearsals before it.
        interval_iterations: iterations between checkpoints.
    """
    fraction = (FIRST_FRACTION + count * GOLDEN_RATIO) % 1.0
    return max(1, round(fraction * interval_iterations))


def _same_loss(one: torch.Tensor, other: torch.Tensor) -> bool:
    steps = LOSS_TOLERANCE_STEPS * max(torch.finfo(loss.dtype).eps for loss in (one, other))
    values = float(one), float(other)
    return all(map(math.isnan, values)) or math.isclose(*values, rel_tol=max(LOSS_TOLERANCE, steps))


def _learned(row: RehearsalRow, result: Rehearsed) -> dict[str, Any] | None:
    """The outcome of a rehearsal for the predictor; None if nothing was measured."""
    horizon = row.failure_iteration - row.checkpoint_iteration
    outcome = {
        "kind": "rehearsal",
        "settings": result.settings,
        "horizon_iterations": horizon,
        "failure_iteration": row.failure_iteration,
        "checkpoint_iteration": row.checkpoint_iteration,
    }
    if result.unusable:
        lag, error = UNUSABLE_LAG_HORIZONS * horizon, UNUSABLE_ERROR_HORIZONS * horizon
        return outcome | {"lag_iterations": lag, "standard_error_iterations": error}
    if result.lag is None or result.lag.lag_iterations is None:
        return None
    return outcome | {
        "lag_iterations": result.lag.lag_iterations,
        "standard_error_iterations": result.lag.standard_error_iterations,
        "gap_nats": result.lag.gap_nats,
        "gap_standard_error_nats": result.lag.gap_standard_error_nats,
        "first_gap_nats": result.lag.first_gap_nats,
    }


def _finished(row: RehearsalRow, result: Rehearsed, cost_seconds: float, iteration_seconds: float) -> RehearsalRow:
    """The row of a rehearsal that has ended."""
    restored, lag = result.restored, result.lag
    forecast = None if restored is None else restored.forecast
    measured: dict[str, Any] = {}
    if lag is not None:
        measured = {
            "first_gap_nats": lag.first_gap_nats,
            "gaps_nats": list(result.gaps),
            "slope_nats_per_iteration": lag.slope_nats_per_iteration,
            "slope_standard_error": lag.slope_standard_error,
            "probe_gap_nats": result.probe_gap_nats,
            "points": lag.points,
        }
    return replace(
        row,
        outcome=result.outcome,
        reason=result.reason,
        method="" if forecast is None else forecast.method,
        settings=result.settings,
        guard={} if restored is None else restored.guard,
        lag_iterations=None if lag is None else lag.lag_iterations,
        lag_standard_error_iterations=None if lag is None else lag.standard_error_iterations,
        gap_nats=None if lag is None else lag.gap_nats,
        gap_standard_error_nats=None if lag is None else lag.gap_standard_error_nats,
        measured=measured,
        load_seconds=None if restored is None else restored.load_seconds,
        predict_seconds=None if restored is None else restored.predict_seconds,
        inject_seconds=None if restored is None else restored.inject_seconds,
        train_seconds=result.train_seconds or None,
        cost_seconds=cost_seconds,
        cost_iterations=cost_seconds / iteration_seconds if iteration_seconds else None,
    )
