"""When a job is started again: by what the ranks' counters and notes in real files say."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from cpsr.checkpoint.progress import ProgressCounter, progress_path
from cpsr.launch.agent import Failures, JobEndedError, job_at
from cpsr.ranks.exits import Exit, cause_of, exits_of
from cpsr.ranks.heartbeat import HeartbeatFiles
from cpsr.ranks.link import REFUSED_STATUS, Opened, Report, Uncaught

RANKS = 2


class Launch:
    """A launcher's directory and a run's, with what was printed."""

    def __init__(self, tmp_path: Path, restarts_max: int = 3) -> None:
        (tmp_path / "launcher").mkdir()
        self.run_dir = tmp_path / "run"
        self.run_dir.mkdir()
        self.report = Report(tmp_path / "launcher")
        self.printed: list[str] = []
        self.failures = Failures(self.report, restarts_max, self.printed.append)
        self.counters = [ProgressCounter(progress_path(self.run_dir, rank)) for rank in range(RANKS)]

    def reach(self, iteration: int) -> None:
        for counter in self.counters:
            counter.reset(iteration, iteration)

    def open(self, life: int) -> None:
        self.report.clear()
        self.report.open(Opened(str(self.run_dir), life, RANKS))

    def fail(self, *uncaught: Uncaught) -> None:
        for one in uncaught:
            self.report.fail(one)

    def kill(self, rank: int = 1) -> float:
        return self.failures.after([Exit.of_status(rank, -9, time.time())])


def test_a_job_that_gains_something_in_each_life_may_fail_as_often_as_it_likes(tmp_path: Path) -> None:
    launch = Launch(tmp_path, restarts_max=2)
    for life in range(10):
        launch.open(life)
        launch.reach(10 * life + 5)
        assert launch.kill() == 0.0
    assert launch.printed[-1] == "Rank 1 was killed (SIGKILL) after iteration 95. All ranks start again"


def test_a_job_that_fails_at_the_same_place_is_given_up(tmp_path: Path) -> None:
    launch = Launch(tmp_path, restarts_max=2)
    launch.open(0)
    launch.reach(7)
    assert launch.kill() == 0.0
    assert launch.kill() == 1.0
    launch.reach(5)  # recomputing, not yet where it was
    assert launch.kill() == 2.0
    with pytest.raises(JobEndedError, match=r"after 3 failures without a new iteration \(--max-restarts=2\)") as ended:
        launch.kill()
    assert ended.value.status == 1


def test_a_job_whose_ranks_are_killed_before_it_opens_a_run_is_given_up_too(tmp_path: Path) -> None:
    launch = Launch(tmp_path, restarts_max=1)
    assert launch.kill(rank=0) == 1.0
    assert launch.printed == [
        "Rank 0 was killed (SIGKILL) before a run was opened. All ranks start again in 1 s (restart 1 of 1 without a "
        "new iteration)"
    ]
    with pytest.raises(JobEndedError, match=r"after 2 failures without a new iteration \(--max-restarts=1\)"):
        launch.kill(rank=0)


@pytest.mark.parametrize(
    ("exits", "uncaught"),
    [
        ([Exit(0, status=1)], [Uncaught(0, "ModuleNotFoundError: No module named 'x'", "train.py:1", passing=False)]),
        ([Exit(0, status=2)], []),  # argparse
        ([Exit(0, status=1), Exit(1, signal="SIGTERM")], [Uncaught(0, "ValueError: bad", "train.py:9", passing=False)]),
        # The other rank lost the one that failed.
        (
            [Exit(0, status=1), Exit(1, status=1)],
            [
                Uncaught(0, "ValueError: bad", "train.py:9", passing=False),
                Uncaught(1, "RuntimeError: Connection closed by peer", "torch.py:3", passing=True),
            ],
        ),
    ],
)
def test_an_error_of_the_script_before_any_run_is_final(
    tmp_path: Path, exits: list[Exit], uncaught: list[Uncaught]
) -> None:
    launch = Launch(tmp_path)
    launch.fail(*uncaught)
    with pytest.raises(JobEndedError, match=r"before a run was opened. The job is not started again: the error is"):
        launch.failures.after(exits)


@pytest.mark.parametrize(
    ("exits", "uncaught"),
    [
        ([Exit(0, status=1)], [Uncaught(0, "RuntimeError: Connection reset by peer", "torch.py:3", passing=True)]),
        ([Exit(0, status=1)], [Uncaught(0, "RunDirectoryError: not mounted", "cpsr.py:3", passing=True)]),
        # A rank was killed, and the error is what that did to another one.
        ([Exit(1, signal="SIGKILL"), Exit(0, status=1)], [Uncaught(0, "KeyError: 1", "train.py:9", passing=False)]),
    ],
)
def test_what_another_rank_or_a_file_system_has_caused_is_tried_again(
    tmp_path: Path, exits: list[Exit], uncaught: list[Uncaught]
) -> None:
    launch = Launch(tmp_path)
    launch.fail(*uncaught)
    assert [launch.failures.after(exits) for _ in range(3)] == [1.0, 2.0, 4.0]


def test_an_error_before_the_run_is_opened_again_is_final_when_it_comes_twice(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    launch.open(0)
    launch.reach(7)
    assert launch.kill() == 0.0
    for wait in (1.0, None):
        launch.failures.started({0: 1, 1: 2})
        launch.report.clear()
        launch.fail(Uncaught(0, "FileNotFoundError: data", "train.py:3", passing=False))
        if wait is not None:
            assert launch.failures.after([Exit(0, status=1)]) == wait
    with pytest.raises(JobEndedError, match="the same error has come twice without a new iteration in between"):
        launch.failures.after([Exit(0, status=1)])


def test_an_error_that_comes_twice_at_one_iteration_is_final_and_one_that_moves_is_not(tmp_path: Path) -> None:
    launch = Launch(tmp_path)

    def fails(iteration: int, error: str, place: str = "train.py:9") -> float:
        launch.open(0)
        launch.reach(iteration)
        launch.fail(Uncaught(1, error, place, passing=False))
        return launch.failures.after([Exit(1, status=1)])

    assert fails(7, "IndexError: index 7 of 5") == 0.0
    assert fails(9, "IndexError: index 7 of 5") == 0.0  # two iterations later
    assert fails(9, "KeyError: 'x'") == 1.0
    assert fails(9, "IndexError: index 7 of 5") == 2.0  # not the same twice in a row
    with pytest.raises(JobEndedError, match=r"after iteration 8. The job is not started again: the same error"):
        fails(8, "IndexError: index 8 of 5")  # numbers are not compared


def test_ranks_that_were_ended_after_the_failure_are_not_its_cause(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    launch.open(3)
    launch.reach(7)
    now = time.time()
    exits = [Exit.of_status(1, -9, now), Exit.of_status(0, -15, now), Exit.of_status(2, -9, now + 30.0)]
    assert launch.failures.after(exits) == 0.0
    assert launch.printed == ["Rank 1 was killed (SIGKILL) after iteration 7. All ranks start again"]
    assert cause_of(exits_of(launch.run_dir, 3), 3) == "rank 1 was killed (SIGKILL)"


def test_a_run_that_another_job_has_taken_over_is_not_started_again(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    launch.failures.job = "ours"
    launch.failures.require_ours()  # nothing is known yet
    HeartbeatFiles(launch.run_dir, 3).claim("ours")
    launch.open(3)
    launch.failures.look()
    launch.failures.require_ours()
    launch.failures.started({0: 1})
    HeartbeatFiles(launch.run_dir, 4).claim("ours")  # a machine that was left by the others, and joins them again
    launch.failures.require_ours()
    HeartbeatFiles(launch.run_dir, 5).claim()  # unknown, of torchrun
    launch.failures.require_ours()
    HeartbeatFiles(launch.run_dir, 6).claim("another")
    with pytest.raises(JobEndedError, match=r"Another job has begun life 6 .*, which had life 3, is not") as ended:
        launch.failures.require_ours()
    assert ended.value.status == REFUSED_STATUS
    with pytest.raises(JobEndedError, match="Another job has begun life 6"):
        launch.kill()


def test_launchers_that_meet_at_one_store_are_one_job(tmp_path: Path) -> None:
    torch_stores: Any = distributed  # which does not list them
    store, other = (torch_stores.FileStore(str(tmp_path / name)) for name in ("one", "other"))
    rounds = [job_at(torch_stores.PrefixStore(f"round {number}", store)) for number in range(2)]
    assert rounds[0] == rounds[1] != job_at(other)


def test_a_node_without_others_does_not_wait_for_its_turn(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trains')")
    # torch draws from this how long it waits, up to 0.3 s
    no_draws = "import random, sys; random.uniform = None; from cpsr.launch.command import run_job"
    command = [sys.executable, "-c", f"{no_draws}; sys.exit(run_job(['train.py']))"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "trains\n"), ended.stderr
