"""What the processes that `cpsr run` starts tell it: in which run they are, how they came back, why they refuse.

The launcher names a directory of its own in the environment. Each rank leaves small files there; without a launcher
nothing is told. A rank that refuses its configuration ends with a status of its own, for which `cpsr run` does not
start it again: it would refuse again.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from cpsr.errors import ConfigError, RunDirectoryError, RunMismatchError, UnsupportedEngineError
from cpsr.exits import lost_another

__all__ = ["LAUNCHER", "REFUSED_STATUS", "VERBOSE", "Opened", "Report", "refuse_once", "report", "restart_obstacle"]

LAUNCHER = "CPSR_LAUNCHER"  # the launcher's directory
VERBOSE = "CPSR_VERBOSE"  # set where more than one line for each event is wanted
REFUSED_STATUS = 78  # EX_CONFIG of sysexits.h
REFUSALS = (ConfigError, UnsupportedEngineError, RunMismatchError)

# Of this process alone: another program that a rank starts, with a run of its own, is none of the launcher's.
_directory = Path(os.environ.pop(LAUNCHER, ""))


@dataclass(frozen=True)
class Opened:
    """A rank has opened a run.

    Attributes:
        run_dir: absolute.
        life: of the run.
        ranks: of the job.
    """

    run_dir: str
    life: int
    ranks: int


class Report:
    """The files of one launcher, written by its ranks and read by the launcher.

    Args:
        directory: the launcher's own.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def clear(self) -> None:
        """Forget what earlier processes told; whoever cleans /tmp may have removed the directory."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._directory.iterdir():
            path.unlink(missing_ok=True)

    def open(self, opened: Opened) -> None:
        """This process is a rank of that run."""
        self._write("opened", asdict(opened))

    def recovered(self, message: str) -> None:
        """How the run came back, one line (rank 0)."""
        self._write("recovered", message)

    def refuse(self, message: str) -> None:
        """Why this process cannot train, whatever is tried again."""
        self._write(f"refused-{os.getpid()}", message)

    def opened(self) -> Opened | None:
        """The run of these ranks, None while none has opened one."""
        told: Any = self._read("opened")
        return None if told is None else Opened(**told)

    def take_recovered(self) -> str | None:
        """How the run came back; once."""
        message = self._read("recovered")
        if message is None:  # as at nearly every look, ten times a second
            return None
        (self._directory / "recovered").unlink(missing_ok=True)
        return str(message)

    def refusals(self) -> list[str]:
        """Why processes refused; the same reason of several is one."""
        return sorted({str(self._read(path.name)) for path in self._directory.glob("refused-*")})

    def _write(self, name: str, told: object) -> None:
        written = self._directory / f".{name}-{os.getpid()}"
        written.write_text(json.dumps(told), encoding="utf-8")
        written.replace(self._directory / name)

    def _read(self, name: str) -> object:
        """What was written, None where nothing was."""
        try:
            told: object = json.loads((self._directory / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return told


def report() -> Report | None:
    """What to tell the launcher by; None where `cpsr run` did not start this process, or is gone."""
    return Report(_directory) if _directory.is_absolute() and _directory.is_dir() else None


def restart_obstacle() -> str | None:
    """Why torchrun cannot start these ranks again after a failure, None where it can, or is not there."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or restarts == "0":
        return None
    return (
        "torchrun keeps the store of a group that has failed, where new ranks find dead addresses: restarts will fail "
        "('Connection refused', or a hang). Start the job with `cpsr run` instead of `torchrun`, or set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (on several nodes also --rdzv-backend=c10d)"
    )


def refuse_once() -> None:
    """From now on a refusal that nobody catches ends the process with `REFUSED_STATUS`, and `cpsr run` prints it once.

    A rank whose collective failed because another one is gone prints one line instead of its traceback, unless
    `cpsr run --verbose` is asked for. Without a launcher nothing changes: Python prints the traceback on each rank.
    """
    told = report()
    if told is None:
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, REFUSALS) and not isinstance(error, RunDirectoryError):
            told.refuse(f"{kind.__name__}: {error}")
            raise SystemExit(REFUSED_STATUS)
        if isinstance(error, RuntimeError) and lost_another(str(error)) and VERBOSE not in os.environ:
            rank, why = os.environ.get("RANK", "0"), (str(error).splitlines() or [""])[0]
            print(f"[rank {rank}] lost another rank ({kind.__name__}: {why})", file=sys.stderr, flush=True)  # noqa: T201
            raise SystemExit(1)
        before(kind, error, traceback)

    sys.excepthook = hook
