"""The run's journal: what happened, when and why, in one SQLite file that survives every kill."""

from cpsr.journal.commands import (
    PlanOverride,
    ReportedFailure,
    latest_override,
    override_plan,
    report_failure,
    reported_failures,
)
from cpsr.journal.events import EventFile
from cpsr.journal.rank_journal import RankJournal, log_to_terminal, open_journal
from cpsr.journal.reader import JournalReader, Recorded
from cpsr.journal.rows import (
    Beginning,
    CheckpointRow,
    EventRow,
    FailureRow,
    FailureScope,
    FitRow,
    LifeRow,
    Origin,
    PhaseRow,
    PlanRow,
    RecoveryRow,
    RecoverySource,
    StepRow,
    json_ready,
)
from cpsr.journal.writer import Journal

__all__ = [
    "Beginning",
    "CheckpointRow",
    "EventFile",
    "EventRow",
    "FailureRow",
    "FailureScope",
    "FitRow",
    "Journal",
    "JournalReader",
    "LifeRow",
    "Origin",
    "PhaseRow",
    "PlanOverride",
    "PlanRow",
    "RankJournal",
    "Recorded",
    "RecoveryRow",
    "RecoverySource",
    "ReportedFailure",
    "StepRow",
    "json_ready",
    "latest_override",
    "log_to_terminal",
    "open_journal",
    "override_plan",
    "report_failure",
    "reported_failures",
]
