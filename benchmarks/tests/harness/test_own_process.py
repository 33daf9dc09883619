"""A process of its own gives back results and exceptions, and its end from outside is reported."""

import os

import pytest

from cpsr.benchmarks.harness.processes import in_own_process
from cpsr.errors import CPSRError


def test_work_is_done_elsewhere_and_its_errors_come_back() -> None:
    assert in_own_process(os.getpid) != os.getpid()
    with pytest.raises(FileNotFoundError):
        in_own_process(os.stat, "no/such/file")


def test_a_process_that_is_ended_from_outside_is_reported() -> None:
    with pytest.raises(CPSRError, match="_exit was ended from outside, perhaps for lack of memory"):
        in_own_process(os._exit, 9)
