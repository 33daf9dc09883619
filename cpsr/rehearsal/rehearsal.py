"""One rehearsal: trains the state of a predicted restart for a while in the running job, then undoes it."""

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool
from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.random_states import restore_random_states
from cpsr.errors import RecoveryError, SaveError, UnsupportedEngineError
from cpsr.learning.learning import Learning
from cpsr.predictor.protocol import Forecast, History, Target
from cpsr.ranks.group import Group
from cpsr.rehearsal.batches import MicroBatch, TrainedBatches
from cpsr.restart.lag import SLOPE_LOSSES_MAX, RehearsedLag, measure_lag
from cpsr.restart.probes import LossFunction
from cpsr.restart.restore import Restored, Restorer
from cpsr.saving.run_state import RunState
from cpsr.state.scalars import Scalars

__all__ = ["ASKED_TO_LEAVE", "Obstacle", "Prepared", "Rehearsal", "Rehearsed"]

logger = logging.getLogger(__name__)

ASKED_TO_LEAVE = "the job was asked to leave (SIGTERM)"
# How long a rank that failed in a rehearsal waits for the others: they arrive at once if they failed too, and never if
# they wait for it inside a collective of the engine.
MEET_SECONDS = 120.0

# The worst of all ranks counts.
_GO_ON, _STOPPING, _NOT_FINITE, _FAILED = 0, 1, 2, 3


class Obstacle(NamedTuple):
    """Why a rank cannot take part in a rehearsal.

    Attributes:
        reason: one clause for messages.
        lasting: whether later rehearsals would meet it too.
    """

    reason: str
    lasting: bool


@dataclass(frozen=True)
class Prepared:
    """Data kept since the iteration of the rehearsed failure.

    Attributes:
        checkpoint_iteration: c, the newest checkpoint then.
        failure_iteration: f.
        batches: trained on since then.
        rng: random states at f: equal noise in both runs does not blur their comparison.
    """

    checkpoint_iteration: int
    failure_iteration: int
    batches: TrainedBatches
    rng: dict[str, Any]


@dataclass(frozen=True)
class Rehearsed:
    """The result of a rehearsal; in every case the exact state is restored.

    Attributes:
        outcome: `measured`, `refused` (no predicted state, or the job was asked to leave meanwhile), `diverged` (a loss
            was not finite) or `failed`.
        reason: one sentence for messages.
        restored: how the state was restored, if it came that far.
        lag: the measured one.
        gaps: paired gap of each iteration, in nats, mean over the ranks.
        probe_gap_nats: mean loss of the probes at the end, rehearsed minus exact; None without probes.
        train_seconds: wall time of the training.
        lasting: the obstacle, if later rehearsals would meet it too.
    """

    outcome: Literal["measured", "refused", "diverged", "failed"]
    reason: str
    restored: Restored | None = None
    lag: RehearsedLag | None = None
    gaps: Sequence[float] = field(default_factory=list)
    probe_gap_nats: float | None = None
    train_seconds: float = 0.0
    lasting: str | None = None

    @property
    def unusable(self) -> bool:
        """Whether a restart could not have used the prediction: the guard vetoed it, or it diverged."""
        restored = self.restored
        if restored is None or restored.forecast is None or not restored.forecast.feasible:
            return False
        return self.outcome == "diverged" or (not restored.predicted and bool(restored.guard))

    @property
    def settings(self) -> dict[str, Any]:
        """The predictor's settings."""
        forecast = None if self.restored is None else self.restored.forecast
        return {} if forecast is None else dict(forecast.settings)


class _StoppedError(Exception):
    """All ranks agreed to end a rehearsal early."""

    def __init__(self, outcome: Literal["refused", "diverged", "failed"], reason: str) -> None:
        super().__init__(reason)
        self.outcome: Literal["refused", "diverged", "failed"] = outcome


