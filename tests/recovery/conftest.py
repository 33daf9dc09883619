"""Runs of the small job that several tests compare with."""

from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.recovery.job import Ended, Job


class Uninterrupted(Protocol):
    def __call__(self, zero: int = 1, **options: Any) -> Ended:
        """The run that nothing happened to, with `Job.launch`'s options; each is run once."""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


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
