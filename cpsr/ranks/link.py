"""Reports of ranks to `cpsr run`, their launcher: which run they opened, how it recovered, why they refuse.

The launcher names a directory in the environment, and each rank writes small files there. Without a launcher there are
no reports. A rank that refuses its configuration ends with a status of its own; `cpsr run` does not restart it, since
it would refuse again.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from cpsr.errors import ConfigError, RunDirectoryError, RunMismatchError, UnsupportedEngineError
from cpsr.ranks.exits import lost_another

__all__ = [
    "JOB",
    "LAUNCHER",
    "REFUSED_STATUS",
    "SHUTDOWN",
    "SHUTDOWN_SECONDS",
    "VERBOSE",
    "Opened",
    "Report",
    "refuse_once",
    "report",
    "restart_obstacle",
]

LAUNCHER = "CPSR_LAUNCHER"  # the launcher's directory
JOB = "CPSR_JOB"  # names the launchers that meet at one store: others of the same run are another job
VERBOSE = "CPSR_VERBOSE"  # set for more than one line per event
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # seconds that torchrun gives its ranks after SIGTERM
SHUTDOWN_SECONDS = 30  # where that is not set
REFUSED_STATUS = 78  # EX_CONFIG of sysexits.h
REFUSALS = (ConfigError, UnsupportedEngineError, RunMismatchError)

# Removed from the environment: a program that a rank starts, with a run of its own, must not report here.
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
        """Remove reports of earlier processes; a clean-up of /tmp may have removed the directory."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._directory.iterdir():
            path.unlink(missing_ok=True)

    def open(self, opened: Opened) -> None:
        """Report that this process is a rank of that run."""
        self._write("opened", asdict(opened))

    def recovered(self, message: str) -> None:
        """Report how the run recovered, in one line (rank 0)."""
        self._write("recovered", message)

    def refuse(self, message: str) -> None:
        """Report why this process cannot train, however often it is restarted."""
        self._write(f"refused-{os.getpid()}", message)

    def opened(self) -> Opened | None:
        """The run of these ranks; None until one has opened it."""
        fields: Any = self._read("opened")
        return None if fields is None else Opened(**fields)

    def take_recovered(self) -> str | None:
        """How the run recovered; once."""
        message = self._read("recovered")
        if message is None:  # as in nearly every poll, ten times a second
            return None
        (self._directory / "recovered").unlink(missing_ok=True)
        return str(message)

    def refusals(self) -> list[str]:
        """Why processes refused, without duplicates."""
        return sorted({str(self._read(path.name)) for path in self._directory.glob("refused-*")})

    def _write(self, name: str, value: object) -> None:
        written = self._directory / f".{name}-{os.getpid()}"
        written.write_text(json.dumps(value), encoding="utf-8")
        written.replace(self._directory / name)

    def _read(self, name: str) -> object:
        """The value written under a name; None if there is none."""
        try:
            value: object = json.loads((self._directory / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return value


def report() -> Report | None:
    """The link to the launcher; None if `cpsr run` did not start this process, or is gone."""
    return Report(_directory) if _directory.is_absolute() and _directory.is_dir() else None


def restart_obstacle() -> str | None:
    """Why torchrun cannot restart these ranks after a failure; None if it can, or did not start them."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or restarts == "0":
        return None
    return (
        "torchrun keeps the store of a failed group, and new ranks read dead addresses from it: restarts will fail "
        "('Connection refused', or a hang). Start the job with `cpsr run` instead of `torchrun`, or set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (on several nodes also --rdzv-backend=c10d)"
    )


def refuse_once() -> None:
    """From now on an uncaught refusal ends the process with `REFUSED_STATUS`, and `cpsr run` prints it once.

    A rank whose collective failed because another rank is gone prints one line instead of its traceback, except with
    `cpsr run --verbose`. Without a launcher nothing changes: Python prints the traceback on each rank.
    """
    launcher = report()
    if launcher is None:
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, REFUSALS) and not isinstance(error, RunDirectoryError):
            launcher.refuse(f"{kind.__name__}: {error.one_line()}")
            raise SystemExit(REFUSED_STATUS)
        if isinstance(error, RuntimeError) and lost_another(str(error)) and VERBOSE not in os.environ:
            rank, why = os.environ.get("RANK", "0"), (str(error).splitlines() or [""])[0]
            print(f"[rank {rank}] lost another rank ({kind.__name__}: {why})", file=sys.stderr, flush=True)  # noqa: T201
            raise SystemExit(1)
        before(kind, error, traceback)

    sys.excepthook = hook
