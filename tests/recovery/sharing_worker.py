"""The job of `worker.py`, in which one rank's learning ends early.

A further fault, `killed:rank:iteration`, kills the process while it learns of that checkpoint or a later one. It leaves
a file with the result's name and `.killed`.
"""

import os
import signal
from functools import partial
from pathlib import Path

from cpsr.predictor.protocol import History
from cpsr.predictor.vitp import VITPPredictor
from tests.recovery import worker
from tests.recovery.worker import Options

__all__ = ["Options", "main"]


def main(options: Options, rank: int, ranks: int) -> None:
    how, victim, at = options.fault.split(":") if options.fault else ("", "-1", "0")
    if how == "killed" and rank == int(victim):
        marker = options.result.with_suffix(".killed")
        worker.before(VITPPredictor, "learn", partial(_knows, int(at)), partial(_kill, marker))
    worker.main(options, rank, ranks)


def _knows(iteration: int, _: VITPPredictor, history: History) -> bool:
    return any(entry.iteration >= iteration for entry in history.entries)


def _kill(marker: Path) -> None:
    marker.touch()
    os.kill(os.getpid(), signal.SIGKILL)
