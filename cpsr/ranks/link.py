"""Reports of ranks to `cpsr run`, their launcher: which run they opened, how it recovered, which errors ended them.

The launcher names a directory in the environment, and each rank writes small files there. Without a launcher there are
no reports. A rank that refuses its configuration ends with a status of its own; `cpsr run` does not restart it, since
it would refuse again.
"""

import atexit
import json
import logging
import os
import re
import sys
import time
import traceback
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from cpsr.errors import (
    ConfigError,
    NotRestoredError,
    RunDirectoryError,
    RunMismatchError,
    TargetError,
    UnsupportedEngineError,
    WrongArithmeticError,
)
from cpsr.ranks.exits import lost_another
from cpsr.ranks.garbage import LastCollections
from cpsr.ranks.imports import Imported, imported

__all__ = [
    "EXPECTS_ERRORS",
    "JOB",
    "LAUNCHER",
    "LEAVES_STATUS",
    "REFUSED_STATUS",
    "SHUTDOWN",
    "SHUTDOWN_SECONDS",
    "VERBOSE",
    "Opened",
    "Report",
    "Uncaught",
    "report",
    "report_errors",
    "restart_obstacle",
]

LAUNCHER = "CPSR_LAUNCHER"  # the launcher's directory
JOB = "CPSR_JOB"  # names the launchers that meet at one store: others of the same run are another job
EXPECTS_ERRORS = "CPSR_EXPECTS_ERRORS"  # set if ranks start again after any error: each start does the next thing
VERBOSE = "CPSR_VERBOSE"  # set for more than one line per event
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # seconds that torchrun gives its ranks after SIGTERM
SHUTDOWN_SECONDS = 30  # where that is not set
REFUSED_STATUS = 78  # EX_CONFIG of sysexits.h
LEAVES_STATUS = 79  # this machine leaves the job, and the others go on
REFUSALS = (ConfigError, NotRestoredError, UnsupportedEngineError, RunMismatchError, WrongArithmeticError)
PASSING = (RunDirectoryError, TargetError)  # of what cannot be reached now
# torchrun chooses a free port for the ranks' store, which rank 0 opens seconds later: another process may be faster.
PORT_TAKEN = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)
SHOWN = "shown-"  # begins the names of files that outlive a start
IMPORTED = f"{SHOWN}imported"
LOST = "lost"

# Removed from the environment: a program that a rank starts, with a run of its own, must not report here.
_directory = Path(os.environ.pop(LAUNCHER, ""))

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Uncaught:
    """An exception that no part of a script caught, so that Python ended the rank.

    Attributes:
        rank: of the job.
        error: type and message, on one line.
        place: file and line that raised it.
        passing: it may not come again: another rank or a file system was out of reach, or a port was taken.
    """

    rank: int
    error: str
    place: str
    passing: bool

    @property
    def identity(self) -> str:
        """What the same error at another time has in common: all but numbers, such as addresses and sizes."""
        return f"{re.sub(r'0x[0-9a-fA-F]+|[0-9]+', '0', self.error)} in {self.place}"


