"""How the ranks of a life ended, as they and their launcher recorded it in the run directory.

::

    <run_dir>/exits/life-00003-rank-00001-launcher.json    the signal or status that the launcher saw
    <run_dir>/exits/life-00003-rank-00000-rank.json        why the rank left, as it reported

A rank that is killed writes nothing. `cpsr run` then records the signal. Under another launcher, the killed rank is the
one without a file while others have one.
"""

import json
import logging
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

__all__ = [
    "BEGAN",
    "FAILED",
    "SIGTERM_STATUS",
    "Exit",
    "cause_of",
    "exiting_at_signals",
    "exits_of",
    "first_of",
    "forget_exits",
    "lost_another",
    "note_exit",
    "ranks_named",
]

logger = logging.getLogger(__name__)

DIRECTORY = "exits"
# Kinds of the two events that a life begins with: how the one before it ended, and how the run came back.
FAILED = "failed"
BEGAN = "started"
# A launcher ends the other ranks once one has ended: a rank that ended later than this after the first was terminated.
FIRST_SECONDS = 2.0
SIGTERM_STATUS = 128 + signal.SIGTERM
# Messages of gloo (with its source file), NCCL, torch and CPSR in a rank whose peer is gone. That a backend cannot do
# something is the script's own error, and would come again.
_LOST_ANOTHER = re.compile(
    r"gloo/|gloo connect|(?<!with )nccl(?! built in)|connection (closed|reset|refused)|broken pipe|timed out|"
    r"wait timeout|failed to recv|\bpeer\b|given up rank|process of rank \d+ has ended|left its loop",
    re.IGNORECASE,
)
_NAME = re.compile(r"life-(\d+)-rank-(\d+)-(launcher|rank)\.json")


@dataclass(frozen=True)
class Exit:
    """How one rank's process ended.

    Attributes:
        rank: of the job.
        signal: name of the signal that killed it, as its launcher saw it.
        status: its exit status, as its launcher saw it.
        error: the exception that ended the training loop, with its message.
        left: why it left the job in good order (another rank sent no heartbeats any more), as it reported.
        given_up: the rank that it left because of, which may still hang.
        unix_seconds: when.
    """

    rank: int
    signal: str | None = None
    status: int | None = None
    error: str | None = None
    left: str | None = None
    given_up: int | None = None
    unix_seconds: float = 0.0

    @property
    def by_launcher(self) -> bool:
        """Whether a launcher saw this, and not the rank itself."""
        return self.signal is not None or self.status is not None

    @property
    def is_failure(self) -> bool:
        """Whether it ended, or left, because something had failed; ranks that have a failed one cannot commit."""
        failed = self.signal not in (None, "SIGTERM") or self.status not in (None, 0, SIGTERM_STATUS)
        return failed or self.error is not None or self.given_up is not None

    @staticmethod
    def of_status(rank: int, status: int, unix_seconds: float) -> "Exit":
        """From a process's exit status: negative is the number of a signal."""
        if status >= 0:
            return Exit(rank, status=status, unix_seconds=unix_seconds)
        try:
            name = signal.Signals(-status).name
        except ValueError:  # a real-time signal
            name = f"signal {-status}"
        return Exit(rank, signal=name, unix_seconds=unix_seconds)


def note_exit(run_dir: Path, life: int, ended: Exit) -> None:
    """Record an exit for the next life; if the file system refuses, log that: the signal stays unknown."""
    who = "launcher" if ended.by_launcher else "rank"
    path = run_dir / DIRECTORY / f"life-{life:05d}-rank-{ended.rank:05d}-{who}.json"
    fields = asdict(ended)
    if not ended.unix_seconds:
        fields["unix_seconds"] = time.time()
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(fields), encoding="utf-8")
    except OSError as error:
        logger.warning("cannot record in %s how rank %d ended: %s", path, ended.rank, error)


