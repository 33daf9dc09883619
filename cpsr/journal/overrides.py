"""Temporary overrides of the checkpoint interval by people: a number, or bounds."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from cpsr.journal.commands import read_commands, write_command

__all__ = ["PlanOverride", "latest_override", "override_plan"]

_COLUMNS = "interval_min_iterations, interval_max_iterations, reason, expires_unix_seconds, created_unix_seconds"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOverride:
    """Temporary bounds of the interval; the newest override replaces all earlier ones.

    Attributes:
        interval_min_iterations: None for none. Both None: withdraws an earlier override.
        interval_max_iterations: None for none; equal to the minimum to pin the interval.
        reason: for people.
        expires_unix_seconds: end of its validity, by the clock of rank 0's machine.
        created_unix_seconds: when it was created.
        id: assigned when it is written; ascending.
    """

    interval_min_iterations: int | None
    interval_max_iterations: int | None
    reason: str
    expires_unix_seconds: float
    created_unix_seconds: float = field(default_factory=time.time)
    id: int = 0

    @property
    def withdrawn(self) -> bool:
        """Whether it only ends an earlier override."""
        return self.interval_min_iterations is None and self.interval_max_iterations is None

    @property
    def pinned(self) -> bool:
        """Whether it allows only one interval."""
        return not self.withdrawn and self.interval_min_iterations == self.interval_max_iterations

    def holds(self, now_unix_seconds: float) -> bool:
        """Whether it is in force now."""
        return not self.withdrawn and now_unix_seconds < self.expires_unix_seconds

    def within(self, interval_min_iterations: int, interval_max_iterations: int) -> tuple[int, int]:
        """The given bounds, narrowed by this override; if they do not overlap, the nearest given bound."""
        low, high = interval_min_iterations, interval_max_iterations
        own_low = low if self.interval_min_iterations is None else self.interval_min_iterations
        own_high = high if self.interval_max_iterations is None else self.interval_max_iterations
        return min(max(own_low, low), high), max(min(own_high, high), low)


def override_plan(run_dir: Path, override: PlanOverride) -> int:
    """Store an override and return its id; it is durable when this returns.

    Raises:
        JournalError: there is no run here, or the file cannot be written.
    """
    values = (
        override.interval_min_iterations,
        override.interval_max_iterations,
        override.reason,
        override.expires_unix_seconds,
        override.created_unix_seconds,
    )
    return write_command(run_dir, f"INSERT INTO overrides ({_COLUMNS}) VALUES (?, ?, ?, ?, ?)", values)  # noqa: S608


def latest_override(run_dir: Path) -> PlanOverride | None:
    """The newest override, whether it is in force or not; None if there is none.

    Raises:
        JournalError: the file cannot be read.
    """
    rows = read_commands(run_dir, f"SELECT {_COLUMNS}, id FROM overrides ORDER BY id DESC LIMIT 1")  # noqa: S608
    for low, high, reason, expires, created, number in rows:
        return PlanOverride(
            interval_min_iterations=low,
            interval_max_iterations=high,
            reason=reason,
            expires_unix_seconds=expires,
            created_unix_seconds=created,
            id=number,
        )
    return None
