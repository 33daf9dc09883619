"""The process that the faults are injected from: everything is imported, and one thread runs, before it forks.

Usage: `python -m cpsr.benchmarks.faults.worker DIRECTORY PART/EVERY...`; prints one outcome a line, as JSON.
Of each part only every so many faults are injected.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from cpsr.benchmarks.faults.campaign import run_part
from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.errors import CPSRError

__all__ = ["campaign", "main"]

LOG_SHOWN_MAX = 2000


def campaign(directory: Path, parts: Sequence[tuple[str, int]]) -> Iterator[Outcome]:
    """Run parts in a process of their own, and give what they find as it comes.

    Args:
        directory: for the runs.
        parts: names, and of which only every so many faults.

    Raises:
        CPSRError: the process failed; the message ends with what it wrote last.
    """
    words = [f"{name}/{every}" for name, every in parts]
    command = [sys.executable, "-m", "cpsr.benchmarks.faults.worker", str(directory), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    log = directory / "worker.log"
    directory.mkdir(parents=True, exist_ok=True)
    with log.open("w+") as errors:
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert worker.stdout is not None
        try:
            for line in worker.stdout:
                yield Outcome(**json.loads(line))
        finally:
            worker.stdout.close()  # one that is still at work ends with its next outcome
            worker.wait()
        if worker.returncode != 0:
            errors.seek(0)
            raise CPSRError(f"the campaign ended with status {worker.returncode}: {errors.read()[-LOG_SHOWN_MAX:]}")
    log.unlink()


def main(arguments: Sequence[str]) -> None:
    """Run the parts, one after the other."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # thousands of warnings that are meant to come
    directory = Path(arguments[0])
    for word in arguments[1:]:
        name, _, every = word.rpartition("/")
        for outcome in run_part(name, directory, int(every)):
            sys.stdout.write(json.dumps(outcome.to_plain()) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
