"""What is found out about one method before anything is timed: that it runs, and what host memory it holds."""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from cpsr.benchmarks.harness.processes import MemoryPeak, in_own_process
from cpsr.benchmarks.stall.job import Job, Size
from cpsr.benchmarks.stall.rivals import Entry
from cpsr.errors import CPSRError

__all__ = ["Trial", "family_bytes", "try_method"]

ERROR_LENGTH = 300
SAMPLE_SECONDS = 0.01  # staging a state takes several of these
CHECKPOINTS = 3  # buffers that are made at the first are in use by the last
STEPS_BEFORE = 3
KIBIBYTE = 1024
FIELDS = ("Pss_Anon:", "Pss_Shmem:")


@dataclass(frozen=True)
class Trial:
    """One method.

    Attributes:
        entry: the method.
        error: why it could not be run.
        host_memory_bytes: size -> what it holds at its peak.
    """

    entry: Entry
    error: str | None = None
    host_memory_bytes: dict[str, int] = field(default_factory=dict)


def try_method(entry: Entry, sizes: Sequence[Size], directory: Path) -> Trial:
    """Weigh a method at every size, each in a process of its own."""
    try:
        return Trial(entry, None, {size.name: in_own_process(_weighed, entry, size, directory) for size in sizes})
    except CPSRError as error:
        return Trial(entry, str(error))


def _weighed(entry: Entry, size: Size, directory: Path) -> int:
    """Peak over a few checkpoints above the peak of the same training without any.

    What goes wrong is raised as a type that the other process knows.
    """
    logging.getLogger().addHandler(logging.NullHandler())
    warnings.simplefilter("ignore")
    try:
        with TemporaryDirectory(dir=directory) as saved:
            job = Job(size)
            with MemoryPeak(family_bytes, SAMPLE_SECONDS) as training:
                for _ in range(STEPS_BEFORE):
                    job.step()
            with MemoryPeak(family_bytes, SAMPLE_SECONDS) as saving, entry.open(job, Path(saved)) as method:
                for _ in range(CHECKPOINTS):
                    method.arm()
                    job.step(then=method.save)
                    job.step()  # a copy may go on until the next update
                    while method.durable_unix_seconds() is None:
                        job.step()
                    method.clean()
            return saving.peak_bytes - training.peak_bytes
    except Exception as error:
        raise CPSRError(f"{entry.name}: {type(error).__name__}: {error}"[:ERROR_LENGTH]) from error


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
