"""When a recovery is rehearsed, and what becomes of the result."""

import logging
import math
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.config import CPSRConfig
from cpsr.coordinator.batches import TrainedBatches
from cpsr.coordinator.budget import RehearsalBudget
from cpsr.coordinator.lag import SLOPE_LOSSES_MAX, SLOPE_LOSSES_MIN
from cpsr.coordinator.rehearsal import Prepared, Rehearsal, Rehearsed
from cpsr.engines.adapter import EngineAdapter
from cpsr.group import Group
from cpsr.journal import RehearsalRow
from cpsr.learner import Learner
from cpsr.losses import Step
from cpsr.predictor.protocol import StatePredictor
from cpsr.probes import LossFunction
from cpsr.record import Recorder
from cpsr.restore import Restorer
from cpsr.run_state import RunState
from cpsr.saver import Saver
from cpsr.scalars import Scalars, capture_rng

__all__ = ["Rehearsals", "rehearsed_horizon"]

logger = logging.getLogger(__name__)

MIN_CHECKPOINTS = 4  # one more than the line needs: a rehearsal from the fewest there can be says little
# Failures come at any time in an interval: rehearsed ones are spread over it by the golden ratio, which leaves no
# large gap after any number of them.
GOLDEN_RATIO = (math.sqrt(5.0) - 1.0) / 2.0
FIRST_FRACTION = 0.5


