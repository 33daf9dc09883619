"""Ranks agree, in processes of their own, on one machine and on two."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.rank_processes import found_by, free_port, start_ranks
from tests.ranks.agreeing import STEPS, VERDICT_SECONDS, Job, main

SECONDS = 120.0  # the machine may be busy
RANKS = 4
LEAVE, PLAN = 1, 2


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def steps_of(folder: Path, rank: int) -> int:
    try:
        return int((folder / f"{rank}.steps").read_text() or 0)
    except FileNotFoundError:
        return 0


def started(job: Job, ranks: int = RANKS) -> Sequence[BaseProcess]:
    """The processes, once all of them train."""
    processes = start_ranks(main, job, ranks)
    until(lambda: all(steps_of(job.folder, rank) > 0 for rank in range(ranks)))
    return processes


def send(folder: Path, rank: int, number: int) -> None:
    os.kill(int((folder / f"{rank}.pid").read_text()), number)


@pytest.mark.parametrize("machines", [1, 2])
def test_all_adopt_plans_and_leave_at_the_same_steps(machines: int, tmp_path: Path) -> None:
    processes = started(Job(tmp_path, free_port(), 0.02, machines))
    (tmp_path / "plan").touch()
    until(lambda: steps_of(tmp_path, 0) > 100)
    asked, at = time.time(), steps_of(tmp_path, 3)
    (tmp_path / "stop-3").touch()
    found = found_by(processes, tmp_path, SECONDS)
    assert {one["boards"] for one in found} == {machines}
    first, second, leave = found[0]["done"]
    assert (first[1:], second[1:], leave[1:]) == ([PLAN, 7, 3], [PLAN, 9, 0], [LEAVE, 0, 0])
    assert all(one["done"] == found[0]["done"] and one["error"] is None for one in found)
    assert at <= leave[0] == found[0]["steps"]
    assert max(one["at"] for one in found) - asked < 2.0


def test_within_a_long_step_all_agree_to_leave_at_its_end(tmp_path: Path) -> None:
    processes = started(Job(tmp_path, free_port(), 2.0, 2))
    step = steps_of(tmp_path, 3)
    (tmp_path / "stop-3").touch()
    found = found_by(processes, tmp_path, SECONDS)
    assert all(one["done"] == [[step + 1, LEAVE, 0, 0]] for one in found), found


def test_a_stopped_rank_keeps_the_others_from_leaving_without_it(tmp_path: Path) -> None:
    processes = started(Job(tmp_path, free_port(), 0.02))
    send(tmp_path, 2, signal.SIGSTOP)
    (tmp_path / "stop-1").touch()
    waits_at = steps_of(tmp_path, 1)
    until(lambda: steps_of(tmp_path, 1) > waits_at + 2)  # what was proposed is withdrawn
    assert all(process.is_alive() for process in processes)
    send(tmp_path, 2, signal.SIGCONT)
    found = found_by(processes, tmp_path, SECONDS)
    assert all(one["done"] == found[0]["done"] and len(one["done"]) == 1 for one in found), found


def test_nobody_acts_alone_where_rank_0_is_killed_amid_a_proposal(tmp_path: Path) -> None:
    job = Job(tmp_path, free_port(), 0.02, 2)
    processes = started(job)
    send(tmp_path, 2, signal.SIGSTOP)  # it answers nothing, and the others wait
    (tmp_path / "stop-1").touch()

    def waits() -> bool:
        before = steps_of(tmp_path, 1)
        time.sleep(0.5)
        return steps_of(tmp_path, 1) == before

    until(waits)
    send(tmp_path, 0, signal.SIGKILL)
    send(tmp_path, 2, signal.SIGKILL)
    for rank in (1, 3):
        processes[rank].join(SECONDS)
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["done"] == []
        assert found["error"].startswith(f"UnevenRanksError: rank 0 has not said for {VERDICT_SECONDS:g} s"), found


def test_a_rank_that_ends_its_loop_leaves_the_agreement(tmp_path: Path) -> None:
    """And the others do not train on as if nothing had happened."""
    processes = started(Job(tmp_path, free_port(), 0.02, 2, {1: 50}))
    until(lambda: steps_of(tmp_path, 1) >= 50)
    (tmp_path / "stop-2").touch()
    found = found_by(processes, tmp_path, SECONDS)
    for rank in (0, 2, 3):
        assert found[rank]["done"] == []
        assert found[rank]["error"].startswith("UnevenRanksError: rank 1 has left"), found
        assert 50 < found[rank]["steps"] < STEPS


def test_equal_loops_end_together_whatever_was_proposed(tmp_path: Path) -> None:
    processes = started(Job(tmp_path, free_port(), 0.02, 2, dict.fromkeys(range(RANKS), 30)))
    (tmp_path / "plan").touch()
    found = found_by(processes, tmp_path, SECONDS)
    assert all(one["error"] is None and one["steps"] == 30 and one["done"] == found[0]["done"] for one in found)
