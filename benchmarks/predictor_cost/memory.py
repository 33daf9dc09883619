"""Resident memory of this process, and its peak over a piece of work."""

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from cpsr.benchmarks.harness.sampling import Sampling

__all__ = ["MemoryPeak", "Resident", "resident"]

STATUS = Path("/proc/self/status")
# A piece of 2 MiB takes about 0.1 ms to combine, so that a peak is not one moment but hundreds of pieces long.
SAMPLE_SECONDS = 0.005
KIBIBYTE = 1024


@dataclass(frozen=True)
class Resident:
    """Resident bytes of this process.

    Attributes:
        anonymous_bytes: its own memory (RssAnon).
        file_bytes: mapped files in the page cache (RssFile), which the system takes back when it needs to.
    """

    anonymous_bytes: int
    file_bytes: int


def resident() -> Resident:
    """The present figures, from Linux's `/proc/self/status`."""
    fields = dict(line.split(":", 1) for line in STATUS.read_text(encoding="ascii").splitlines())
    anonymous, file = (int(fields[name].split()[0]) * KIBIBYTE for name in ("RssAnon", "RssFile"))
    return Resident(anonymous, file)


class MemoryPeak(Sampling):
    """Samples the resident memory every 5 ms in a thread, as a context manager around the work.

    Attributes:
        before: when the context was entered.
        peak: the largest of each figure so far, by itself.
    """

    def __init__(self) -> None:
        super().__init__(self._note, SAMPLE_SECONDS)
        self.before = self.peak = resident()

    def __enter__(self) -> Self:
        """Start to sample."""
        super().__enter__()
        self.before = self.peak = resident()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop; the last figures count too."""
        super().__exit__(kind, error, traceback)
        self._note()

    @property
    def above_before(self) -> Resident:
        """How far the peak lies above the level before."""
        return Resident(
            self.peak.anonymous_bytes - self.before.anonymous_bytes, self.peak.file_bytes - self.before.file_bytes
        )

    def _note(self) -> None:
        now = resident()
        self.peak = Resident(
            max(self.peak.anonymous_bytes, now.anonymous_bytes), max(self.peak.file_bytes, now.file_bytes)
        )
