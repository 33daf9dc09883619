"""Errors of the file system at every call of a save, as the save's outcome and as a restart sees them."""

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpsr.benchmarks.faults.job import KEEP_ALL
from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.benchmarks.faults.saves import PLAIN, RETENTION, Saves
from cpsr.benchmarks.faults.stage import Gate, Stage
from cpsr.benchmarks.faults.tracing import READING, Call
from cpsr.checkpoint.catalogue import Retention

__all__ = ["FAULTS", "Fault", "first_save", "inject_everywhere", "judge_saves", "save_all"]

HANDED_OVER_SECONDS = 5.0  # a copy of a few kilobytes, also where other processes take turns; no waiting for a disk
MISSED = "the save ended before that call"
GOOD_ENDINGS = ("committed", "failed", "skipped")


@dataclass(frozen=True)
class Fault:
    """What goes wrong at a call.

    Attributes:
        name: for the report.
        calls: names of the calls that it can befall.
        error: name of the errno; None where the call claims to have succeeded.
        share: of what was to be written, as the call claims, while nothing is.
        reads: it befalls calls that read; else those that change something.
        lasting: also every later call of those names fails, as on a full or dead disk.
        config: of the writer, with or without a retention pass after the save.
    """

    name: str
    calls: tuple[str, ...]
    error: str | None = None
    share: float = 1.0
    reads: bool = False
    lasting: bool = False
    config: Retention = KEEP_ALL

    @property
    def text(self) -> str:
        """What the outcome's reason has to say, empty where that is open."""
        return os.strerror(getattr(errno, self.error)) if self.error else ""


_SPACE = ("openat", "write", "ftruncate", "fsync", "rename", "renameat", "mkdir")
_CHANGES = (*_SPACE, "chmod", "unlink", "rmdir")
_MODIFIES = tuple(name for name in _CHANGES if name not in ("openat", "fsync"))  # the others go on to read
_READS = ("openat", *READING)
FAULTS = (
    Fault("ENOSPC", _SPACE, "ENOSPC"),
    Fault("ENOSPC from there on", ("write", "ftruncate", "mkdir"), "ENOSPC", lasting=True),
    Fault("EIO", _CHANGES, "EIO"),
    Fault("EIO and retention", _CHANGES, "EIO", config=RETENTION),
    Fault("EIO from there on", (*_CHANGES, *READING), "EIO", lasting=True),
    # The kernel turns a disk read-only after an error of its journal, in the middle of whatever is being written.
    Fault("EROFS from there on", _MODIFIES, "EROFS", lasting=True),
    Fault("EIO of a read", _READS, "EIO", reads=True, config=RETENTION),
    Fault("EINTR", ("openat", "write", "ftruncate", "fsync"), "EINTR"),
    Fault("EINTR of a read", _READS, "EINTR", reads=True),
    Fault("half of a write lost", ("write",), share=0.5),
    Fault("a write lost", ("write",)),
    Fault("fsync does nothing", ("fsync",), share=0.0),
)


def save_all(saves: Saves, run_dir: Path, gate: Gate, config: Retention) -> None:
    """Rank 0 saves one after the other; the other rank's parts are there."""
    rank_0 = saves.begin(run_dir, config, saves.iterations)
    gate.wait()
    for iteration in saves.iterations:
        outcomes = rank_0.save(iteration)
        gate.note(**{str(iteration): outcomes, f"{iteration} seconds": rank_0.handed_over_seconds})


