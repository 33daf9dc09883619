"""What the tests of faults share: a place for the runs, and one process that injects for all tests of a file."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.benchmarks.faults.tracing import why_no_strace
from cpsr.benchmarks.faults.worker import campaign

# Names of parts, and of each how many faults are left out for one that is injected.
Parts = dict[str, int]
Campaign = Callable[[Parts], dict[str, list[Outcome]]]


@pytest.fixture(scope="session")
def fast_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In memory where there is a tmpfs: hundreds of runs, each with dozens of fsyncs, that no signal can undo."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path_factory.mktemp("faults")
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def inject(fast_directory: Path) -> Campaign:
    """Runs parts of the campaign; the outcomes by part."""
    missing = why_no_strace()
    if missing is not None:
        pytest.skip(missing)

    def run(parts: Parts) -> dict[str, list[Outcome]]:
        found: dict[str, list[Outcome]] = {}
        for outcome in campaign(fast_directory / "campaign", list(parts.items())):
            found.setdefault(outcome.scenario, []).append(outcome)
        return found

    return run


def require_good(outcomes: list[Outcome], at_least: int) -> None:
    """All were injected and survived with equal state, and they are as many as there have to be."""
    bad = [f"{outcome.fault}: {outcome.what or 'differs'}" for outcome in outcomes if not outcome.good]
    assert bad == []
    assert len(outcomes) >= at_least
