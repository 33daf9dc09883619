"""What no single call shows: full and read-only disks, limits, slow disks and clocks that jump."""

import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cpsr.benchmarks.faults.errors import Fault, judge_saves
from cpsr.benchmarks.faults.job import KEEP_ALL
from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.benchmarks.faults.saves import PLAIN, Saves
from cpsr.benchmarks.faults.stage import Gate, Stage, fork, wait_for
from cpsr.benchmarks.faults.tracing import Call
from cpsr.errors import CPSRError

__all__ = ["ENVIRONMENTS", "NOT_INJECTED", "Environment", "in_environment"]

DISK_KIBIBYTES = 4096  # several times what the run takes
# Long beside the polls of whoever lifts the limit meanwhile.
SHORT_WRITE_MICROSECONDS = 100_000
POLL_SECONDS = 0.002
DESCRIPTORS = 64  # a process that saves has far fewer files open
FREE_KIBIBYTES = (0, 4, 8, 12, 16)  # the save stops at another of its files with each
DELAY_MICROSECONDS = 20_000
BLOCKED_SHARE_MAX = 0.25  # of the time that the writing takes; whoever waits for it is blocked for most of that
DAY_SECONDS = 86_400.0
CLOCKS = {
    "back to 1970": lambda real: 0.0,
    "a year back": lambda real: real - 365 * DAY_SECONDS,
    "a hundred years on": lambda real: real + 36_525 * DAY_SECONDS,
}

Environment = Callable[[Path, Saves], Iterator[Outcome]]

# What this campaign does not do to a machine; stated in its report, so that nobody takes it for tested.
NOT_INJECTED = {
    "power cut": "what was not forced to the disk outlives a process; needs a machine that can be switched off",
    "clock of the whole machine": "time() jumps in the process that saves; the machine's own clock is left alone",
    "network file system": "stale handles, silent reordering of names: needs a server",
}


def in_environment(environment: Environment, directory: Path, saves: Saves = PLAIN) -> Iterator[Outcome]:
    """Its outcomes; one that was not injected, with the reason, where this machine does not permit it."""
    try:
        yield from environment(directory, saves)
    except (CPSRError, PermissionError) as error:
        name = environment.__name__.strip("_").replace("_", " ")
        yield Outcome(f"error: {name}", "all of it", False, False, False, 0.0, str(error))


def _full_disk(directory: Path, saves: Saves) -> Iterator[Outcome]:
    """A disk fills up in the middle of a file, which is really written in part; then room is made."""
    with _disk(directory) as disk:
        for free in FREE_KIBIBYTES:
            stage = Stage(disk / "stage", saves.prepare)
            filler = disk / "filler"

            def fill(free: int = free, filler: Path = filler) -> None:
                _fill(filler, free)

            yield _untraced(saves, "full disk", f"{free} KiB are left", "ENOSPC", stage, fill, filler.unlink)
            stage.clear()


def _read_only_disk(directory: Path, saves: Saves) -> Iterator[Outcome]:
    """The kernel makes a disk read-only, as after an error of its journal; then it is mounted again."""
    with _disk(directory) as disk:
        stage = Stage(disk / "stage", saves.prepare)
        yield _untraced(
            saves,
            "read-only disk",
            "before the save",
            "EROFS",
            stage,
            lambda: _mount("-o", "remount,ro", str(disk)),
            lambda: _mount("-o", "remount,rw", str(disk)),
        )
        stage.clear()


def _short_write(directory: Path, saves: Saves) -> Iterator[Outcome]:
    """The kernel writes a file up to a limit, which is a short write; the rest is refused, or goes on past it."""
    yield _short_writes(directory, saves, "the rest is refused", "EFBIG")
    yield _short_writes(directory, saves, "the rest follows", None)


def _short_writes(directory: Path, saves: Saves, what: str, error: str | None) -> Outcome:
    stage = Stage(directory, saves.prepare)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def lift() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    def work(run_dir: Path, gate: Gate) -> None:
        def limit() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (saves.limit_bytes, hard))
            gate.wait()
            if error is None:
                threading.Thread(target=_once_met, args=(saves.limit_bytes, lift), daemon=True).start()

        _all_saves(saves, run_dir, gate, limit, lift)

    status, notes = stage.traced(work, [f"write:delay_exit={SHORT_WRITE_MICROSECONDS}"])
    short = [call for call in stage.calls() if call.name == "write" and 0 < (call.returned or 0) < _asked(call)]
    where = f"at {saves.limit_bytes} bytes, {what}"
    outcome = judge_saves(saves, stage, Fault("short write", (), error), where, status, notes)
    stage.clear()
    if not short:
        return replace(outcome, injected=False, what="the kernel wrote everything at once")
    committed = outcome.what.startswith("committed")
    return outcome if committed == (error is None) else replace(outcome, survived=False)


def _once_met(limit_bytes: int, lift: Callable[[], None]) -> None:
    """Lift the limit while the write that met it is still on its way back; by calls that are not traced."""
    while limit_bytes not in map(_size_of_open, range(DESCRIPTORS)):
        time.sleep(POLL_SECONDS)
    lift()


def _size_of_open(descriptor: int) -> int:
    try:
        return os.fstat(descriptor).st_size
    except OSError:
        return 0


