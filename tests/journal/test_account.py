"""What the run's time went into: sums over lives, with times in seconds since START."""

import math
from typing import Literal

from cpsr.journal import Account, CheckpointRow, LifeRow, StepRow

START = 1_700_000_000.0
FLUSH_ITERATIONS = 20


def step(life: int, iteration: int, seconds: float = 1.0) -> StepRow:
    return StepRow(life=life, iteration=iteration, loss=1.0, learning_rate=None, seconds=seconds)


class Timeline:
    """The account of a run whose first life begins at START."""

    def __init__(self) -> None:
        self.account = Account(life=0, began_unix_seconds=START, until_unix_seconds=START)
        self.last = self._life(0, 0)

    @staticmethod
    def _life(life: int, at: float) -> LifeRow:
        return LifeRow(life=life, mode="auto", pid=1, host="a", started_unix_seconds=START + at)

    def begin(self, life: int, at: float, ended: float | None = None) -> None:
        """A life begins; the one before it was killed, or has ended in good order."""
        before = self.last
        if ended is not None:
            ending: Literal["clean"] = "clean"
            before = LifeRow(
                life=before.life, mode="auto", pid=1, host="a", ending=ending, ended_unix_seconds=START + ended
            )
        self.last = self._life(life, at)
        self.account = self.account.with_life(self.last, before)

    def train(self, first: int, last: int, begins: float, seconds: float = 1.0) -> None:
        """Steps of equal length from a time on, reported every few."""
        for start in range(first, last + 1, FLUSH_ITERATIONS):
            iterations = range(start, min(last, start + FLUSH_ITERATIONS - 1) + 1)
            ends = begins + (iterations[-1] - first + 1) * seconds
            steps = [step(self.last.life, iteration, seconds) for iteration in iterations]
            self.account = self.account.with_steps(steps, START + ends)

    def fail(self, life: int, iteration: int) -> None:
        """The next life has detected that one failed, whose last steps took a second each."""
        self.account = self.account.with_failure(life, iteration, [1.0] * 20)

    def save(self, iteration: int, stall: float) -> None:
        row = CheckpointRow(life=self.last.life, iteration=iteration, status="committed", stall_seconds=stall)
        self.account = self.account.with_checkpoint(row)


def test_stalls_in_repeated_steps_are_known() -> None:
    run = Timeline()
    run.train(1, 100, begins=0)
    run.save(50, 2.0)
    run.account = run.account.with_memory_stalls(3, 0.5)
    run.train(61, 100, begins=100)
    run.save(80, 4.0)
    run.account = run.account.with_memory_stalls(1, 0.25)
    run.train(101, 120, begins=140)
    run.save(100, 8.0)  # in step 101, which was the first of its iteration
    account = run.account
    assert (account.checkpoint_stall_seconds, account.memory_stall_seconds) == (14, 0.75)
    assert (account.repeated_stall_seconds, account.memory_snapshots) == (4.25, 4)
    assert account.checkpoints == {"committed": [3, 0, 14, 0, 0]}


def test_steps_that_a_killed_life_did_not_report_count_up_to_the_restart() -> None:
    run = Timeline()
    run.train(1, 100, begins=0)
    run.begin(1, 130)
    run.fail(0, 105)
    run.fail(0, 105)  # once
    assert run.account.until_unix_seconds == START + 105
    run.train(61, 80, begins=150)
    account = run.account
    assert (account.reached_iteration, account.repeated_seconds) == (105, 20)
    assert (account.step_seconds, account.restart_seconds) == (125, 45)
    run.begin(2, 171)  # a second later: there is no room for more steps, whatever the counter says
    run.fail(1, 99)
    assert (run.account.step_seconds, run.account.repeated_seconds) == (126, 21)


def test_a_clock_that_goes_back_and_durations_that_are_none_do_no_harm() -> None:
    run = Timeline()
    steps = [step(0, 1), step(0, 2, math.nan), step(0, 3, math.inf)]
    run.account = run.account.with_steps(steps, START - 50)
    run.save(2, math.nan)
    assert (run.account.until_unix_seconds, run.account.step_seconds) == (START, 1)
    assert (run.account.iteration, run.account.checkpoint_stall_seconds) == (3, 0)
