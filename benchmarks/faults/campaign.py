"""All parts of the campaign by name."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from cpsr.benchmarks.faults.damage import damage_regions
from cpsr.benchmarks.faults.environments import ENVIRONMENTS, in_environment
from cpsr.benchmarks.faults.errors import FAULTS, LINK_FAULTS, inject_everywhere
from cpsr.benchmarks.faults.job import write_sparse
from cpsr.benchmarks.faults.kills import kill_everywhere
from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.benchmarks.faults.restarts import ERRORS, restart_resharded, restart_under
from cpsr.benchmarks.faults.saves import PLAIN, SPARSE, Saves
from cpsr.benchmarks.faults.works import WORKS

__all__ = ["PARTS", "Part", "run_part"]

# A directory for its runs, and only every so many of its faults.
Part = Callable[[Path, int], Iterator[Outcome]]
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
    **{f"error: {fault.name}": partial(inject_everywhere, fault, saves=SPARSE) for fault in (*FAULTS, *LINK_FAULTS)},
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


def run_part(name: str, directory: Path, every: int) -> Iterator[Outcome]:
    """The outcomes of one part, as they come."""
    return PARTS[name](directory / name.replace(": ", "-").replace(" ", "-"), every)
