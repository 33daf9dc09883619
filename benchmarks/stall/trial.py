"""What is found out about one method before anything is timed: that it runs, what damage does to it, what it holds."""

import enum
import logging
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

import psutil
import torch
from torch.distributed.checkpoint.api import CheckpointException

from cpsr.benchmarks.harness.processes import Sampling, in_own_process
from cpsr.benchmarks.stall.job import Job, Size
from cpsr.benchmarks.stall.methods import Method, State
from cpsr.benchmarks.stall.rivals import Entry
from cpsr.errors import CPSRError

__all__ = ["DAMAGES", "Answer", "Case", "FamilyPeak", "Trial", "damage_cases", "family_bytes", "try_method"]

ERROR_LENGTH = 300
SAMPLE_SECONDS = 0.01  # staging a state takes several of these
CHECKPOINTS = 3  # buffers that are made at the first are in use by the last
STEPS_BEFORE = 3
KIBIBYTE = 1024
FIELDS = ("Pss_Anon:", "Pss_Shmem:")


class Answer(enum.StrEnum):
    """What came back, the worst first."""

    SILENTLY_WRONG = "silently wrong"  # values that were never saved
    NOTHING = "nothing"  # neither a state nor an error
    ERROR = "error"  # an exception: it is noticed, and finding an older checkpoint is left to the user
    VERIFIED = "verified"  # the checkpoint before it, bit for bit
    UNHARMED = "unharmed"  # the very state that was saved, bit for bit


@dataclass(frozen=True)
class Case:
    """One damaged file.

    Attributes:
        damage: a key of `DAMAGES`.
        file: relative to the method's checkpoints.
        answer: what was restored from it.
        detail: the error, where there was one.
    """

    damage: str
    file: str
    answer: Answer
    detail: str = ""


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
        return _host_memory_bytes(entry, size, Path(saved))


@contextmanager
def _portable_errors(entry: Entry) -> Iterator[None]:
    """In the method's own process: no log but what it raises, as a type that this process knows."""
    logging.getLogger().addHandler(logging.NullHandler())
    warnings.simplefilter("ignore")
    try:
        yield
    except Exception as error:
        raise CPSRError(f"{entry.name}: {type(error).__name__}: {error}"[:ERROR_LENGTH]) from error


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0xFF]))


def _truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


DAMAGES: dict[str, Callable[[Path], None]] = {"one flipped byte": _flip, "truncated file": _truncate}


def damage_cases(entry: Entry, size: Size, directory: Path) -> list[Case]:
    """Save two checkpoints, then damage each file of the newer one in turn, each time in a fresh copy.

    Args:
        entry: the method.
        size: of the job.
        directory: empty; holds the copies too.

    Raises:
        CPSRError: a save failed.
        AssertionError: what was saved does not come back when nothing is damaged.
    """
    home, copy = directory / "saved", directory / "damaged"
    method, older, newer, files = _two_checkpoints(entry, size, home)
    untouched, detail = _answer(method, size, home, older, newer)
    assert untouched is Answer.UNHARMED, f"{entry.name} does not give back what it saved: {untouched} {detail}"
    cases = []
    for damage, apply in DAMAGES.items():
        for file in files:
            shutil.copytree(home, copy)
            apply(copy / method.checkpoints / file)
            cases.append(Case(damage, str(file), *_answer(method, size, copy, older, newer)))
            shutil.rmtree(copy)
    return cases


def _two_checkpoints(entry: Entry, size: Size, home: Path) -> tuple[Method, State, State, list[Path]]:
    """The closed method, both states, and the files that came or changed with the second; all are in `home`."""
    job = Job(size)
    with TemporaryDirectory(dir=home.parent) as running, entry.open(job, Path(running)) as method:
        older = _saved(job, method)
        before = _files(Path(running) / method.checkpoints)
        newer = _saved(job, method)
        after = _files(Path(running) / method.checkpoints)
        changed = [path for path, identity in after.items() if before.get(path) != identity and path.stat().st_size > 0]
        files = sorted(path.relative_to(Path(running) / method.checkpoints) for path in changed)
        shutil.copytree(running, home)  # a job that ends in order may save its last state, too
    return method, older, newer, files


def _saved(job: Job, method: Method) -> State:
    method.arm()
    job.step(then=method.save)
    state = {name: tensor.detach().clone() for name, tensor in job.state.items()}
    job.step()  # a copy may go on until the next update
    while method.durable_unix_seconds() is None:
        job.step()
    return state


def _files(directory: Path) -> dict[Path, tuple[int, int]]:
    """Every file, with what changes when it is written anew."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def _answer(method: Method, size: Size, directory: Path, older: State, newer: State) -> tuple[Answer, str]:
    try:
        restored = method.restore(Job(size), directory)
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - whatever other packages raise is their answer
        return Answer.ERROR, f"{type(error).__name__}: {error}"[:200]
    if restored is None:
        return Answer.NOTHING, ""
    if _same(restored, newer):
        return Answer.UNHARMED, ""
    return (Answer.VERIFIED, "") if _same(restored, older) else (Answer.SILENTLY_WRONG, "")


def _same(restored: State, saved: State) -> bool:
    """Bit for bit: a NaN equals itself, and 0 is not -0."""
    return restored.keys() == saved.keys() and all(
        torch.equal(_bytes_of(restored[name]), _bytes_of(saved[name])) for name in saved
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """On the host: some packages restore a GPU's state there."""
    return tensor.detach().cpu().contiguous().view(torch.uint8)


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


def _host_memory_bytes(entry: Entry, size: Size, directory: Path) -> int:
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
