"""Host memory that a method takes, its own processes and shared memory included."""

from pathlib import Path
from types import TracebackType

import psutil

from cpsr.benchmarks.harness.processes import Sampling
from cpsr.benchmarks.stall.job import Job, Size
from cpsr.benchmarks.stall.roster import Entry

__all__ = ["FamilyPeak", "family_bytes", "host_memory_bytes"]

SAMPLE_SECONDS = 0.01  # staging a state takes several of these
CHECKPOINTS = 3  # buffers that are made at the first are in use by the last
STEPS_BEFORE = 3
KIBIBYTE = 1024
FIELDS = ("Pss_Anon:", "Pss_Shmem:")


def family_bytes() -> int:
    """Memory of this process and its children, each shared page counted once; files in the page cache are not in it.

    From Linux's `smaps_rollup`, in which pinned memory that the CUDA driver maps by itself may be missing.
    """
    own = psutil.Process()
    return sum(_process_bytes(process.pid) for process in [own, *own.children(recursive=True)])


def _process_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0
    return sum(int(line.split()[1]) * KIBIBYTE for line in lines if line.startswith(FIELDS))


class FamilyPeak(Sampling):
    """Samples `family_bytes` in a thread, as a context manager around the work.

    Attributes:
        peak_bytes: the largest sample.
    """

    def __init__(self) -> None:
        super().__init__(self._note, SAMPLE_SECONDS)
        self.peak_bytes = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop; the last figure counts too."""
        super().__exit__(kind, error, traceback)
        self._note()

    def _note(self) -> None:
        self.peak_bytes = max(self.peak_bytes, family_bytes())


def host_memory_bytes(entry: Entry, size: Size, directory: Path) -> int:
    """Peak over a few checkpoints above the peak of the same training without any; in a process of its own.

    Raises:
        CPSRError: a save failed.
    """
    job = Job(size)
    with FamilyPeak() as training:
        for _ in range(STEPS_BEFORE):
            job.step()
    with FamilyPeak() as saving, entry.open(job, directory) as method:
        for _ in range(CHECKPOINTS):
            method.arm()
            job.step(then=method.save)
            job.step()  # a copy may go on until the next update
            while method.durable_unix_seconds() is None:
                job.step()
            method.clean()
    return saving.peak_bytes - training.peak_bytes
