"""How a life of the run began: the state that it continues from, the reason, and its rows in the journal."""

import enum
import logging
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from cpsr.checkpoint.tiers import Source
from cpsr.journal import Beginning, FailureRow, FailureScope, Origin, RankJournal, RecoveryRow, RecoverySource
from cpsr.predictor.protocol import STALE_METHOD, Forecast
from cpsr.ranks.exits import FAILED
from cpsr.state.small_state import DataPosition, Scalars

__all__ = ["Recomputes", "Refusal", "RefusedError", "Restored", "report_recovery"]


class Recomputes(enum.Enum):
    """Why iterations are recomputed although the mode allows to continue near the failure, for people."""

    FAILED_BEFORE = "an earlier attempt to continue near the failure failed"
    IN_MEMORY = "newer states were not exact"
    CHEAPER = "a prediction would cost more"
    INFEASIBLE = "nothing can be predicted"
    DUMP_REFUSED = "the state that the ranks left in memory failed its check"
    PREDICTION_REFUSED = "the predicted state failed its check"
    FAILED = "the attempt to continue near the failure failed"


@dataclass(frozen=True)
class Refusal:
    """A refused state near the failure.

    Attributes:
        why: in one word.
        reason: one clause for people.
        forecast: the predictor's forecast, where there was one.
        guard: the guard's numbers, where it was asked.
        predict_seconds, inject_seconds: wall time that the attempt took.
    """

    why: Recomputes
    reason: str
    forecast: Forecast | None = None
    guard: dict[str, Any] = field(default_factory=dict)
    predict_seconds: float = 0.0
    inject_seconds: float = 0.0


class RefusedError(Exception):
    """A state near the failure was refused; raised on every rank."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


@dataclass(frozen=True)
class Restored:
    """How a life of the run began.

    Attributes:
        beginning: what the state is: from scratch, exact, left by the ranks, with older experts, or predicted.
        restored_iteration: where training continues.
        checkpoint_iteration: c, the checkpoint it comes from; None from scratch.
        failure_iteration: f, the step of the failure; None where the run had not failed.
        reason: one sentence for people.
        scalars: the checkpoint's exact small state.
        data: where the data continues.
        sources: where each rank's state comes from, by rank; empty from scratch.
        taken_at: this rank's operators that were taken before the state that they come with -> when.
        recomputes: why nothing near the failure is continued from, where the mode allows it.
        forecast: the predictor's forecast, where one was asked for.
        guard: the guard's numbers on the state near the failure, where there was one.
        left: what the failure has left in the machines' memory; None where nobody looked.
        cumulative_learning_rate: the predictor's time at the restored iteration.
        load_seconds, predict_seconds, inject_seconds: wall time of the parts.
    """

    beginning: Beginning
    restored_iteration: int
    checkpoint_iteration: int | None
    failure_iteration: int | None
    reason: str
    scalars: Scalars | None = None
    data: DataPosition = field(default_factory=DataPosition)
    sources: tuple[Source, ...] = ()
    taken_at: dict[str, int] = field(default_factory=dict)
    recomputes: Recomputes | None = None
    forecast: Forecast | None = None
    guard: dict[str, Any] = field(default_factory=dict)
    left: FailureScope | None = None
    cumulative_learning_rate: float = 0.0
    load_seconds: float = 0.0
    predict_seconds: float = 0.0
    inject_seconds: float = 0.0

    @property
    def method(self) -> str:
        """The journal's text for the beginning: for a predicted state the name of what predicted it."""
        return self.forecast.method if self.predicted and self.forecast is not None else self.beginning.value

    @property
    def origin(self) -> Origin:
        """The origin of the checkpoints that this state leads to."""
        lineage = [] if self.scalars is None else self.scalars.lineage
        return "predicted" if lineage or self.beginning.labelled else "trained"

    @property
    def predicted(self) -> bool:
        """Whether the state was predicted up to the failure."""
        return self.beginning.predicted

    @property
    def partly_predicted(self) -> bool:
        """Whether the state of some ranks was predicted, and that of others was left when the group broke."""
        return self.predicted and any(source.tier == "departure" for source in self.sources)

    @property
    def stale(self) -> bool:
        """Whether what was lost is the checkpoint's, without a move: the iterations since are skipped."""
        return self.predicted and self.method == STALE_METHOD

    @property
    def expected_end_cost_iterations(self) -> float | None:
        """Of the forecast; iterations that are trained again count as well. None without one."""
        if self.forecast is None:
            return None
        return self.forecast.expected_end_cost_iterations + self.predicted * self.lost_iterations

    @property
    def lost_iterations(self) -> int:
        """Iterations before the failure that are trained again."""
        f = self.failure_iteration
        return 0 if f is None else max(f - self.restored_iteration, 0)

    def instead(self, refusal: Refusal) -> "Restored":
        """This beginning, after a state near the failure was refused."""
        return replace(
            self,
            reason=f"{refusal.reason}; {self.reason}",
            recomputes=refusal.why,
            forecast=refusal.forecast,
            guard=refusal.guard,
            predict_seconds=refusal.predict_seconds,
            inject_seconds=self.inject_seconds + refusal.inject_seconds,
        )


def report_recovery(
    journal: RankJournal, restored: Restored, cause: str | None, mode: str, watching: bool
) -> RecoveryRow | None:
    """Record the failure and the recovery that began this life.

    Args:
        journal: of this rank; rank 0 records.
        restored: how this life began.
        cause: how the last life ended, as a clause; None where it ended in good order.
        mode: the configured mode.
        watching: whether the predicted state is being watched.

    Returns:
        What was recorded; None where there was no recovery, or on other ranks than 0.
    """
    if cause is not None:
        # For `inspect`: of a life that failed before its first checkpoint there is no other record.
        journal.event(FAILED, cause, restored.failure_iteration, logging.DEBUG)
    if restored.beginning is Beginning.SCRATCH or journal.rank != 0:
        return None
    if restored.failure_iteration is not None:
        journal.record(
            FailureRow(
                life=max(journal.life - 1, 0),
                iteration=restored.failure_iteration,
                checkpoint_iteration=restored.checkpoint_iteration,
                description=cause or "the last life left in order, without having saved its last state",
                scope=restored.left,
            )
        )
    row = _recovery_row(journal.life, restored, mode, watching)
    journal.record(row)
    return row


def _feasible(restored: Restored) -> tuple[str, ...]:
    return ("predicted", "exact") if restored.forecast is not None and restored.forecast.feasible else ("exact",)


def _recovery_row(life: int, restored: Restored, mode: str, watching: bool) -> RecoveryRow:
    forecast = restored.forecast
    vetoed = restored.recomputes in (Recomputes.DUMP_REFUSED, Recomputes.PREDICTION_REFUSED)
    return RecoveryRow(
        id=uuid.uuid4().hex,
        life=life,
        failure_iteration=restored.failure_iteration,
        checkpoint_iteration=restored.checkpoint_iteration,
        restored_iteration=restored.restored_iteration,
        method=restored.method,
        requested_mode=mode,
        feasible=_feasible(restored),
        expected_end_cost_iterations=restored.expected_end_cost_iterations,
        settings={} if forecast is None else {"method": forecast.method, **forecast.settings},
        reason=restored.reason,
        load_seconds=restored.load_seconds,
        predict_seconds=restored.predict_seconds,
        inject_seconds=restored.inject_seconds,
        guard=restored.guard,
        origin=restored.origin,
        outcome="vetoed" if vetoed else "watching" if watching else "kept",
        sources=tuple(
            RecoverySource(rank=source.rank, source=source.tier, iteration=source.iteration)
            for source in restored.sources
        ),
    )
