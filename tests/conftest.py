"""What all tests share."""

import os
import re
from collections.abc import Iterator

import pytest
from hypothesis import settings

from cpsr.checkpoint.memory import remove_held

# No example has a time limit: a machine that does something else beside would decide. In CI they are the same at every
# run, so that a red run is the change's; elsewhere new ones are drawn each time.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session", autouse=True)
def _killed_jobs_leave_no_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs that were killed and never restarted keep their snapshots in shared memory until somebody frees it."""
    yield
    for identity in tmp_path_factory.getbasetemp().rglob("run.json"):
        found = re.search(r'"run_id": *"([^"]+)"', identity.read_text(errors="replace"))  # some are damaged on purpose
        if found is not None:
            remove_held(found[1])
