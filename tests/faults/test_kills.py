"""Killed at any system call that changes files, the job finds its newest checkpoint again, bit for bit."""

import pytest

from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.benchmarks.faults.works import WORKS
from tests.faults.conftest import Campaign, Parts, require_good

# Enough of each that every kind of call is met; `make test-slow` kills at all of them.
SOME: Parts = {
    "kill: save and commit": 3,
    "kill: save of another rank": 8,
    "kill: partial save of weights": 12,
    "kill: partial save by link": 6,
    "kill: retention": 16,
    "kill: roll-back": 4,
    "kill: setting aside": 2,
    "kill: restart": 4,
    "kill: sparse chain": 30,
    "kill: sparse chain by copies": 70,
    "kill: sparse roll-back": 14,
    "kill: sparse restart": 10,
}
EVERY: Parts = {f"kill: {work.name}": 1 for work in WORKS}
# Calls that change files in each: none of them can become fewer without notice.
CALLS = {
    "kill: save and commit": 35,
    "kill: save of another rank": 25,
    "kill: save of both ranks": 60,
    "kill: save again": 35,
    "kill: partial save of weights": 20,
    "kill: partial save by link": 15,
    "kill: retention": 80,
    "kill: roll-back": 15,
    "kill: setting aside": 6,
    "kill: restart": 12,
    "kill: sparse chain": 230,
    "kill: sparse chain by copies": 280,
    "kill: sparse save of both ranks": 90,
    "kill: sparse roll-back": 25,
    "kill: sparse restart": 14,
}


@pytest.fixture(scope="module")
def some(inject: Campaign) -> dict[str, list[Outcome]]:
    return inject(SOME)


@pytest.mark.parametrize("scenario", SOME)
def test_killed_at_some_calls(some: dict[str, list[Outcome]], scenario: str) -> None:
    require_good(some[scenario], CALLS[scenario] // SOME[scenario])


def test_every_kind_of_call_was_met(some: dict[str, list[Outcome]]) -> None:
    met = {outcome.fault.split()[0] for outcomes in some.values() for outcome in outcomes}
    assert met >= {"openat", "write", "fsync", "rename", "unlink", "rmdir", "chmod"}
    assert met & {"link", "linkat"}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", EVERY)
def test_killed_at_every_call(inject: Campaign, scenario: str) -> None:
    require_good(inject({scenario: 1})[scenario], CALLS[scenario])
