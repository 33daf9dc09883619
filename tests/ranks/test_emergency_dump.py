"""A rank leaves with the state of its last step boundary dumped, and never with half a step of it."""

import os
import random
import signal
import threading
import time
from pathlib import Path
from types import FrameType

import pytest

from cpsr.ranks.emergency_dump import EmergencyDump, undisturbed
from tests.ranks.dumping_ranks import WAIT_SECONDS, ranks

DUMPS = 200  # of which every one overlaps an update if nothing keeps them apart
STRESS_SECONDS = 60.0  # a second on an idle machine
GRACE_SECONDS = 0.2


class Recorder:
    """Events and dumps of an `EmergencyDump`."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int | None]] = []
        self.dumped: list[int] = []

    def report(self, kind: str, message: str, iteration: int | None, level: int) -> None:
        self.events.append((kind, message, iteration))


def emergency_dump(recorder: Recorder, **more: object) -> EmergencyDump:
    return EmergencyDump(recorder.dumped.append, recorder.report, 0.1, **more)  # type: ignore[arg-type]


def test_only_the_boundary_is_dumped_and_once() -> None:
    recorder = Recorder()
    dump_guard = emergency_dump(recorder)
    assert not dump_guard.dump("a peer is gone")  # nothing is restored yet
    dump_guard.end_update(7)
    assert dump_guard.dump("a peer is gone")
    assert dump_guard.dump("once more")
    dump_guard.begin_update()
    assert not dump_guard.dump("in the update")
    dump_guard.end_update(8)
    assert dump_guard.dump("after it")
    dump_guard.begin_update()
    dump_guard.end_update(7)  # rolled back, to another state than before
    assert dump_guard.dump("there again")
    assert recorder.dumped == [7, 8, 7]
    assert [kind for kind, _, _ in recorder.events] == ["not dumped", "dumped", "not dumped", "dumped", "dumped"]
    assert "no step of this life has ended" in recorder.events[0][1]
    assert "half of it is of the next" in recorder.events[2][1]


def test_the_report_names_the_iteration_that_was_dumped() -> None:
    recorder = Recorder()
    dump_guard = EmergencyDump(lambda iteration: iteration - 1, recorder.report, 0.1)
    dump_guard.end_update(8)
    assert dump_guard.dump("a peer is gone")
    ((kind, message, iteration),) = recorder.events
    assert (kind, iteration) == ("dumped", 7)
    assert "weights and moments of iteration 7 saved" in message
    assert message.endswith("the device has not completed the steps from there to iteration 8")


def test_dumps_and_updates_never_overlap() -> None:
    """The trainer tears a pair of numbers apart in every update; no dump ever sees them differ."""
    state, seen, recorder = [0, 0], [], Recorder()

    def dump(iteration: int) -> None:
        first = state[0]
        time.sleep(random.uniform(0, 0.001))
        seen.append((iteration, first, state[1]))

    dump_guard = EmergencyDump(dump, recorder.report, 0.1)
    over = threading.Event()
    dumpers = [threading.Thread(target=lambda: dump_until(dump_guard, over)) for _ in range(2)]
    dump_guard.end_update(0)
    for thread in dumpers:
        thread.start()
    deadline, iteration = time.monotonic() + STRESS_SECONDS, 0
    while len(seen) < DUMPS and time.monotonic() < deadline:
        iteration += 1
        dump_guard.begin_update()
        state[0] = iteration
        time.sleep(random.uniform(0, 0.0005))
        state[1] = iteration
        dump_guard.end_update(iteration)
        time.sleep(random.uniform(0, 0.0005))
    over.set()
    for thread in dumpers:
        thread.join()
    assert len(seen) >= DUMPS
    assert all(iteration == first == second for iteration, first, second in seen)
    assert len({iteration for iteration, _, _ in seen}) == len(seen)


def dump_until(dump_guard: EmergencyDump, over: threading.Event) -> None:
    while not over.is_set():
        dump_guard.dump("stress", wait_seconds=0.01)


def test_blocked_in_a_collective(tmp_path: Path) -> None:
    """Two ranks wait for a third: SIGTERM to one of them, and then the end of the third, which both learn of."""
    with ranks(tmp_path, gloo=True, size=3, faults={"2": "waits"}, liveness={"sigterm_grace_seconds": 0.5}) as job:
        job.wait_for(2, "waits")
        job.wait_for(0, "reduces", 6)  # else it follows the signal at the end of its fifth step
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
    with ranks(tmp_path, size=1, step_seconds=0.2) as job:
        job.wait_for(0, "step", 2)
        job.signal(0, signal.SIGTERM)
        assert job.status(0) == 0
        assert job.notes(0, "dump") == []


def test_sigterm_in_a_step_longer_than_the_grace_loses_nothing(tmp_path: Path) -> None:
    """The update waits for the dump that had begun, and then the group's own way of leaving is taken."""
    options = {"size": 1, "liveness": {"sigterm_grace_seconds": 0.3}, "dump_seconds": 0.5}
    with ranks(tmp_path, **options, faults={"0": "waits for a dump"}, fault_iteration=1) as job:
        job.wait_for(0, "waits for a dump")
        job.signal(0, signal.SIGTERM)
        assert job.status(0) == 0
        (dumped,), (_, updated) = job.notes(0, "dump"), job.notes(0, "update")
        assert (dumped["iteration"], updated["iteration"]) == (1, 2)
        assert updated["at"] > dumped["at"]
        assert job.notes(0, "step")[-1]["iteration"] == 2


