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
        what = f"checkpoint {outcome.iteration} {outcome.status} on rank {journal.rank}: {outcome.reason}"
        journal.event(
            f"checkpoint {outcome.status}",
            f"{what}; training goes on, older checkpoints are untouched",
            outcome.iteration,
            logging.ERROR if outcome.status == "failed" else logging.WARNING,
        )
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
