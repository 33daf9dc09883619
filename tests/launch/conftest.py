"""Machines made of kernel namespaces."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cpsr.demo.machines import Machines, obstacle


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Four of them, with networks, names and memories of their own."""
    if (why := obstacle()) is not None:
        pytest.skip(why)
    with Machines(4, tmp_path) as found:
        yield found
