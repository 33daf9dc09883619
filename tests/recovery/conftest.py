"""Runs of the small job that several tests compare with."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.run_directory import IDENTITY, run_id
from tests.recovery.job import Ended, Job


class Uninterrupted(Protocol):
    def __call__(self, zero: int = 1, **options: Any) -> Ended:
        """The run that nothing happened to, with `Job.launch`'s options; each is run once."""


class Killed(Protocol):
    def __call__(self, **options: Any) -> Ended:
        """The first life of the test's job, which a fault ends, with `Job.launch`'s options; each is run once.

        It leaves nothing in shared memory: the run would be the same one in every test.
        """


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    if (job.run_dir / IDENTITY).exists():
        remove_memory_states(run_id(job.run_dir))


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    known: dict[str, Ended] = {}

    def with_options(zero: int = 1, **options: Any) -> Ended:
        name = repr((zero, sorted(options.items())))
        if name not in known:
            known[name] = Job(tmp_path_factory.mktemp("uninterrupted")).launch(zero=zero, **options)
            assert set(known[name].statuses) == {0}, known[name].output[0][-3000:]
        return known[name]

    return with_options


@pytest.fixture(scope="session")
def killed_lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Job, Ended]]:
    """Every killed life so far, by its options."""
    return {}


@pytest.fixture
def killed(job: Job, tmp_path_factory: pytest.TempPathFactory, killed_lives: dict[str, tuple[Job, Ended]]) -> Killed:
    def with_options(**options: Any) -> Ended:
        name = repr(sorted(options.items()))
        if name not in killed_lives:
            first = Job(tmp_path_factory.mktemp("killed"))
            killed_lives[name] = first, first.launch(**options)
            assert -9 in killed_lives[name][1].statuses, killed_lives[name][1].output
        first, ended = killed_lives[name]
        subprocess.run(["cp", "--archive", first.run_dir, job.run_dir], check=True)
        job.lives = first.lives
        return ended

    return with_options