def test_sigterm_in_an_update_waits_for_its_end_or_refuses(tmp_path: Path) -> None:
    options = {"size": 1, "update_until": "not dumped", "liveness": {"sigterm_grace_seconds": 0.3}}
    with ranks(tmp_path, **options) as job:
        job.wait_for(0, "update", 1)
        job.signal(0, signal.SIGTERM)
        assert "half of it" in job.wait_for(0, "not dumped")["message"]
        assert job.status(0) == 0


def test_after_a_dump_that_took_longer_than_the_grace_a_step_has_the_whole_grace_again() -> None:
    """The step that waited for the dump ends right after it: it is not dumped as one that does not end."""
    ended, dumped = threading.Event(), list[tuple[int, float]]()

    def dump(iteration: int) -> None:
        time.sleep(2 * GRACE_SECONDS)
        dumped.append((iteration, time.monotonic()))

    def report(kind: str, message: str, iteration: int | None, level: int) -> None:
        if iteration == 1:
            dump_guard.end_update(2)
        else:
            ended.set()

    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    dump_guard = EmergencyDump(dump, report, GRACE_SECONDS)
    try:
        dump_guard.watch_sigterm()
        dump_guard.end_update(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(WAIT_SECONDS)
        (_, first), (again, second) = dumped
        assert again == 2
        assert second - first >= 3 * GRACE_SECONDS  # of which the dump itself takes two
    finally:
        dump_guard.close()
        signal.signal(signal.SIGTERM, before)


def test_a_child_that_dies_does_not_disturb_a_dump() -> None:
    """Torch's handler raises where a loader's worker has died, wherever the main thread is."""

    def raises(number: int, frame: FrameType | None) -> None:
        raise RuntimeError("a worker is killed")

    before = signal.signal(signal.SIGCHLD, raises)
    try:
        with undisturbed():
            os.kill(os.getpid(), signal.SIGCHLD)
            recorder = Recorder()
            dump_guard = emergency_dump(recorder)
            dump_guard.end_update(7)
            assert dump_guard.dump("a worker is dead")
        with pytest.raises(RuntimeError, match="a worker is killed"):
            os.kill(os.getpid(), signal.SIGCHLD)
    finally:
        signal.signal(signal.SIGCHLD, before)
