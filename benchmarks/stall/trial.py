"""What is found out about one method before anything is timed: that it runs, what damage does to it, what it holds."""

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from cpsr.benchmarks.harness.processes import in_own_process
from cpsr.benchmarks.stall.damage import Answer, Case, damage_cases
from cpsr.benchmarks.stall.footprint import host_memory_bytes
from cpsr.benchmarks.stall.job import Size
from cpsr.benchmarks.stall.roster import Entry
from cpsr.errors import CPSRError

__all__ = ["Trial", "try_method"]

ERROR_LENGTH = 300


@dataclass
class Trial:
    """One method.

    Attributes:
        name: the method.
        forced: whether its files are forced to the disk.
        error: why it could not be run; nothing else is filled then.
        cases: what it gives back after damage.
        host_memory_bytes: size -> what it holds at its peak.
    """

    name: str
    forced: bool = True
    error: str | None = None
    cases: list[Case] = field(default_factory=list)
    host_memory_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def verifies(self) -> bool:
        """Whether no damage went unnoticed."""
        return all(case.answer not in (Answer.SILENTLY_WRONG, Answer.NOTHING) for case in self.cases)

    def answers(self, damage: str) -> dict[Answer, int]:
        """Files by what their damage led to, the worst first."""
        counts = Counter(case.answer for case in self.cases if case.damage == damage)
        return {answer: counts[answer] for answer in Answer if counts[answer]}


def try_method(entry: Entry, sizes: Sequence[Size], directory: Path) -> Trial:
    """Damage its checkpoints of the first size, and weigh it at every size.

    Args:
        entry: the method.
        sizes: of the jobs.
        directory: it saves below it.
    """
    trial = Trial(entry.name, entry.forced)
    try:
        first, *others = sizes
        trial.host_memory_bytes[first.name], trial.cases = in_own_process(_weighed_and_damaged, entry, first, directory)
        for size in others:
            trial.host_memory_bytes[size.name] = in_own_process(_weighed, entry, size, directory)
    except CPSRError as error:
        return Trial(entry.name, entry.forced, error=str(error))
    return trial


def _weighed_and_damaged(entry: Entry, size: Size, directory: Path) -> tuple[int, list[Case]]:
    memory_bytes = _weighed(entry, size, directory)  # first: what damage leaves in the allocator would be missing
    with _portable_errors(entry), TemporaryDirectory(dir=directory) as damaged:
        return memory_bytes, damage_cases(entry, size, Path(damaged))


def _weighed(entry: Entry, size: Size, directory: Path) -> int:
    with _portable_errors(entry), TemporaryDirectory(dir=directory) as saved:
        return host_memory_bytes(entry, size, Path(saved))


@contextmanager
def _portable_errors(entry: Entry) -> Iterator[None]:
    """In the method's own process: no log but what it raises, as a type that this process knows."""
    logging.getLogger().addHandler(logging.NullHandler())
    warnings.simplefilter("ignore")
    try:
        yield
    except Exception as error:
        raise CPSRError(f"{entry.name}: {type(error).__name__}: {error}"[:ERROR_LENGTH]) from error
