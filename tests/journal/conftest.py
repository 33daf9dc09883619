"""The journal of a run, open."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cpsr.journal import Journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "journal.db"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    journal = Journal.open(path)
    yield journal
    journal.close()
