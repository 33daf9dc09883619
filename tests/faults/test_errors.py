"""Whatever the file system refuses, training goes on, the save says what happened, and nothing committed is lost."""

import pytest

from cpsr.benchmarks.faults.environments import NOT_INJECTED
from cpsr.benchmarks.faults.outcome import Outcome
from tests.faults.conftest import Campaign, Parts, require_good

SOME: Parts = {
    "error: ENOSPC": 8,
    "error: ENOSPC from there on": 4,
    "error: EIO": 9,
    "error: EIO and retention": 30,
    "error: EIO from there on": 16,
    "error: EINTR": 9,
    "error: EINTR of a read": 60,
    "error: EROFS from there on": 5,
    "error: EIO of a read": 40,
    "error: half of a write lost": 3,
    "error: a write lost": 3,
    "error: fsync does nothing": 6,
    "restart: EIO": 25,
    "restart: EMFILE": 10,
    "restart: EINTR": 30,
    "sparse error: ENOSPC": 15,
    "sparse error: EIO and retention": 25,
    "sparse error: EIO from there on": 25,
    "sparse error: EIO of a read": 60,
    "sparse error: fsync does nothing": 8,
    "sparse error: EPERM of a link from there on": 1,
    "sparse error: ENOSPC without links": 20,
    "sparse error: half of a copy lost": 2,
    "sparse restart: EIO": 60,
}
CALLS = {
    "error: ENOSPC": 30,
    "error: ENOSPC from there on": 8,
    "error: EIO": 35,
    "error: EIO and retention": 60,
    "error: EIO from there on": 35,
    "error: EINTR": 25,
    "error: EINTR of a read": 100,
    "error: EROFS from there on": 18,
    "error: EIO of a read": 150,
    "error: half of a write lost": 6,
    "error: a write lost": 6,
    "error: fsync does nothing": 10,
    "restart: EIO": 100,
    "restart: EMFILE": 45,
    "restart: EINTR": 100,
    "sparse error: ENOSPC": 45,
    "sparse error: EIO and retention": 75,
    "sparse error: EIO from there on": 50,
    "sparse error: EIO of a read": 120,
    "sparse error: fsync does nothing": 12,
    "sparse error: EPERM of a link from there on": 2,
    "sparse error: ENOSPC without links": 50,
    "sparse error: half of a copy lost": 4,
    "sparse restart: EIO": 180,
}
ENVIRONMENTS = {
    "error: full disk": 5,
    "error: read-only disk": 1,
    "error: short write": 2,
    "error: slow disk": 1,
    "error: clock jumps": 3,
}


@pytest.fixture(scope="module")
def some(inject: Campaign) -> dict[str, list[Outcome]]:
    return inject({**SOME, "environments": 1})


@pytest.mark.parametrize("scenario", SOME)
def test_an_error_at_some_calls(some: dict[str, list[Outcome]], scenario: str) -> None:
    require_good(some[scenario], CALLS[scenario] // SOME[scenario])


@pytest.mark.parametrize("scenario", ENVIRONMENTS)
def test_an_environment(some: dict[str, list[Outcome]], scenario: str) -> None:
    outcomes = some[scenario]
    refused = [outcome.what for outcome in outcomes if not outcome.injected]
    if refused:
        pytest.skip(refused[0])
    require_good(outcomes, ENVIRONMENTS[scenario])


def test_a_full_disk_and_a_slow_one_are_said(some: dict[str, list[Outcome]]) -> None:
    full = [outcome.what for outcome in some.get("error: full disk", []) if outcome.injected]
    assert all(what.startswith("failed: ") and "No space left on device" in what for what in full)
    (slow,) = some["error: slow disk"]
    assert slow.what.startswith("skipped, counted and said: [")


def test_what_is_never_injected_is_named() -> None:
    assert {"power cut", "network file system"} <= NOT_INJECTED.keys()


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SOME)
def test_an_error_at_every_call(inject: Campaign, scenario: str) -> None:
    require_good(inject({scenario: 1})[scenario], CALLS[scenario])