def exits_of(run_dir: Path, life: int) -> list[Exit]:
    """The recorded exits of a life; unreadable files are left out."""
    found = []
    for path in sorted((run_dir / DIRECTORY).glob(f"life-{life:05d}-*.json")):
        try:
            found.append(Exit(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s cannot be read and is ignored: %s", path, error)
    return found


def forget_exits(run_dir: Path, before_life: int) -> None:
    """Remove the records of earlier lives (rank 0); those that cannot be removed do no harm."""
    for path in (run_dir / DIRECTORY).glob("life-*.json"):
        matched = _NAME.fullmatch(path.name)
        if matched is not None and int(matched[1]) < before_life:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s cannot be removed, which harms nothing: %s", path, error)


def cause_of(exits: Sequence[Exit], ranks: int | None) -> str:
    """Which ranks ended first and how, as a clause that begins in lower case: `rank 1 was killed (SIGKILL)`.

    Args:
        exits: records of ranks about themselves, and of launchers about their first ranks that ended; in any order.
        ranks: of the job, if all records are complete: then a rank without one was killed.
    """
    seen = sorted((one for one in exits if one.by_launcher), key=lambda one: one.rank)
    own = sorted((one for one in exits if not one.by_launcher), key=lambda one: one.unix_seconds)
    left = next((one for one in own if one.left is not None), None)
    if left is not None:
        return f"rank {left.rank} left because {left.left}"
    errors = [one for one in own if one.error is not None]
    # A rank that only lost another one is no cause, nor is one that aborts because of that.
    causes = [one for one in errors if not lost_another(str(one.error))]
    killed = [one for one in seen if one.signal is not None and not (causes and one.signal == "SIGABRT")]
    if killed:
        signals = ", ".join(sorted({str(one.signal) for one in killed}))
        return f"{_were(one.rank for one in killed)} killed ({signals})"
    if causes:
        first = [one for one in causes if one.rank in {known.rank for known in seen}] or causes
        return f"rank {first[0].rank} failed ({first[0].error})"
    silent = set(range(ranks or 0)) - {one.rank for one in exits}
    if errors and silent:
        return f"{_were(silent)} killed"
    if errors:
        return f"rank {errors[0].rank} lost another rank ({errors[0].error})"
    if seen:
        statuses = ", ".join(sorted({str(one.status) for one in seen}))
        return f"{ranks_named(one.rank for one in seen)} ended with status {statuses}"
    return "the job was killed (no rank recorded how)"


def lost_another(error: str) -> bool:
    """Whether this is the error of a rank whose peer is gone."""
    return _LOST_ANOTHER.search(error) is not None


def first_of(exits: Sequence[Exit]) -> list[Exit]:
    """The ranks of one launcher that ended by themselves: it ended the others soon after, with SIGTERM."""
    begun = min((one.unix_seconds for one in exits), default=0.0)
    first = sorted((one for one in exits if one.unix_seconds <= begun + FIRST_SECONDS), key=lambda one: one.rank)
    return [one for one in first if one.signal != "SIGTERM" and one.status != SIGTERM_STATUS] or first


def ranks_named(ranks: Iterable[int]) -> str:
    """Ranks for people: `rank 1`, `ranks 0 and 1`, `ranks 0 to 3`, `ranks 0, 2 and 5`."""
    numbers = sorted(set(ranks))
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _were(ranks: Iterable[int]) -> str:
    named = ranks_named(ranks)
    return f"{named} {'was' if named.startswith('rank ') else 'were'}"


@contextmanager
def exiting_at_signals(first: Callable[[], object] = lambda: None) -> Iterator[None]:
    """SIGTERM, and SIGHUP of a closed terminal, raise `SystemExit` on the main thread, as Ctrl-C raises.

    A command then ends what it has started; the signals that follow do not interrupt that. An ignored signal stays so.

    Args:
        first: is called before.
    """
    leaving = False

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal leaving
        if not leaving:
            leaving = True
            first()
            raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
