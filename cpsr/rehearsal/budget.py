"""The budget of rehearsals: a share of the training time, earned before it is spent."""

from dataclasses import dataclass

from cpsr.journal import JournalReader, RankJournal

__all__ = ["RehearsalAccount", "RehearsalBudget", "rehearsal_account"]


@dataclass(frozen=True)
class RehearsalAccount:
    """The journal's totals of the run's rehearsals so far.

    Attributes:
        trained_seconds: wall time of all steps.
        spent_seconds: wall time of all rehearsals.
        count: their number.
        killed: those without an end: the job was killed during them.
    """

    trained_seconds: float = 0.0
    spent_seconds: float = 0.0
    count: int = 0
    killed: int = 0


def rehearsal_account(journal: RankJournal) -> RehearsalAccount:
    """Cost of rehearsals over all lives of the run (rank 0; empty on other ranks, or if it is unknown)."""

    def question(reader: JournalReader) -> RehearsalAccount:
        rows = reader.rehearsals()
        spent_seconds = sum(row.cost_seconds for row in rows)
        killed = sum(row.outcome == "running" for row in rows)
        return RehearsalAccount(reader.trained_seconds(), spent_seconds, len(rows), killed)

    return journal.read(question, RehearsalAccount(), "the budget of rehearsals starts from 0")


class RehearsalBudget:
    """Compares the training time of the run, over all its lives, with the time of its rehearsals.

    Args:
        fraction: share of the training time that may be spent.
        trained_seconds: training of earlier lives.
        spent_seconds: rehearsals of earlier lives.

    Attributes:
        trained_seconds: wall time of all steps, rehearsals not included.
        spent_seconds: wall time of all rehearsals.
    """

    def __init__(self, fraction: float, trained_seconds: float = 0.0, spent_seconds: float = 0.0) -> None:
        self._fraction = fraction
        self.trained_seconds = trained_seconds
        self.spent_seconds = spent_seconds
        self._step_seconds = 0.0  # of this life: a new machine may have another speed
        self._steps = 0

    def train(self, seconds: float) -> None:
        """Add the time of a step."""
        self.trained_seconds += seconds
        self._step_seconds += seconds
        self._steps += 1

    def spend(self, seconds: float) -> None:
        """Add the time of a rehearsal."""
        self.spent_seconds += seconds

    @property
    def iteration_seconds(self) -> float:
        """Mean wall time of a step in this life; 0 before the first."""
        return self._step_seconds / self._steps if self._steps else 0.0

    def allows(self, seconds: float) -> bool:
        """Whether the budget covers a rehearsal with this expected time."""
        return self.spent_seconds + seconds <= self._fraction * self.trained_seconds
