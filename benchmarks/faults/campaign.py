"""All parts of the campaign by name."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from cpsr.benchmarks.faults.damage import damage_regions
from cpsr.benchmarks.faults.environments import ENVIRONMENTS, in_environment
from cpsr.benchmarks.faults.errors import FAULTS, inject_everywhere
from cpsr.benchmarks.faults.kills import kill_everywhere
from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.benchmarks.faults.restarts import ERRORS, restart_under
from cpsr.benchmarks.faults.works import WORKS

__all__ = ["PARTS", "Part", "run_part"]

# A directory for its runs, and only every so many of its faults.
Part = Callable[[Path, int], Iterator[Outcome]]
RESTART_EVERY = 20  # flipped bits and cuts are many; all of them are verified and loaded


def _damage(directory: Path, every: int) -> Iterator[Outcome]:
    return damage_regions(directory, every, RESTART_EVERY)


def _environments(directory: Path, every: int) -> Iterator[Outcome]:
    for environment in ENVIRONMENTS:
        yield from in_environment(environment, directory)


PARTS: dict[str, Part] = {
    **{f"kill: {work.name}": partial(kill_everywhere, work) for work in WORKS},
    **{f"error: {fault.name}": partial(inject_everywhere, fault) for fault in FAULTS},
    **{f"restart: {error}": partial(restart_under, error) for error in ERRORS},
    "environments": _environments,
    "damage": _damage,
}


def run_part(name: str, directory: Path, every: int) -> Iterator[Outcome]:
    """The outcomes of one part, as they come."""
    return PARTS[name](directory / name.replace(": ", "-").replace(" ", "-"), every)
