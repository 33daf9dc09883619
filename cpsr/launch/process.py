"""`cpsr run` as the process of a command that watches it."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from cpsr.ranks.exits import exiting_at_signals

__all__ = ["launched"]

PATIENCE_SECONDS = 30.0  # for ranks that leave after SIGTERM


@contextmanager
def launched(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a job; no process of it is left, whatever ends the block: SIGTERM and a closed terminal raise in it.

    Args:
        arguments: of `cpsr run`.
        log: its output is appended here.
        environment: variables beside those of this process.
    """
    command, variables = [sys.executable, "-m", "cpsr", "run", *arguments], {**os.environ, **environment}
    with exiting_at_signals():
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=variables, start_new_session=True)  # noqa: S603
        try:
            yield process
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        return
    launcher = psutil.Process(process.pid)
    everyone = [launcher, *launcher.children(recursive=True)]
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_SECONDS)
    finally:  # also at a second Ctrl-C
        for one in everyone:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
