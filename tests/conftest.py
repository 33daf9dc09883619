"""What all tests share."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

from tests.device import DEVICE, compute_exactly

# No example has a time limit: a machine that does something else beside would decide. In CI they are the same at every
# run, so that a red run is the change's; elsewhere new ones are drawn each time.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


# What starts the processes of ranks. A file of tests that imports from one of these is marked `ranks` as a whole.
STARTS_RANKS = {
    "tests.rank_processes",
    "tests.launch.jobs",
    "tests.launch.machine_jobs",
    "tests.peers.ranks",
    "tests.qualify.jobs",
    "tests.ranks.dumping_ranks",
    "tests.recovery.job",
    "tests.situations.lives",
    "tests.stacks.lives",
    "tests.two_ranks",
}
# They begin first, in this order, or workers wait at the end for what one of them has left.
LONG = (
    "faults/test_campaign.py",
    "engines/test_conformance.py",
    "launch/test_command.py",
    "situations/test_hugging_face.py",
    "launch/test_rehearse.py",
    "situations/test_lightning.py",
    "replay/test_localized.py",
    "replay/test_windows.py",
    "launch/test_machines.py",
    "integrations/test_transformers.py",
    "integrations/test_ranks.py",
    "recovery/test_elastic.py",
    "stacks/test_torchtitan.py",
    "situations/test_seeds_of_workers.py",
    "test_readme.py",
    "hints/test_rewriting.py",
    "service/test_dashboard_browser.py",
)
# Limits are for what hangs: ranks of two tests at once, and of other people's jobs, must not come near to it.
RANKS_TIMEOUT_SECONDS = 900


def pytest_configure() -> None:
    compute_exactly()


def pytest_report_header() -> str:
    return f"tests train on: {DEVICE}"


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts ranks, and give it time; what takes long begins first."""
    order = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path, len(LONG)))
    for item in items:
        module = getattr(item, "module", None)
        if module is None or not starts_ranks(module):
            continue
        item.add_marker(pytest.mark.ranks)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(RANKS_TIMEOUT_SECONDS))


def starts_ranks(module: ModuleType) -> bool:
    """Whether it imports something, or all, of a module that starts ranks."""
    imported = vars(module).values()
    names = {one.__name__ if isinstance(one, ModuleType) else getattr(one, "__module__", None) for one in imported}
    return not names.isdisjoint(STARTS_RANKS)


@pytest.fixture(scope="session", autouse=True)
def _killed_jobs_leave_no_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs that were killed and never restarted keep their snapshots in shared memory until somebody frees it."""
    yield
    from cpsr.checkpoint.memory_owners import remove_memory_states  # imports torch, which the environment precedes

    for identity in tmp_path_factory.getbasetemp().rglob("run.json"):
        found = re.search(r'"run_id": *"([^"]+)"', identity.read_text(errors="replace"))  # some are damaged on purpose
        if found is not None:
            remove_memory_states(found[1])