def inject_everywhere(fault: Fault, directory: Path, every: int = 1, saves: Saves = PLAIN) -> Iterator[Outcome]:
    """Let the fault happen at each call of a save that it can befall.

    Args:
        fault: what happens.
        directory: for the runs; it is removed again.
        every: only every so many calls.
        saves: what is saved.

    Raises:
        CPSRError: strace is absent.
    """
    stage = Stage(directory, saves.prepare)

    def work(run_dir: Path, gate: Gate) -> None:
        save_all(saves, run_dir, gate, fault.config)

    stage.traced(work, reading=True)
    calls = stage.calls()
    for call in first_save(calls, fault, saves)[::every]:
        status, notes = stage.traced(work, _injections(fault, call, calls), reading=True)
        if stage.injected():
            yield judge_saves(saves, stage, fault, str(call), status, notes)
        else:
            yield Outcome(f"error: {fault.name}", str(call), False, False, False, 0.0, MISSED)
    stage.clear()


def judge_saves(saves: Saves, stage: Stage, fault: Fault, where: str, status: int, notes: dict[str, Any]) -> Outcome:
    """Whether all saves ended as they may, and a restart finds what they reported as committed."""
    scenario = f"error: {fault.name}"
    wrong = list(_wrong_endings(saves, fault, status, notes))
    kept = [*saves.committed, *(save for save in saves.iterations if _ending(notes, save)[0] == "committed")]
    newest = max(kept)
    if fault.config is RETENTION:
        kept = kept[-RETENTION.full_checkpoints :]
    # A disk that fails for good may take the commit record in and refuse both to confirm it and to remove it.
    possible = {newest, *saves.iterations} if fault.lasting else {newest}
    verdict = stage.judged(possible, kept)
    ending = ": ".join(_ending(notes, saves.iterations[0]))
    what = "; ".join([*wrong, verdict.what]) if wrong or verdict.what else ending
    return Outcome(scenario, where, True, not wrong and verdict.survived, verdict.state_equal, verdict.seconds, what)


def _wrong_endings(saves: Saves, fault: Fault, status: int, notes: dict[str, Any]) -> Iterator[str]:
    if status != 0:
        yield f"the process that trains ended with status {status}"
    first, reason = _ending(notes, saves.iterations[0])
    if first not in GOOD_ENDINGS:
        yield f"the save ended as {first!r}"
    if first != "committed" and (not reason or fault.text not in reason):
        yield f"its reason does not say {fault.text!r}: {reason!r}"
    if "unexpected" in reason:
        yield f"its reason is of no use to the reader: {reason!r}"
    for save in saves.iterations[1:]:
        ending, reason = _ending(notes, save)
        if ending != "committed" and (not fault.lasting or fault.text not in reason):
            yield f"the save after it, at {save}, ended as {ending!r}: {reason}"
    for save in saves.iterations:
        seconds = notes.get(f"{save} seconds", 0.0)
        if seconds > HANDED_OVER_SECONDS:
            yield f"training was blocked for {seconds:.2f} s"


def _ending(notes: dict[str, Any], save: int) -> tuple[str, str]:
    """Status and reason of a save."""
    outcomes = notes.get(str(save)) or [[save, "no outcome", ""]]
    return outcomes[0][1], outcomes[0][2]


def first_save(calls: Sequence[Call], fault: Fault, saves: Saves) -> list[Call]:
    """The calls of the first save that the fault can befall: those until the second one begins.

    It looks first whether its life is still the newest, then at its directory.
    """
    second = f"step-{saves.iterations[1]:010d}"
    end = next(place for place, call in enumerate(calls) if second in call.arguments)
    while calls[end - 1].file == "progress":
        end -= 1
    return [call for call in calls[:end] if call.name in fault.calls and call.changes != fault.reads]


def _injections(fault: Fault, call: Call, calls: Sequence[Call]) -> list[str]:
    if fault.error is None:
        claimed = int((call.returned or 0) * fault.share)
        return [f"{call.name}:retval={claimed}:when={call.number}"]
    if not fault.lasting:
        return [f"{call.name}:error={fault.error}:when={call.number}"]
    firsts = {one.name: one.number for one in reversed(calls[calls.index(call) :])}
    return [f"{name}:error={fault.error}:when={firsts[name]}+" for name in fault.calls if name in firsts]
