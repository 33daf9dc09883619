"""All parts of the campaign by name, and the process that they run in.

Everything is imported there, and one thread runs, before it forks. Usage:
`python -m cpsr.benchmarks.faults.campaign DIRECTORY PART/EVERY...`; prints one outcome a line, as JSON. Of each part
only every so many faults are injected.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from cpsr.benchmarks.faults.damage import damage_regions
from cpsr.benchmarks.faults.environments import ENVIRONMENTS, in_environment
from cpsr.benchmarks.faults.errors import FAULTS, inject_everywhere
from cpsr.benchmarks.faults.job import write_sparse
from cpsr.benchmarks.faults.kills import kill_everywhere
from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.benchmarks.faults.restarts import ERRORS, restart_resharded, restart_under
from cpsr.benchmarks.faults.saves import PLAIN, SPARSE, Saves
from cpsr.benchmarks.faults.works import WORKS
from cpsr.errors import CPSRError

__all__ = ["PARTS", "campaign", "main"]

# A directory for its runs, and only every so many of its faults.
Part = Callable[[Path, int], Iterator[Outcome]]
LOG_SHOWN_MAX = 2000
RESTART_EVERY = 20  # flipped bits and cuts are many; all of them are verified and loaded


def _environments(saves: Saves, directory: Path, every: int) -> Iterator[Outcome]:
    for environment in ENVIRONMENTS:
        yield from in_environment(environment, directory, saves)


def _named(kind: str, part: Part) -> Part:
    """A part with other checkpoints, or another restart, under names that say so."""

    def run(directory: Path, every: int) -> Iterator[Outcome]:
        for outcome in part(directory, every):
            yield replace(outcome, scenario=f"{kind} {outcome.scenario}")

    return run


_ON_SPARSE: dict[str, Part] = {
    **{f"error: {fault.name}": partial(inject_everywhere, fault, saves=SPARSE) for fault in FAULTS},
    **{f"restart: {error}": partial(restart_under, error, prepare=write_sparse) for error in ERRORS},
    "environments": partial(_environments, SPARSE),
    "damage": partial(damage_regions, restart_every=RESTART_EVERY, prepare=write_sparse),
}
_RESHARDED: dict[str, Part] = {
    f"restart: {error}": partial(restart_under, error, work=restart_resharded) for error in ERRORS
}
PARTS: dict[str, Part] = {
    **{f"kill: {work.name}": partial(kill_everywhere, work) for work in WORKS},
    **{f"error: {fault.name}": partial(inject_everywhere, fault) for fault in FAULTS},
    **{f"restart: {error}": partial(restart_under, error) for error in ERRORS},
    "environments": partial(_environments, PLAIN),
    "damage": partial(damage_regions, restart_every=RESTART_EVERY),
    **{f"sparse {name}": _named("sparse", part) for name, part in _ON_SPARSE.items()},
    **{f"resharded {name}": _named("resharded", part) for name, part in _RESHARDED.items()},
}


def campaign(directory: Path, parts: Sequence[tuple[str, int]]) -> Iterator[Outcome]:
    """Run parts in a process of their own, and give what they find as it comes.

    Raises:
        CPSRError: the process failed; the message ends with what it wrote last.
    """
    words = [f"{name}/{every}" for name, every in parts]
    command = [sys.executable, "-m", "cpsr.benchmarks.faults.campaign", str(directory), *words]
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
        own = directory / name.replace(": ", "-").replace(" ", "-")
        for outcome in PARTS[name](own, int(every)):
            sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