class Rehearsals:
    """The rehearsals of one life of a run; everything here runs on the training thread.

    Rank 0 decides that one is due and proposes a checkpoint c in the vote that every step boundary has anyway. When
    all ranks know, at iteration f, each begins to keep what it trains on; `rehearsal.iterations` later the failure at
    f is rehearsed. Until one is prepared nothing is done on the way but to count seconds.

    Args:
        adapter: the engine.
        group: the ranks.
        store: the run's checkpoints.
        pool: the host buffers.
        restorer: restores what a failure would have been restored to.
        saver: knows the newest checkpoint and the interval.
        state: the small exact state.
        predictor: predicts the state that is rehearsed.
        learner: takes the result for it.
        recorder: the journal.
        config: the run's configuration.
        loss_fn: the user's loss of a batch; None where the module returns it.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        group: Group,
        store: CheckpointStore,
        pool: SnapshotPool,
        restorer: Restorer,
        saver: Saver,
        state: RunState,
        predictor: StatePredictor,
        learner: Learner,
        recorder: Recorder,
        config: CPSRConfig,
        loss_fn: LossFunction | None,
    ) -> None:
        self._adapter = adapter
        self._group = group
        self._store = store
        self._saver = saver
        self._state = state
        self._learner = learner
        self._recorder = recorder
        self._config = config.rehearsal
        self._vote_iterations = config.stop_check_iterations
        self._loss_given = loss_fn is not None
        self._rehearsal = Rehearsal(adapter, pool, restorer, predictor, learner, state, loss_fn)
        account = recorder.rehearsal_account()
        self._budget = RehearsalBudget(self._config.budget_fraction, account.trained_seconds, account.spent_seconds)
        self._count = account.count
        self._losses: deque[tuple[int, float]] = deque(maxlen=SLOPE_LOSSES_MAX)
        self._prepared: Prepared | None = None
        self._overhead_seconds = 0.0  # of the last rehearsal, beside its training
        self._not_before = 0
        self._looked_at: int | None = None  # a checkpoint that there are too few before
        self._off = False
        state.on_batch.append(self._on_batch)
        if config.mode == "exact":
            self._turn_off("mode 'exact' never predicts")
        elif self._config.budget_fraction == 0:
            self._turn_off("rehearsal.budget_fraction is 0")

    # What is watched

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training forward begins."""
        if self._prepared is not None and not self._loss_given:
            self._prepared.batches.add(args, kwargs)

    def _on_batch(self, batch: Any) -> None:
        if self._prepared is not None and self._loss_given:
            self._prepared.batches.add((batch,), {})

    def on_loss(self, loss: torch.Tensor) -> None:
        """One micro-batch's detached training loss."""
        if self._prepared is not None:
            self._prepared.batches.add_loss(loss)

    def on_steps(self, steps: Sequence[Step]) -> None:
        """Finished iterations whose losses have arrived."""
        self._losses.extend((step.iteration, step.loss) for step in steps if step.loss is not None)

    # At a step boundary

    def after_step(self, iteration: int, applied: bool, seconds: float, capture: Callable[[], Scalars]) -> bool:
        """Take notice of a step, and rehearse where one is prepared and due; a collective then.

        Args:
            iteration: the step that was completed.
            applied: False when its update was skipped.
            seconds: its wall time.
            capture: this rank's small exact state, where it is needed.

        Returns:
            Whether a rehearsal was run.

        Raises:
            RecoveryError: the exact state could not be put back.
        """
        self._budget.train(seconds)
        prepared = self._prepared
        if prepared is None:
            return False
        prepared.batches.end_iteration(applied)
        if iteration - prepared.failure_iteration < self._config.iterations:
            return False
        self._rehearse(iteration, prepared, capture)
        return True

    def propose(self, iteration: int) -> int:
        """The checkpoint that a rehearsal should start from, 0 where none is due; rank 0's word counts."""
        if self._off or self._prepared is not None or self._group.rank != 0 or iteration < self._not_before:
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
            or checkpoint == self._looked_at
            or iteration - checkpoint < rehearsed_horizon(self._count, self._saver.plan.interval_iterations)
        ):
            return 0
        if len(self._losses) < SLOPE_LOSSES_MIN:
            return 0
        start = self._state.history_start
        if sum(start <= info.iteration <= checkpoint for info in self._store.catalogue()) < MIN_CHECKPOINTS:
            self._looked_at = checkpoint
            return 0
        self._store.held_iteration = checkpoint
        self._not_before = iteration + self._config.iterations + 2 * self._vote_iterations  # said once, agreed later
        return checkpoint

    def prepare(self, checkpoint_iteration: int, iteration: int) -> None:
        """All ranks have agreed: keep what is trained on from here."""
        if checkpoint_iteration >= iteration:  # the run was taken back meanwhile
            self._store.held_iteration = None
            return
        batches = TrainedBatches(self._adapter.micro_batches_per_iteration, self._adapter.device)
        self._prepared = Prepared(checkpoint_iteration, iteration, batches, capture_rng())

    def drop(self) -> None:
        """Give up what is prepared: the state is no longer the one that these batches led to."""
        self._prepared = None
        self._store.held_iteration = None
        self._losses.clear()

    def _expected_seconds(self) -> float:
        return self._config.iterations * self._budget.iteration_seconds + self._overhead_seconds

    def _rehearse(self, iteration: int, prepared: Prepared, capture: Callable[[], Scalars]) -> None:
        self._prepared = None
        started = perf_counter()
        expected = self._expected_seconds()
        row = RehearsalRow(
            id=uuid.uuid4().hex,
            life=self._recorder.life,
            iteration=iteration,
            failure_iteration=prepared.failure_iteration,
            checkpoint_iteration=prepared.checkpoint_iteration,
            outcome="running",
            cost_seconds=expected,
        )
        self._recorder.rehearsal(row)
        # As long as the rehearsal itself: a disk that needs more has no room for it.
        settled = self._saver.settle(expected)
        obstacle = self._adapter.rehearsal_obstacle(self._loss_given)
        if not settled:
            obstacle = "the disk is still writing checkpoints"
        result = self._rehearsal.run(prepared, capture, obstacle, self._losses)
        self._store.held_iteration = None
        self._count += 1
        self._not_before = iteration + self._config.min_interval_iterations
        cost = perf_counter() - started + prepared.batches.seconds
        self._budget.spend(cost)
        if result.outcome == "measured":
            self._overhead_seconds = max(cost - result.train_seconds, 0.0)
        self._tell(_finished(row, result, cost, self._budget.iteration_seconds), result)
        if prepared.batches.hopeless and prepared.batches.problem is not None:
            self._turn_off(prepared.batches.problem)

    def _tell(self, row: RehearsalRow, result: Rehearsed) -> None:
        """Journal, log and predictor."""
        self._recorder.rehearsal(row)
        if self._group.rank == 0:
            # What never came to predicting is a finding: a restart would have met it too (a damaged checkpoint, say).
            unready = row.outcome == "refused" and not row.method
            level = logging.ERROR if row.outcome == "failed" else logging.WARNING if unready else logging.INFO
            message = (
                f"rehearsed a failure at iteration {row.failure_iteration} from checkpoint {row.checkpoint_iteration} "
                f"in {row.cost_seconds:.1f} s: {row.outcome}, {row.reason}; the exact state is back"
            )
            self._recorder.event("rehearsal", message, row.iteration, level)
        if result.outcome == "failed":
            self._turn_off("the last one failed; training went on from its exact state", logging.ERROR)
        if result.lag is not None and result.lag.lag_iterations is not None:
            self._learner.record(
                {
                    "kind": "rehearsal",
                    "settings": result.settings,
                    "lag_iterations": result.lag.lag_iterations,
                    "standard_error_iterations": result.lag.standard_error_iterations,
                    "horizon_iterations": row.failure_iteration - row.checkpoint_iteration,
                    "failure_iteration": row.failure_iteration,
                    "checkpoint_iteration": row.checkpoint_iteration,
                    "gap_nats": result.lag.gap_nats,
                    "gap_standard_error_nats": result.lag.gap_standard_error_nats,
                    "first_gap_nats": result.lag.first_gap_nats,
                }
            )

    def _turn_off(self, why: str, level: int = logging.INFO) -> None:
        self._off = True
        if self._group.rank == 0:
            self._recorder.event("rehearsals off", f"no recovery is rehearsed in this life: {why}", level=level)


def rehearsed_horizon(count: int, interval_iterations: int) -> int:
    """Iterations between the checkpoint and the failure of the next rehearsal, from 1 to the interval.

    Args:
        count: rehearsals before it.
        interval_iterations: iterations between checkpoints.
    """
    fraction = (FIRST_FRACTION + count * GOLDEN_RATIO) % 1.0
    return max(1, round(fraction * interval_iterations))


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
