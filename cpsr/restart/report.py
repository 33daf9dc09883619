"""How a life began, for the journal: the failure before it, and the recovery."""

import logging
import uuid

from cpsr.journal import Beginning, FailureRow, RankJournal, RecoveryRow, RecoverySource
from cpsr.ranks.exits import FAILED
from cpsr.restart.restored import Recomputes, Restored

__all__ = ["report_recovery"]


def report_recovery(journal: RankJournal, restored: Restored, cause: str | None, mode: str, watching: bool) -> str:
    """Record the failure and the recovery that began this life.

    Args:
        journal: of this rank; rank 0 records.
        restored: how this life began.
        cause: how the last life ended, as a clause; None where it ended in good order.
        mode: the configured mode.
        watching: whether the predicted state is being watched.

    Returns:
        The recovery's id; empty where there was none.
    """
    if cause is not None:
        # For `inspect`: of a life that failed before its first checkpoint there is no other record.
        journal.event(FAILED, cause, restored.failure_iteration, logging.DEBUG)
    if restored.beginning is Beginning.SCRATCH or journal.rank != 0:
        return ""
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
    return row.id


def _feasible(restored: Restored) -> list[str]:
    if restored.beginning is Beginning.WEIGHTS:
        return [restored.method]
    return ["predicted", "exact"] if restored.forecast is not None and restored.forecast.feasible else ["exact"]


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
        expected_end_cost_iterations=None if forecast is None else forecast.expected_end_cost_iterations,
        settings={} if forecast is None else {"method": forecast.method, **forecast.settings},
        reason="; ".join(filter(None, (restored.reason, restored.compared))),
        load_seconds=restored.load_seconds,
        predict_seconds=restored.predict_seconds,
        inject_seconds=restored.inject_seconds,
        guard=restored.guard,
        outcome="vetoed" if vetoed else "watching" if watching else "kept",
        sources=tuple(
            RecoverySource(rank=source.rank, source=source.tier, iteration=source.iteration)
            for source in restored.sources
        ),
    )
