"""What a check has found."""

import errno
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["FULL", "Finding", "Level", "error", "failed", "named", "ok", "size", "warning", "worst"]

Level = Literal["ok", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "error")  # each worse than those before it
UNIT_BYTES = 1000.0
_SHOWN = 8  # ranks that a line names
FULL = frozenset([errno.ENOSPC, errno.EDQUOT])
_REMEDIES = {
    **dict.fromkeys(FULL, "make room: its space, its inodes or a quota are used up"),
    **dict.fromkeys(
        [errno.EACCES, errno.EPERM], "give the job's user the right to write there, or choose another run_dir"
    ),
    errno.EROFS: "mount it with the right to write, or choose another run_dir",
    **dict.fromkeys(
        [errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG], "no folder can be there: choose another run_dir"
    ),
    errno.EFBIG: "files may not be that large: raise `ulimit -f`",
}


@dataclass(frozen=True)
class Finding:
    """One line of `cpsr doctor`.

    Attributes:
        subject: what was looked at, as `shared memory`.
        level: `ok`; `warning`: the job runs, and something is lost or slower; `error`: it would not run, or lose state.
        measured: a clause without a full stop.
        advice: what to do, likewise; empty where nothing is.
        figures: what was measured, as plain numbers and texts; names have units.
        machine: which one it is about; empty where it is about the whole job.
    """

    subject: str
    level: Level
    measured: str
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    machine: str = ""

    @property
    def sentence(self) -> str:
        """What was measured and what to do."""
        return f"{self.measured}: {self.advice}" if self.advice else self.measured

    def to_json(self) -> dict[str, Any]:
        """Plain data; see `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Finding":
        """What `to_json` gave."""
        return cls(**data)


def ok(subject: str, measured: str, **figures: Any) -> Finding:
    """Nothing to do."""
    return Finding(subject, "ok", measured, "", figures)


def warning(subject: str, measured: str, advice: str, **figures: Any) -> Finding:
    """The job runs, and something is lost or slower."""
    return Finding(subject, "warning", measured, advice, figures)


def error(subject: str, measured: str, advice: str, **figures: Any) -> Finding:
    """The job would not run, or would lose state."""
    return Finding(subject, "error", measured, advice, figures)


def failed(subject: str, measured: str, problem: OSError, **figures: Any) -> Finding:
    """What a file system refused to do, and the remedy for that."""
    advice = _REMEDIES.get(problem.errno or 0, "look at its disk, its mount and its quota")
    return error(subject, f"{measured} ({problem})", advice, **figures)


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level of all; `ok` where there are none."""
    return max((one.level for one in findings), key=LEVELS.index, default="ok")


def size(count: float) -> str:
    """Bytes for people, in powers of 1000: `4.2 GB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < UNIT_BYTES or unit == "TB":
            break
        count /= UNIT_BYTES
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"


def named(ranks: Sequence[int | str]) -> str:
    """Ranks for people: `1, 2`, or the first eight and how many more."""
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"{', '.join(map(str, ranks[:_SHOWN]))}{more}"
