"""What one rank tells the journal: global rank 0 writes it, the others leave word in their event files."""

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cpsr.checkpoint.writer import SaveOutcome
from cpsr.errors import JournalDamagedError, JournalError
from cpsr.exits import FAILED
from cpsr.fitter.phases import Phase
from cpsr.group import Group
from cpsr.journal import (
    BacktestRow,
    BubbleRow,
    CheckpointRow,
    EventFile,
    EventRow,
    FailureRow,
    FitRow,
    Journal,
    JournalReader,
    PhaseRow,
    PlanRow,
    RecoveryRow,
    RehearsalRow,
    StepRow,
)
from cpsr.journal import RecoverySource as Source
from cpsr.losses import Step
from cpsr.planner.plan import Plan
from cpsr.restore import Restored

__all__ = ["Recorder", "RehearsalAccount"]

logger = logging.getLogger(__name__)

JOURNAL_CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class RehearsalAccount:
    """What the run's journal says of its rehearsals so far.

    Attributes:
        trained_seconds: wall time of all steps.
        spent_seconds: wall time of all rehearsals.
        count: their number.
        killed: those that never ended: the job was killed during them.
    """

    trained_seconds: float = 0.0
    spent_seconds: float = 0.0
    count: int = 0
    killed: int = 0


class Recorder:
    """One rank's side of the run's journal; nothing here blocks training or stops it.

    Args:
        run_dir: the run's directory.
        group: the ranks; opening is a collective.
        mode: the configured recovery mode.
        after_life: newest life known from elsewhere; this one's number is larger.
        full_steps: how many of the newest steps are not thinned out; None for all.

    Raises:
        JournalError: the journal cannot be used; every rank raises it.
    """

    def __init__(
        self, run_dir: Path, group: Group, mode: str, after_life: int = -1, full_steps: int | None = None
    ) -> None:
        self._rank = group.rank
        self._directory = run_dir / "events"
        self._journal: Journal | None = None
        self._events: EventFile | None = None
        refusal, life = None, 0
        if group.rank == 0:
            try:
                self._journal = _open_journal(run_dir / "journal.db", full_steps)
                life = self._journal.start_life(mode, after_life)
            except JournalError as error:
                refusal = str(error)
        else:
            try:
                self._events = EventFile(self._directory / f"rank-{group.rank:05d}.jsonl")
            except OSError as error:
                refusal = f"rank {group.rank} cannot open its event file: {error}"
        opened = group.gather({"refusal": refusal, "life": life})
        refusals = [part["refusal"] for part in opened if part["refusal"] is not None]
        if refusals:
            raise JournalError("; ".join(refusals))
        self.life: int = opened[0]["life"]

    def event(self, kind: str, message: str, iteration: int | None = None, level: int = logging.INFO) -> None:
        """Log one line and record it."""
        logger.log(level, "%s", message)
        row = EventRow(life=self.life, rank=self._rank, kind=kind, message=message, iteration=iteration)
        if self._journal is not None:
            self._journal.record_event(row)
        elif self._events is not None:
            self._events.append(row)

    def bubbles(self, row: BubbleRow) -> None:
        """Record what this rank's waits amounted to."""
        if self._journal is not None:
            self._journal.record_bubbles(row)
        elif self._events is not None:
            self._events.append(row)

    def steps(self, steps: Sequence[Step]) -> None:
        """Record finished iterations (rank 0)."""
        if self._journal is not None and steps:
            self._journal.record_steps([StepRow(life=self.life, **vars(step)) for step in steps])

    def plan(self, plan: Plan, iteration: int) -> None:
        """Record the interval that holds from `iteration` on (rank 0)."""
        if self._journal is not None:
            self._journal.record_plan(
                PlanRow(
                    life=self.life,
                    from_iteration=iteration,
                    interval_iterations=plan.interval_iterations,
                    origin=plan.origin,
                    mode=plan.mode,
                    explanation=plan.explanation,
                )
            )

    def flush(self, timeout_seconds: float) -> None:
        """Wait until what was recorded so far can be read; never on the training thread (rank 0)."""
        if self._journal is not None:
            self._journal.flush(timeout_seconds)

    def phase(self, phase: Phase, number: int) -> None:
        """Record a phase that has ended (rank 0)."""
        if self._journal is not None:
            self._journal.record_phase(PhaseRow(life=self.life, phase=number, **asdict(phase)))

    def fit(self, kind: Literal["loss", "predictor", "failure_rate"], result: dict[str, Any], iteration: int) -> None:
        """Record a curve as it was fitted (rank 0)."""
        if self._journal is not None:
            self._journal.record_fit(FitRow(life=self.life, iteration=iteration, kind=kind, result=result))

    def backtests(self, accuracy: Sequence[Mapping[str, Any]]) -> None:
        """Record what the predictor knows of its own accuracy; what is recorded already stays as it is (rank 0)."""
        if self._journal is not None and accuracy:
            self._journal.record_backtests([_backtest(self.life, one) for one in accuracy])

    def outcome(self, outcome: SaveOutcome, origin: Literal["trained", "predicted"]) -> None:
        """Surface how a save ended: a line in the log where it did not end well, a row in the journal."""
        if outcome.status in ("failed", "skipped"):
            what = f"checkpoint {outcome.iteration} {outcome.status} on rank {self._rank}: {outcome.reason}"
            self.event(
                f"checkpoint {outcome.status}",
                f"{what}; training goes on, older checkpoints are untouched",
                outcome.iteration,
                logging.ERROR if outcome.status == "failed" else logging.WARNING,
            )
        if self._journal is None or outcome.status == "written":
            return
        if outcome.status == "committed":
            logger.info(
                "checkpoint %d committed: %.1f MB, stall %.1f ms, durable after %.2f s",
                outcome.iteration,
                outcome.bytes / 1e6,
                1e3 * outcome.stall_seconds,
                outcome.write_seconds + outcome.commit_seconds,
            )
        self._journal.record_checkpoint(
            CheckpointRow(
                life=self.life,
                iteration=outcome.iteration,
                status=outcome.status,
                reason=outcome.reason,
                bytes=outcome.bytes,
                stall_seconds=outcome.stall_seconds,
                write_seconds=outcome.write_seconds,
                commit_seconds=outcome.commit_seconds,
                origin=origin,
            )
        )
        self._journal.import_events(self._directory)

    def restored(self, restored: Restored, cause: str | None, mode: str, watching: bool) -> str | None:
        """Record the failure and the recovery that began this life; returns the recovery's id.

        Args:
            restored: how this life began.
            cause: how the last life ended, as a clause; None where it ended in good order.
            mode: the configured mode.
            watching: whether the predicted state is being watched.
        """
        if self._journal is None:
            return None
        if cause is not None:
            # For `inspect`: of a life that failed before its first checkpoint there is no other record.
            self.event(FAILED, cause, restored.failure_iteration, logging.DEBUG)
        if restored.method == "scratch":
            return None
        if restored.failure_iteration is not None:
            self._journal.record_failure(
                FailureRow(
                    life=max(self.life - 1, 0),
                    iteration=restored.failure_iteration,
                    checkpoint_iteration=restored.checkpoint_iteration,
                    description=cause or "the last life left in order, without having saved its last state",
                )
            )
        forecast = restored.forecast
        recovery_id = uuid.uuid4().hex
        vetoed = restored.method in ("exact", "stale") and bool(restored.guard.keys() - {"lost_tokens"})
        self._journal.record_recovery(
            RecoveryRow(
                id=recovery_id,
                life=self.life,
                failure_iteration=restored.failure_iteration,
                checkpoint_iteration=restored.checkpoint_iteration,
                restored_iteration=restored.restored_iteration,
                method=restored.method,
                requested_mode=mode,
                feasible=["predicted", "exact"] if forecast is not None and forecast.feasible else ["exact"],
                expected_lag_iterations=None if forecast is None else forecast.expected_lag_iterations,
                settings={} if forecast is None else {"method": forecast.method, **forecast.settings},
                reason=restored.reason,
                load_seconds=restored.load_seconds,
                predict_seconds=restored.predict_seconds,
                inject_seconds=restored.inject_seconds,
                guard=restored.guard,
                outcome="vetoed" if vetoed else "watching" if watching else "kept",
                sources=tuple(
                    Source(rank=source.rank, source=source.tier, iteration=source.iteration)
                    for source in restored.sources
                ),
            )
        )
        return recovery_id

    def recovery_outcome(self, recovery_id: str | None, outcome: Literal["kept", "rolled_back"], guard: Any) -> None:
        """Record how the watch after a predicted restart ended (rank 0)."""
        if self._journal is not None and recovery_id is not None:
            self._journal.update_recovery(recovery_id, outcome, guard)

    def losses_before(self, iteration: int, count: int) -> list[tuple[int, float]]:
        """The newest losses of at most `count` iterations up to this one, of all lives (rank 0; elsewhere none)."""
        if self._journal is None:
            return []
        try:
            with JournalReader(self._journal.path) as reader:
                steps = reader.losses(iteration - count, iteration + 1)
        except JournalError as error:
            logger.warning("losses before the failure cannot be read, its lag will not be told: %s", error)
            return []
        return [(step.iteration, step.loss) for step in steps if step.loss is not None]

    def rehearsal(self, row: RehearsalRow) -> None:
        """Record a rehearsal that begins, or how it ended (rank 0)."""
        if self._journal is not None:
            self._journal.record_rehearsal(row)

    def rehearsal_account(self) -> RehearsalAccount:
        """What rehearsals have cost over all lives of the run (rank 0; nothing elsewhere, or where it is not known)."""
        if self._journal is None:
            return RehearsalAccount()
        try:
            with JournalReader(self._journal.path) as reader:
                rehearsals = reader.rehearsals()
                spent_seconds = sum(row.cost_seconds for row in rehearsals)
                killed = sum(row.outcome == "running" for row in rehearsals)
                return RehearsalAccount(reader.trained_seconds(), spent_seconds, len(rehearsals), killed)
        except JournalError as error:
            logger.warning("what rehearsals have cost so far cannot be read, their budget starts anew: %s", error)
            return RehearsalAccount()

    def close(self, ending: Literal["clean", "sigterm", "error"]) -> None:
        """Write what waits and end the life's record."""
        if self._journal is not None:
            self._journal.import_events(self._directory)
            self._journal.end_life(ending)
            self._journal.close(JOURNAL_CLOSE_SECONDS)
        if self._events is not None:
            self._events.close()


def _backtest(life: int, one: Mapping[str, Any]) -> BacktestRow:
    result = {name: value for name, value in one.items() if name not in ("iteration", "checkpoints")}
    return BacktestRow(life=life, iteration=one["iteration"], checkpoints=one["checkpoints"], result=result)


def _open_journal(path: Path, full_steps: int | None) -> Journal:
    """Open the journal; a damaged one is set aside, because a restart must not wait for somebody to repair it."""
    try:
        return Journal.open(path, full_steps)
    except JournalDamagedError as error:
        suffix = f".damaged-{int(time.time())}"
        for part in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
            if part.exists():
                part.rename(part.with_name(part.name + suffix))
        logger.error("%s; it was set aside as %s and a new journal begins", error, path.name + suffix)
        return Journal.open(path, full_steps)