class Rehearsal:
    """Rehearses on all ranks together; see `run`.

    Args:
        adapter: the engine.
        pool: host buffers: one for the exact state, one for the checkpoint.
        restorer: restores the state as after a failure.
        learning: its predictor gives `candidates(history, target)`, forecasts most informative first; its thread waits
            meanwhile.
        state: the small exact state.
        loss_fn: the user's loss of a batch; None if the module returns it.
        stopping: whether this rank was asked to leave: a rehearsal then ends at the next micro-batch.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        pool: SnapshotPool,
        restorer: Restorer,
        learning: Learning,
        state: RunState,
        loss_fn: LossFunction | None,
        stopping: Callable[[], bool],
    ) -> None:
        self._adapter = adapter
        self._pool = pool
        self._restorer = restorer
        self._predictor = learning.predictor
        self._learner = learning.learner
        self._state = state
        self._loss_fn = loss_fn
        self._stopping = stopping

    def loss_before_training(self, batch: Any, problem: str | None) -> torch.Tensor | str:
        """`loss_fn` of a batch that the loop is about to train on; leaves no trace. A collective, at a step boundary.

        Args:
            batch: as the loop gets it.
            problem: why this rank cannot evaluate it.

        Returns:
            The loss, a detached scalar; or why it is not known, the same on every rank.

        Raises:
            RecoveryError: it failed on one rank, and others wait for that rank inside a collective of the engine.
        """
        exact = self._state.capture()
        exact = replace(exact, registered=copy.deepcopy(exact.registered))  # or they change with their objects
        meeting = Group()
        try:
            with self._adapter.rehearsing(), torch.no_grad():
                loss = self._given_loss(meeting, batch, problem)
        except RuntimeError as error:
            raise RecoveryError(
                f"loss_fn was not evaluated on all ranks together: one waits for another in vain ({error}). Restart "
                "the job: it recovers from its last checkpoint as after any failure. rehearsal.budget_fraction = 0 "
                "turns rehearsals off"
            ) from error
        finally:
            self._state.put_back(exact)
        meeting.close()
        return loss

    def _given_loss(self, meeting: Group, batch: Any, problem: str | None) -> torch.Tensor | str:
        assert self._loss_fn is not None
        loss = None
        try:
            self._agree(meeting, _GO_ON if problem is None else _FAILED, problem)
            try:
                loss = self._loss_fn(copy.deepcopy(batch)).detach()
            except Exception as raised:  # after any error of a user's function training can continue without rehearsals
                logger.error("loss_fn failed on a training batch", exc_info=raised)
                problem = f"loss_fn raised {type(raised).__name__}: {raised}"
            self._agree(meeting, _GO_ON if problem is None else _FAILED, problem)
        except _StoppedError as stopped:
            return str(stopped)
        assert loss is not None
        return loss

    def run(
        self,
        prepared: Prepared,
        capture: Callable[[], Scalars],
        obstacle: Obstacle | None,
        losses: Iterable[tuple[int, float]],
    ) -> Rehearsed:
        """Save the exact state, train the predicted one on the same batches, and restore the exact state.

        Args:
            prepared: the data kept since f.
            capture: this rank's small exact state now.
            obstacle: why this rank cannot take part.
            losses: iteration and value of this rank's recent training losses; read at the end, since `capture` may
                bring the last of them.

        Raises:
            RecoveryError: the exact state could not be restored. The engine's state is not the run's any more: the
                job must be restarted, and recovers from its last checkpoint as after any failure.
        """
        iteration = self._adapter.iteration
        # Its own group: a rank that fails alone must not meet the others in the middle of another collective.
        meeting = Group()
        met = [Obstacle(*part) for part in meeting.gather(obstacle) if part is not None]
        if met:
            meeting.close()
            reason, lasting = max(met, key=lambda part: part.lasting)
            return Rehearsed("refused", f"not rehearsed: {reason}", lasting=reason if lasting else None)
        kept = self._set_aside(iteration, prepared.checkpoint_iteration, capture)
        obstacles = [part for part in meeting.gather(kept if isinstance(kept, str) else None) if part is not None]
        if isinstance(kept, str) or obstacles:
            self._release(() if isinstance(kept, str) else kept)
            meeting.close()
            return Rehearsed("refused", f"not rehearsed: {obstacles[0]}")
        exact, checkpoint = kept
        try:
            probe_loss = self._restorer.probe_loss(exact.scalars["probes"])
            with self._adapter.rehearsing():
                result, losses_trained = self._try_out(prepared, checkpoint, meeting)
                if result.outcome == "measured":
                    result = self._with_probes(result, probe_loss, exact.scalars["probes"])
            self._put_back(exact, meeting)
        except BaseException as error:  # an interrupt too: a handler might save a state that is not the run's
            raise RecoveryError(
                f"the rehearsal at iteration {iteration} ended with {type(error).__name__}: {error}; the exact state "
                "could not be put back, and training must not go on from here. Restart the job: it recovers from its "
                "last checkpoint as after any failure. rehearsal.budget_fraction = 0 turns rehearsals off"
            ) from error
        self._release(kept)
        if result.outcome == "measured":
            gaps = (losses_trained - prepared.batches.losses()).mean(dim=1)
            result = _measured(result, meeting, gaps, iteration, losses)
        meeting.close()
        return result

    def _set_aside(
        self, iteration: int, checkpoint_iteration: int, capture: Callable[[], Scalars]
    ) -> tuple[Snapshot, Snapshot] | str:
        """Snapshots of the exact state and for the checkpoint, or the obstacle."""
        try:
            exact = self._pool.begin(self._adapter.shard(), iteration, capture().to_tree(), replicate=False)
            self._pool.finish()
        except (SaveError, UnsupportedEngineError) as error:
            return f"the exact state could not be set aside: {error}"
        if exact is None:
            return "no host buffer is free for the exact state"
        checkpoint = self._pool.acquire(checkpoint_iteration)
        if checkpoint is None:
            self._pool.release(exact)
            return "no host buffer is free for the checkpoint"
        return exact, checkpoint

    def _release(self, snapshots: Sequence[Snapshot]) -> None:
        for snapshot in snapshots:
            self._pool.release(snapshot)

    def _try_out(self, prepared: Prepared, checkpoint: Snapshot, meeting: Group) -> tuple[Rehearsed, torch.Tensor]:
        """Restore and train; returns the result and the losses `(iterations, micro-batches)`."""
        restored = None
        try:
            restored = self._restore(prepared, checkpoint, meeting)
            if not restored.predicted:
                return Rehearsed("refused", restored.reason, restored), torch.empty(0, device="cpu")
            restore_random_states(self._adapter, prepared.rng)
            started = time.perf_counter()
            losses = self._train(prepared.batches.iterations, meeting)
            trained = Rehearsed("measured", "", restored, train_seconds=time.perf_counter() - started)
            return trained, losses
        except _StoppedError as stopped:
            return Rehearsed(stopped.outcome, str(stopped), restored), torch.empty(0, device="cpu")

    def _restore(self, prepared: Prepared, checkpoint: Snapshot, meeting: Group) -> Restored:
        error, restored = None, None
        try:
            with self._learner.locked(other_checkpoints=False):
                restored = self._restorer.rehearse(checkpoint, prepared.failure_iteration, self._forecast)
        except Exception as raised:  # after any error the exact state can still be restored
            logger.error("the rehearsed restore failed", exc_info=raised)
            error = f"restoring raised {type(raised).__name__}: {raised}"
        self._agree(meeting, _FAILED if error is not None else self._go_on(), error)
        assert restored is not None
        return restored

    def _forecast(self, history: History, target: Target) -> Forecast:
        """The most informative forecast that is feasible, else the predictor's default."""
        candidates = getattr(self._predictor, "candidates", None)
        for forecast in () if candidates is None else candidates(history, target):
            if forecast.feasible:
                chosen: Forecast = forecast
                return chosen
        return self._predictor.forecast(history, target)

    def _train(self, iterations: Sequence[Sequence[MicroBatch]], meeting: Group) -> torch.Tensor:
        return torch.tensor(
            [[self._train_on(batch, meeting) for batch in batches] for batches in iterations],
            dtype=torch.float64,
            device="cpu",
        )

    def _train_on(self, batch: MicroBatch, meeting: Group) -> float:
        """Train one micro-batch; ranks agree between its forward, in which user code may fail, and its backward."""
        loss, value, error = None, math.nan, None
        try:
            args, kwargs = batch.arguments()
            loss = self._adapter.training_loss(args, kwargs) if self._loss_fn is None else self._loss_fn(*args)
            value = float(loss.detach())
        except Exception as raised:  # after any error of a user's module the exact state can be restored
            logger.error("a forward in a rehearsal failed", exc_info=raised)
            error = f"a forward raised {type(raised).__name__}: {raised}"
        if loss is not None and not loss.requires_grad and error is None:
            error = "loss_fn gave a loss without a gradient, which cannot be trained"
        code = _FAILED if error is not None else self._go_on() if math.isfinite(value) else _NOT_FINITE
        self._agree(meeting, code, error)
        assert loss is not None
        self._adapter.train_on(loss)
        return value

    def _go_on(self) -> int:
        return _STOPPING if self._stopping() else _GO_ON

    def _agree(self, meeting: Group, code: int, error: str | None) -> None:
        """Continue if every rank does.

        Raises:
            _StoppedError: the same on every rank.
            RuntimeError: the others wait inside an engine's collective for this rank, which failed.
        """
        codes = torch.tensor([code], device="cpu")
        worst = int(meeting.reduce(codes, "max", MEET_SECONDS if code == _FAILED else None).item())
        if worst == _FAILED:
            raise _StoppedError("failed", next(part for part in meeting.gather(error) if part is not None))
        if worst == _NOT_FINITE:
            raise _StoppedError("diverged", "the training loss was not finite any more")
        if worst == _STOPPING:
            raise _StoppedError("refused", ASKED_TO_LEAVE)

    def _with_probes(self, result: Rehearsed, loss_exact: float | None, saved: list[Any]) -> Rehearsed:
        loss = self._restorer.probe_loss(saved)
        return result if loss is None or loss_exact is None else replace(result, probe_gap_nats=loss - loss_exact)

    def _put_back(self, exact: Snapshot, meeting: Group) -> None:
        """Restore the exact state, and verify it.

        Raises:
            RecoveryError: on some rank a tensor differs from what was set aside.
        """
        self._restorer.inject(exact)
        self._state.put_back(Scalars.from_tree(exact.scalars))
        kept = dict(exact.shard.tensors())
        wrong = [name for name, values in self._adapter.shard().tensors() if not _same_bits(values, kept[name])]
        gathered = [part for part in meeting.gather(wrong[0] if wrong else None) if part is not None]
        if gathered:
            raise RecoveryError(f"{gathered[0]} differs from what was set aside")


