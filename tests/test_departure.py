"""A rank leaves with the state of its last step boundary dumped, and never with half a step of it."""

import logging
import os
import random
import signal
import threading
import time
from pathlib import Path
from types import FrameType

import pytest

from cpsr.departure import Departure, undisturbed
from tests.departing import ranks

DUMPS = 200  # of which every one overlaps an update if nothing keeps them apart
STRESS_SECONDS = 20.0  # a second on an idle machine


class Told:
    """What a departure told and dumped."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int | None]] = []
        self.dumped: list[int] = []

    def tell(self, kind: str, message: str, iteration: int | None, level: int) -> None:
        self.events.append((kind, message, iteration))


def departure(told: Told, **more: object) -> Departure:
    return Departure(told.dumped.append, told.tell, 0.1, **more)  # type: ignore[arg-type]


def test_only_the_boundary_is_dumped_and_once() -> None:
    told = Told()
    leaving = departure(told)
    assert not leaving.dump("a peer is gone")  # nothing is restored yet
    leaving.end_update(7)
    assert leaving.dump("a peer is gone")
    assert leaving.dump("once more")
    leaving.begin_update()
    assert not leaving.dump("in the update")
    leaving.end_update(8)
    assert leaving.dump("after it")
    leaving.begin_update()
    leaving.end_update(7)  # rolled back, to another state than before
    assert leaving.dump("there again")
    assert told.dumped == [7, 8, 7]
    assert [kind for kind, _, _ in told.events] == ["not dumped", "dumped", "not dumped", "dumped", "dumped"]
    assert "no step of this life has ended" in told.events[0][1]
    assert "half of it is of the next" in told.events[2][1]


def test_an_update_that_an_exception_cut_short_may_begin_again() -> None:
    told = Told()
    leaving = departure(told)
    leaving.begin_update()
    leaving.begin_update()
    assert not leaving.dump("half")
    leaving.end_update(3)
    leaving.end_update(4)  # without a begin: nothing was held
    assert leaving.dump("whole")
    assert told.dumped == [4]


def test_what_stands_against_it_or_goes_wrong_is_told() -> None:
    told = Told()
    obstacles = ["life 3 has begun", None]
    leaving = Departure(lambda iteration: 1 // 0, told.tell, 0.1, lambda: obstacles.pop(0))  # type: ignore[arg-type]
    leaving.end_update(7)
    assert not leaving.dump("a peer is gone")
    assert not leaving.dump("a peer is gone")
    assert "life 3 has begun" in told.events[0][1]
    assert "ZeroDivisionError" in told.events[1][1]


def test_dumps_and_updates_never_overlap() -> None:
    """The trainer tears a pair of numbers apart in every update; no dump ever sees them differ."""
    state, seen, told = [0, 0], [], Told()

    def dump(iteration: int) -> None:
        first = state[0]
        time.sleep(random.uniform(0, 0.001))
        seen.append((iteration, first, state[1]))

    leaving = Departure(dump, told.tell, 0.1)
    over = threading.Event()
    dumpers = [threading.Thread(target=lambda: dump_until(leaving, over)) for _ in range(2)]
    leaving.end_update(0)
    for thread in dumpers:
        thread.start()
    deadline, iteration = time.monotonic() + STRESS_SECONDS, 0
    while len(seen) < DUMPS and time.monotonic() < deadline:
        iteration += 1
        leaving.begin_update()
        state[0] = iteration
        time.sleep(random.uniform(0, 0.0005))
        state[1] = iteration
        leaving.end_update(iteration)
        time.sleep(random.uniform(0, 0.0005))
    over.set()
    for thread in dumpers:
        thread.join()
    assert len(seen) >= DUMPS
    assert all(iteration == first == second for iteration, first, second in seen)
    assert len({iteration for iteration, _, _ in seen}) == len(seen)


def dump_until(leaving: Departure, over: threading.Event) -> None:
    while not over.is_set():
        leaving.dump("stress", wait_seconds=0.01)


def test_blocked_in_a_collective(tmp_path: Path) -> None:
    """Two ranks wait for a third: SIGTERM to one of them, and then the end of the third, which both learn of."""
    with ranks(tmp_path, gloo=True, size=3, faults={"2": "waits"}, liveness={"sigterm_grace_seconds": 0.5}) as job:
        job.wait_for(2, "waits")
        job.signal(0, signal.SIGTERM)
        assert job.wait_for(0, "dump")["iteration"] == 5
        assert "no step has ended for 0.5 s" in job.wait_for(0, "dumped")["message"]
        assert job.notes(1, "dump") == []
        job.signal(2, signal.SIGKILL)
        assert [job.status(rank) for rank in range(3)] == [1, 1, -signal.SIGKILL]
        for rank in range(2):
            assert [note["iteration"] for note in job.notes(rank, "dump")] == [5]
        assert "RuntimeError" in job.notes(1, "dumped")[0]["message"]


def test_sigterm_that_is_followed_at_a_step_needs_no_dump(tmp_path: Path) -> None:
    options = {"size": 1, "step_seconds": 0.2, "liveness": {"sigterm_grace_seconds": 0.5}}
    with ranks(tmp_path, **options) as job:
        job.wait_for(0, "step", 2)
        job.signal(0, signal.SIGTERM)
        assert job.status(0) == 0
        assert job.notes(0, "dump") == []


def test_sigterm_in_a_step_longer_than_the_grace_loses_nothing(tmp_path: Path) -> None:
    """The update waits for the dump that had begun, and then the group's own way of leaving is taken."""
    options = {"size": 1, "step_seconds": 0.8, "liveness": {"sigterm_grace_seconds": 0.3}, "dump_seconds": 1.2}
    with ranks(tmp_path, **options) as job:
        job.wait_for(0, "step", 1)
        job.signal(0, signal.SIGTERM)
        assert job.status(0) == 0
        (dumped,), (_, updated) = job.notes(0, "dump"), job.notes(0, "update")
        assert (dumped["iteration"], updated["iteration"]) == (1, 2)
        assert updated["at"] > dumped["at"]
        assert job.notes(0, "step")[-1]["iteration"] == 2


def test_sigterm_in_an_update_waits_for_its_end_or_refuses(tmp_path: Path) -> None:
    options = {"size": 1, "update_seconds": 2.0, "liveness": {"sigterm_grace_seconds": 0.3}}
    with ranks(tmp_path, **options) as job:
        job.wait_for(0, "update", 1)
        job.signal(0, signal.SIGTERM)
        assert "half of it" in job.wait_for(0, "not dumped")["message"]
        assert job.status(0) == 0


def test_a_child_that_dies_does_not_disturb_a_dump(caplog: pytest.LogCaptureFixture) -> None:
    """Torch's handler raises where a loader's worker has died, wherever the main thread is."""

    def raises(number: int, frame: FrameType | None) -> None:
        raise RuntimeError("a worker is killed")

    before = signal.signal(signal.SIGCHLD, raises)
    try:
        with caplog.at_level(logging.WARNING), undisturbed():
            os.kill(os.getpid(), signal.SIGCHLD)
            told = Told()
            leaving = departure(told)
            leaving.end_update(7)
            assert leaving.dump("a worker is dead")
        assert "a worker is killed" in caplog.text
        with pytest.raises(RuntimeError, match="a worker is killed"):
            os.kill(os.getpid(), signal.SIGCHLD)
    finally:
        signal.signal(signal.SIGCHLD, before)
