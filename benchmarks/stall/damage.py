"""What a method gives back after one byte of a checkpoint has changed, or a file of it has lost its second half."""

import enum
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from cpsr.benchmarks.stall.job import Job, Size
from cpsr.benchmarks.stall.methods import Method, State
from cpsr.benchmarks.stall.roster import Entry

__all__ = ["DAMAGES", "Answer", "Case", "damage_cases"]


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
    home.mkdir()
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
    """The closed method, both states, and the files that came or changed with the second."""
    job = Job(size)
    with entry.open(job, home) as method:
        older = _saved(job, method)
        before = _files(home / method.checkpoints)
        newer = _saved(job, method)
        after = _files(home / method.checkpoints)
    files = [path for path, identity in after.items() if before.get(path) != identity and path.stat().st_size > 0]
    return method, older, newer, sorted(path.relative_to(home / method.checkpoints) for path in files)


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