def _asked(call: Call) -> int:
    """How many bytes were to be written."""
    return int(call.arguments.rpartition(", ")[2])


def _clock_jumps(directory: Path, saves: Saves) -> Iterator[Outcome]:
    """time() of the process that saves jumps by so much; faketime would do no more, and is seldom there."""
    real = time.time

    def right() -> None:
        time.time = real

    for name, clock in CLOCKS.items():
        stage = Stage(directory, saves.prepare)

        def jump(clock: Callable[[float], float] = clock) -> None:
            time.time = lambda: clock(real())

        yield _untraced(saves, "clock jumps", f"time() of the process: {name}", None, stage, jump, right)
        stage.clear()


def _slow_disk(directory: Path, saves: Saves) -> Iterator[Outcome]:
    """Every write and fsync takes long, so that saves overrun: those without a free buffer are skipped and reported."""
    stage = Stage(directory, saves.prepare)
    slow = [f"{name}:delay_enter={DELAY_MICROSECONDS}" for name in ("write", "fsync")]
    status, notes = stage.traced(partial(_saves_in_a_row, saves), slow)
    endings = {int(save): (ending, reason) for save, ending, reason in notes.get("outcomes", [])}
    skipped = sorted(save for save, (ending, reason) in endings.items() if ending == "skipped" and reason)
    committed = sorted(save for save, (ending, _) in endings.items() if ending == "committed")
    wrong = [f"the process that trains ended with status {status}"] if status else []
    if not skipped or not committed or len(endings) != len(saves.row):
        wrong.append(f"of the saves {saves.row} became {endings}")
    if notes.get("blocked_seconds", 0.0) > BLOCKED_SHARE_MAX * notes.get("seconds", 0.0):
        wrong.append(f"training was blocked for {notes['blocked_seconds']:.2f} of {notes['seconds']:.2f} s")
    verdict = stage.judged(committed[-1:], committed)
    what = "; ".join([*wrong, verdict.what]) if wrong or verdict.what else f"skipped, counted and reported: {skipped}"
    survived = not wrong and verdict.survived
    fault = f"each write and fsync takes {DELAY_MICROSECONDS / 1000:g} ms more"
    yield Outcome("error: slow disk", fault, True, survived, verdict.state_equal, verdict.seconds, what)
    stage.clear()


def _saves_in_a_row(saves: Saves, run_dir: Path, gate: Gate) -> None:
    """As many saves as come due while the first is still being written."""
    rank_0 = saves.begin(run_dir, KEEP_ALL, saves.row)
    gate.wait()
    blocked_for, started = 0.0, time.perf_counter()
    for iteration in saves.row:
        if not rank_0.begin(iteration):
            rank_0.writer.skip(iteration, "every host buffer is in use: the disk is slow")
        blocked_for += rank_0.handed_over_seconds
    gate.note(outcomes=rank_0.wait(), blocked_seconds=blocked_for, seconds=time.perf_counter() - started)


def _untraced(
    saves: Saves,
    name: str,
    where: str,
    error: str | None,
    stage: Stage,
    begin: Callable[[], None],
    end: Callable[[], None],
) -> Outcome:
    """A save within the environment and those after it, in a fork, and what a restart finds."""
    fault = Fault(name, (), error)
    gate = Gate()
    stage.renew()

    try:
        status = wait_for(fork(lambda: _all_saves(saves, stage.run_dir, gate, begin, end)))
        notes: dict[str, Any] = gate.notes()
    finally:
        gate.close()
    outcome = judge_saves(saves, stage, fault, where, status, notes)
    met = error is None or not outcome.survived or not outcome.what.startswith("committed")
    return outcome if met else replace(outcome, injected=False, what="the save went through, so it met no error")


def _all_saves(saves: Saves, run_dir: Path, gate: Gate, begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Rank 0 saves after `begin`, and again after `end`; the other rank's parts are there."""
    rank_0 = saves.begin(run_dir, KEEP_ALL, saves.iterations)
    begin()
    for iteration in saves.iterations:
        outcomes = rank_0.save(iteration)
        gate.note(**{str(iteration): outcomes, f"{iteration} seconds": rank_0.handed_over_seconds})
        if iteration == saves.iterations[0]:
            end()


@contextmanager
def _disk(directory: Path) -> Iterator[Path]:
    """A small file system of its own.

    Raises:
        CPSRError: mounting one is not permitted here.
    """
    disk = directory / "disk"
    disk.mkdir(parents=True)
    try:
        _mount("-t", "tmpfs", "-o", f"size={DISK_KIBIBYTES}k", "none", str(disk))
        try:
            yield disk
        finally:
            subprocess.run(["umount", str(disk)], check=True, capture_output=True)
    finally:
        disk.rmdir()


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CPSRError(f"mounting is not permitted here: {done.stderr.strip()}")


def _fill(filler: Path, free_kibibytes: int) -> None:
    """Take all of a file system but so much."""
    space = os.statvfs(filler.parent)
    filler.write_bytes(bytes(max(0, space.f_bavail * space.f_frsize - free_kibibytes * 1024)))


ENVIRONMENTS: tuple[Environment, ...] = (_full_disk, _read_only_disk, _short_write, _slow_disk, _clock_jumps)