class Report:
    """The files of one launcher, written by its ranks and read by the launcher."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def clear(self) -> None:
        """Remove reports of earlier processes; a clean-up of /tmp may have removed the directory."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._directory.iterdir():
            if not path.name.startswith(SHOWN):
                path.unlink(missing_ok=True)

    def open(self, opened: Opened) -> None:
        """Report that this process is a rank of that run."""
        self._write("opened", asdict(opened))

    def tell_imports(self) -> None:
        """Report what this process has imported, once in a job and by the first rank of a machine."""
        if os.environ.get("LOCAL_RANK") == "0" and not (self._directory / IMPORTED).exists():
            try:
                self._write(IMPORTED, asdict(imported()))
            except Exception:  # of a foreign module that is inspected
                logger.warning("what this rank has imported is not known: a restart imports it again", exc_info=True)

    def recovered(self, message: str) -> None:
        """Report how the run recovered, or what became of that, in one line (rank 0)."""
        self._write(f"recovered-{time.monotonic_ns():020d}", message)

    def refuse(self, message: str) -> None:
        """Report why this process cannot train, however often it is restarted."""
        self._write(f"refused-{os.getpid()}", message)

    def fail(self, uncaught: Uncaught) -> None:
        """Report the exception that ends this process."""
        self._write(f"uncaught-{uncaught.rank}", asdict(uncaught))

    def show(self, uncaught: Uncaught) -> bool:
        """Whether no rank, in no start of this job, has shown the traceback of this error; from now on one has."""
        shown = self._directory / f"{SHOWN}{zlib.crc32(uncaught.identity.encode()):08x}"
        try:
            shown.touch(exist_ok=False)
        except OSError as error:
            return not isinstance(error, FileExistsError)
        return True

    def lose(self, machines: str) -> None:
        """Let the ranks know that their launcher has lost other machines of the job, and starts again without them."""
        self._write(LOST, machines)

    def lost(self) -> str | None:
        """The machines that the launcher has lost; None if none."""
        found = self._read(LOST)
        return None if found is None else str(found)

    def opened(self) -> Opened | None:
        """The run of these ranks; None until one has opened it."""
        fields: Any = self._read("opened")
        return None if fields is None else Opened(**fields)

    def imported(self) -> Imported | None:
        """What the first rank of this machine had imported once its run was open; None until then."""
        fields: Any = self._read(IMPORTED)
        return None if fields is None else Imported(**fields)

    def forget_imported(self) -> None:
        """Let the next ranks report their imports again."""
        (self._directory / IMPORTED).unlink(missing_ok=True)

    def take_recovered(self) -> list[str]:
        """The lines on a recovery since the last call, in their order."""
        paths = sorted(self._directory.glob("recovered-*"))
        messages = [str(self._read(path.name)) for path in paths]
        for path in paths:
            path.unlink(missing_ok=True)
        return messages

    def refusals(self) -> list[str]:
        """Why processes refused, without duplicates."""
        return sorted({str(self._read(path.name)) for path in self._directory.glob("refused-*")})

    def uncaught(self) -> list[Uncaught]:
        """The exceptions that ended these ranks."""
        found: Any = [self._read(path.name) for path in sorted(self._directory.glob("uncaught-*"))]
        return [Uncaught(**fields) for fields in found]

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
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 with --standalone (on several nodes with --rdzv-backend=c10d)"
    )


def report_errors() -> None:
    """From now on an exception that ends this process is reported to `cpsr run`; without a launcher nothing changes.

    An error is shown once: the same one of another rank, or of a later start, prints no second traceback. A refusal
    ends the process with `REFUSED_STATUS`, and `cpsr run` prints it. A rank whose collective failed because another
    rank is gone prints one line. `cpsr run --verbose` shows every traceback. A process that ends so ends fast: all
    others wait for it before they start again.
    """
    launcher = report()
    if launcher is None:
        return
    before = sys.excepthook
    collections = LastCollections()
    atexit.register(collections.end)  # registered early, so called after the script's own functions

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        collections.spare()
        if isinstance(error, REFUSALS) and not isinstance(error, RunDirectoryError):
            launcher.refuse(f"{kind.__name__}: {error.one_line()}")
            leaves = isinstance(error, WrongArithmeticError) and error.alone
            raise SystemExit(LEAVES_STATUS if leaves else REFUSED_STATUS)
        show = True
        if isinstance(error, Exception):
            uncaught = _uncaught(error, trace)
            launcher.fail(uncaught)
            lost = isinstance(error, RuntimeError) and lost_another(str(error))
            if VERBOSE not in os.environ and lost:  # to the stream itself: torch captures what a hook prints
                print(f"[rank {uncaught.rank}] lost another rank ({uncaught.error})", file=sys.__stderr__, flush=True)
                raise SystemExit(1)
            show = VERBOSE in os.environ or launcher.show(uncaught)
        if show:
            before(kind, error, trace)

    sys.excepthook = hook


def _uncaught(error: Exception, trace: TracebackType | None) -> Uncaught:
    frames = traceback.extract_tb(trace)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    network = [str(one) for one in _causes(error) if isinstance(one, RuntimeError | OSError)]
    message = (str(error).splitlines() or [""])[0]
    return Uncaught(
        int(os.environ.get("RANK", "0")),
        f"{type(error).__name__}: {message}",
        place,
        passing=isinstance(error, PASSING) or any(lost_another(said) or PORT_TAKEN.search(said) for said in network),
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that led to it."""
    following: BaseException | None = error
    seen: set[int] = set()
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        following = following.__cause__ or following.__context__
