"""A place for the runs of these tests."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def fast_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In memory where there is a tmpfs: hundreds of runs, each with dozens of fsyncs, that no signal can undo."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path_factory.mktemp("faults")
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)