def _measured(
    result: Rehearsed, meeting: Group, gaps: torch.Tensor, iteration: int, losses: Iterable[tuple[int, float]]
) -> Rehearsed:
    """The lag, from the gaps `(iterations,)` and the recent losses of all ranks; a collective."""
    mean_gaps: list[float] = (meeting.reduce(gaps) / meeting.size).tolist()
    first = iteration - SLOPE_LOSSES_MAX + 1
    # Of the losses, and how many ranks saw one.
    sums = torch.zeros(2, SLOPE_LOSSES_MAX, dtype=torch.float64, device="cpu")
    for at, loss in losses:
        if first <= at <= iteration and math.isfinite(loss):
            sums[:, at - first] = torch.tensor([loss, 1.0], dtype=torch.float64, device="cpu")
    total, count = meeting.reduce(sums)
    seen = count.nonzero().flatten()
    lag = measure_lag(
        mean_gaps,
        (first + seen).tolist(),
        (total[seen] / count[seen]).tolist(),
        iteration - 0.25 * len(mean_gaps),  # the middle of the second half
    )
    return replace(result, reason=lag.sentence, lag=lag, gaps=mean_gaps)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(
        one.detach().reshape(-1).view(torch.uint8).cpu(), other.detach().reshape(-1).view(torch.uint8).cpu()
    )
