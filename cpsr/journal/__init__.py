"""The run's journal: what happened, when and why, in one SQLite file that survives every kill."""

from cpsr.journal.beginning import Beginning
from cpsr.journal.commands import ReportedFailure, report_failure, reported_failures
from cpsr.journal.events import EventFile
from cpsr.journal.overrides import PlanOverride, latest_override, override_plan
from cpsr.journal.rank_journal import RankJournal, open_journal
from cpsr.journal.reader import JournalReader
from cpsr.journal.rows import (
    BacktestRow,
    BubbleRow,
    CheckpointRow,
    EventRow,
    FailureRow,
    FailureScope,
    FitRow,
    LearningRow,
    LifeRow,
    PhaseRow,
    PlanRow,
    RecoveryRow,
    RecoverySource,
    StepRow,
    TotalsRow,
    json_ready,
)
from cpsr.journal.schema import SCHEMA_VERSION
from cpsr.journal.sizes import Size, sizes
from cpsr.journal.writer import Journal

__all__ = [
    "SCHEMA_VERSION",
    "BacktestRow",
    "Beginning",
    "BubbleRow",
    "CheckpointRow",
    "EventFile",
    "EventRow",
    "FailureRow",
    "FailureScope",
    "FitRow",
    "Journal",
    "JournalReader",
    "LearningRow",
    "LifeRow",
    "PhaseRow",
    "PlanOverride",
    "PlanRow",
    "RankJournal",
    "RecoveryRow",
    "RecoverySource",
    "ReportedFailure",
    "Size",
    "StepRow",
    "TotalsRow",
    "json_ready",
    "latest_override",
    "open_journal",
    "override_plan",
    "report_failure",
    "reported_failures",
    "sizes",
]
