"""A process is killed at every system call with which it changes files, each time in a fresh copy of a run."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpsr.benchmarks.faults.oracle import Verdict
from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.benchmarks.faults.stage import Stage
from cpsr.benchmarks.faults.tracing import Call
from cpsr.benchmarks.faults.works import Work
from cpsr.checkpoint.files import is_temporary
from cpsr.errors import CPSRError

__all__ = ["kill_everywhere"]

TRIES = 3  # where two ranks work at once, one looks for the other more often at some times than at others
MISSED = "the work ended before that call"


def kill_everywhere(work: Work, directory: Path, every: int = 1) -> Iterator[Outcome]:
    """Kill the work at each of its calls that change files; what was under construction is torn besides.

    A process that SIGKILL meets on entering a call does not carry it out: it dies after the call before. What is there
    after the last one is what the whole work leaves, which is judged first.

    Raises:
        CPSRError: the work does not even succeed without a fault, or strace is absent.
    """
    stage = Stage(directory, work.prepare)
    status, notes = stage.traced(work.run, beside=work.beside)
    verdict = _judged(stage, work, notes)
    if status != 0 or "beside" in notes or not (verdict.survived and verdict.state_equal):
        raise CPSRError(f"{work.name!r} goes wrong without any fault: status {status}, {notes}, {verdict.what}")
    for call in [call for call in stage.calls() if call.changes][::every]:
        yield _killed(stage, work, call)
    stage.clear()


def _killed(stage: Stage, work: Work, call: Call) -> Outcome:
    scenario = f"kill: {work.name}"
    injection = f"{call.name}:signal=KILL:when={call.number}"
    for _ in range(TRIES):
        status, notes = stage.traced(work.run, [injection], beside=work.beside)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            break
    else:
        return Outcome(scenario, str(call), False, False, False, 0.0, MISSED)
    if "beside" in notes:
        return Outcome(scenario, str(call), True, False, False, 0.0, str(notes["beside"]))
    _tear(stage.run_dir)
    return Outcome(scenario, str(call), True, **vars(_judged(stage, work, notes)))


def _tear(run_dir: Path) -> None:
    """Cut what was under construction in half: a kill in the middle of a large write leaves no more than that."""
    for path in run_dir.rglob(".*"):
        if is_temporary(path):
            os.truncate(path, path.stat().st_size // 2)


def _judged(stage: Stage, work: Work, notes: dict[str, Any]) -> Verdict:
    newest = {work.done} if notes.get("done") else notes.get("newest", work.newest)
    kept = work.kept if notes.get("done") else notes.get("kept", work.kept)
    return stage.judged(newest, kept, damaged=work.damaged)
