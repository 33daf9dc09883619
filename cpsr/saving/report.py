"""How a save ended, for the log and the journal."""

import logging
from typing import Literal

from cpsr.checkpoint.writer import SaveOutcome
from cpsr.journal import CheckpointRow, RankJournal

__all__ = ["Origin", "report_save"]

logger = logging.getLogger(__name__)

Origin = Literal["trained", "predicted"]


def report_save(journal: RankJournal, outcome: SaveOutcome, origin: Origin) -> None:
    """Report how a save ended: an event if it was not committed, and a row in the journal on rank 0."""
    if outcome.status in ("failed", "skipped"):
        failed = outcome.status == "failed"
        what = f"checkpoint {outcome.iteration} {outcome.status}{f' on rank {journal.rank}' if failed else ''}"
        # Rank 0 learns why another rank has skipped one, and says so for all.
        level = logging.ERROR if failed else logging.WARNING if journal.rank == 0 else logging.DEBUG
        message = f"{what}: {outcome.reason}; training continues, earlier checkpoints are kept"
        journal.event(f"checkpoint {outcome.status}", message, outcome.iteration, level)
    if outcome.status == "written" or journal.rank != 0:
        return
    if outcome.status == "committed":
        logger.info(
            "checkpoint %d committed: %.1f MB, stall %.1f ms, durable after %.2f s",
            outcome.iteration,
            outcome.bytes / 1e6,
            1e3 * outcome.stall_seconds,
            outcome.write_seconds + outcome.commit_seconds,
        )
    journal.record(
        CheckpointRow(
            life=journal.life,
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
    journal.gather_events()
