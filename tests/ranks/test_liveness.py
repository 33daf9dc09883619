"""Ranks that are stopped, hang, or have ended are noticed, all leave, and nothing healthy is."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from cpsr.config import RanksConfig
from cpsr.ranks.courier import Courier
from cpsr.ranks.emergency_dump import LEFT_EXIT_STATUS
from cpsr.ranks.heartbeat import Heartbeat, HeartbeatFiles, Phase
from cpsr.ranks.link import Report
from cpsr.ranks.liveness import BEAT_SECONDS, NOTICE_SECONDS, Liveness
from tests.ranks.dumping_ranks import Ranks, boards, ranks, until

HEARTBEAT_SECONDS = 1.5
STEP_SECONDS = 1.0
# From the end of a timeout to that of the process, on a busy machine; the timeout itself must have passed.
LATE_SECONDS = 5.0
WAIT_SECONDS = 60.0
# After so long rank 0 has seen the locks of the others: only then their end shows.
SEEN_SECONDS = 2 * BEAT_SECONDS
HEARD = {"heartbeat_timeout_seconds": HEARTBEAT_SECONDS}
MOVING = {"heartbeat_timeout_seconds": 10.0, "step_timeout_seconds": STEP_SECONDS}


def all_hang(job: Ranks, size: int) -> float:
    """Waits until all ranks hang and watch one another; returns the time."""
    for rank in range(size):
        job.wait_for(rank, "hangs")
    time.sleep(SEEN_SECONDS)
    return time.monotonic()


def left(job: Ranks, rank: int) -> str:
    """Why a rank has left, and that it left as it should."""
    assert job.status(rank) == LEFT_EXIT_STATUS
    (note,) = job.notes(rank, "left")
    return str(note["message"])


@pytest.mark.parametrize(("machines", "stopped"), [(1, 0), (1, 1), (3, 0), (3, 1)])
def test_a_stopped_rank_is_left_and_leaves_when_it_goes_on(tmp_path: Path, machines: int, stopped: int) -> None:
    other = 1 - stopped
    with ranks(tmp_path, liveness=HEARD, size=3, machines=machines) as job:
        job.wait_for(stopped, "step", 3)
        for rank in (other, 2):
            job.wait_for(rank, "step", 1)
        steps = {rank: job.notes(rank, "step")[-1]["iteration"] for rank in (other, 2)}
        job.signal(stopped, signal.SIGSTOP)
        since = time.monotonic()
        for rank in (other, 2):
            reason = left(job, rank)
            assert f"rank {stopped}" in reason
            (dump,) = job.notes(rank, "dump")
            # The loop goes on beside the dump: how far depends on the load.
            assert steps[rank] <= dump["iteration"] <= job.notes(rank, "step")[-1]["iteration"] + 1
        assert time.monotonic() - since > 0.7 * HEARTBEAT_SECONDS  # a beat of its own may have been seen late
        assert time.monotonic() - since < HEARTBEAT_SECONDS + LATE_SECONDS
        assert job.running(stopped)

        job.signal(stopped, signal.SIGCONT)
        assert "has given up this rank" in left(job, stopped)
        assert job.notes(stopped, "dump") == []
        assert "was stopped for a while" in job.notes(stopped, "not dumped")[0]["message"]


def test_a_rank_that_goes_on_in_the_next_life_leaves_no_trace(tmp_path: Path) -> None:
    with ranks(tmp_path, liveness=HEARD) as job:
        job.wait_for(1, "step", 3)
        job.signal(1, signal.SIGSTOP)
        left(job, 0)
        with ranks(tmp_path, liveness=HEARD, life=1) as following:
            following.wait_for(1, "step", 3)
            job.signal(1, signal.SIGCONT)
            assert "life 1 has begun" in left(job, 1)
            assert job.notes(1, "dump") == []
            assert [path.name for path in (tmp_path / "progress").iterdir()] == ["life-00001"]
            count = len(following.notes(1, "step"))
            following.wait_for(1, "step", count + 20)
            assert following.running(0)
            assert following.running(1)


@pytest.mark.parametrize(("fault", "named"), [("waits", "rank 1 is behind"), ("waits as others do", "one place")])
def test_a_hanging_rank_is_named(tmp_path: Path, fault: str, named: str) -> None:
    faults = {"1": fault, "0": "waits as others do", "2": "waits as others do"}
    with ranks(tmp_path, liveness=MOVING, faults=faults, size=3) as job:
        assert named in left(job, 0)
        assert "rank 0 has given up" in left(job, 1)
        assert "rank 0 has given up" in left(job, 2)
        assert "< fault (dumping_ranks.py:" in left(job, 1)  # where its training thread stood
        assert [job.notes(rank, "dump")[0]["iteration"] for rank in range(3)] == [5, 5, 5]


def test_no_alarm_where_nothing_is_wrong(tmp_path: Path) -> None:
    """A save longer than the timeouts that others wait for, long steps after it, a rank that ends before the others."""
    faults = {"0": "waits as others do", "1": "saves", "2": "ends"}
    liveness = {"heartbeat_timeout_seconds": 1.5, "step_timeout_seconds": 1.5}
    with ranks(tmp_path, liveness=liveness, faults=faults, step_seconds=0.4, size=3) as job:
        assert job.status(2) == 0
        job.wait_for(1, "step", 8)
        assert job.notes(0, "left") == job.notes(1, "left") == []
        assert job.running(0)
        assert job.running(1)


def test_who_hangs_when_another_is_killed_dumps_and_leaves(tmp_path: Path) -> None:
    with ranks(tmp_path, size=3, faults=dict.fromkeys("012", "hangs")) as job:
        killed = all_hang(job, 3)
        job.signal(1, signal.SIGKILL)
        for rank in (0, 2):
            left(job, rank)
            assert [note["iteration"] for note in job.notes(rank, "dump")] == [5]
            assert job.notes(rank, "dump")[0]["at"] - killed < NOTICE_SECONDS + LATE_SECONDS
        # One has noticed it by itself, and the other as well, or has read that in a heartbeat.
        reasons = [left(job, rank) for rank in (0, 2)]
        assert any("the process of rank 1 has ended" in reason for reason in reasons)
        assert all("process of rank 1 has" in reason or "given up rank 1" in reason for reason in reasons)


def test_a_child_that_outlives_a_rank_does_not_hide_its_end(tmp_path: Path) -> None:
    with ranks(tmp_path, faults={"0": "waits", "1": "forks"}) as job:
        job.wait_for(0, "waits")
        child = job.wait_for(1, "forked")["pid"]
        time.sleep(SEEN_SECONDS)
        try:
            job.signal(1, signal.SIGKILL)
            assert "the process of rank 1 has ended" in left(job, 0)
            assert [note["iteration"] for note in job.notes(0, "dump")] == [5]
            assert psutil.pid_exists(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_training_thread_that_raises_dumps_once_and_by_itself(tmp_path: Path) -> None:
    with ranks(tmp_path, gloo=True, faults={"1": "hangs"}, dump_seconds=NOTICE_SECONDS + 2.0) as job:
        job.wait_for(1, "hangs")
        job.signal(1, signal.SIGKILL)
        assert job.status(0) == 1
        assert [note["iteration"] for note in job.notes(0, "dump")] == [5]
        assert job.notes(0, "left") == []


def test_ranks_that_end_in_good_order_at_different_times_cause_no_alarm(tmp_path: Path) -> None:
    faults = {"0": "ends", "1": "saves", "2": "ends"}
    with ranks(tmp_path, size=4, faults=faults, iterations=100) as job:
        assert [job.status(rank) for rank in range(4)] == [0] * 4
        assert all(job.notes(rank, "left") == job.notes(rank, "dump") == [] for rank in range(4))


def test_a_killed_rank_is_noticed_on_its_machine_and_left_on_all(tmp_path: Path) -> None:
    with ranks(tmp_path, size=6, machines=3, faults=dict.fromkeys("012345", "hangs")) as job:
        killed = all_hang(job, 6)
        job.signal(2, signal.SIGKILL)
        for rank in (0, 1, 3, 4, 5):
            left(job, rank)
            assert job.notes(rank, "dump")[0]["at"] - killed < NOTICE_SECONDS + LATE_SECONDS
        assert "the process of rank 2 has ended" in left(job, 3)


def test_a_machine_whose_processes_all_end_is_noticed_as_fast(tmp_path: Path) -> None:
    with ranks(tmp_path, size=4, machines=2, faults=dict.fromkeys("0123", "hangs")) as job:
        killed = all_hang(job, 4)
        for rank in (2, 3):
            job.signal(rank, signal.SIGKILL)
        for rank in (0, 1):
            left(job, rank)
            assert job.notes(rank, "dump")[0]["at"] - killed < NOTICE_SECONDS + LATE_SECONDS
        assert "the process of rank 2 has ended" in left(job, 0)


# The watch itself, without processes


class Watch:
    """Some ranks of one process, whose threads are not started: they check when the test calls `look`."""

    def __init__(self, directory: Path, size: int, machines: int = 1, life: int = 0, **config: float | None) -> None:
        self.events: list[str] = []
        settings = RanksConfig(**config)  # type: ignore[arg-type]
        all_boards = boards(size, machines)
        self.ranks = [
            Liveness(directory, life, board, settings, lambda why: None, lambda *event: self.events.append(event[1]))
            for board in all_boards
        ]
        self.files = HeartbeatFiles(directory, life)
        self.couriers = [
            Courier(self.files, board, lambda *event: self.events.append(event[1])) for board in all_boards
        ]
        for courier in self.couriers:
            courier.start(Heartbeat())

    def say(self, rank: int, heartbeat: Heartbeat) -> None:
        """As the thread of another rank."""
        self.couriers[rank].beat(heartbeat)
        self.couriers[rank].carry(())

    def look(self, rank: int, elapsed_seconds: float) -> str | None:
        given_up = self.ranks[rank].check(elapsed_seconds)
        return None if given_up is None else given_up.reason

    def holds(self, rank: int) -> bool:
        """Whether rank 0 sees the lock of another one."""
        return bool(self.couriers[0].is_held(self.couriers[0].process_of(rank)))


@pytest.mark.parametrize("machines", [1, 2])
def test_a_pause_of_the_watcher_says_nothing_of_the_others(tmp_path: Path, machines: int) -> None:
    watch = Watch(tmp_path, 2, machines, heartbeat_timeout_seconds=60.0)
    assert watch.look(0, 1.0) is None
    assert watch.look(0, 3600.0) is None  # the machine was suspended: both ranks of it were
    assert all(watch.look(0, 1.0) is None for _ in range(40))
    assert "rank 1 sent no heartbeat" in str([watch.look(0, 1.0) for _ in range(10)][-1])


def test_locks_that_stay_on_one_machine_end_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS mounted with `nolock`: another machine finds the file of a healthy one unlocked."""
    monkeypatch.setattr("cpsr.ranks.liveness.NOTICE_SECONDS", 0.0)
    watch = Watch(tmp_path, 2, 2, heartbeat_timeout_seconds=60.0)
    os.close(watch.files.hold(1))
    watch.say(1, Heartbeat(1))
    assert watch.look(0, 1.0) is None
    watch.say(1, Heartbeat(2))
    assert all(watch.look(0, 1.0) is None for _ in range(40))  # it beats late
    assert "rank 1 sent no heartbeat" in str([watch.look(0, 1.0) for _ in range(30)][-1])


@pytest.mark.parametrize("machines", [1, 2])
def test_a_rank_that_is_silent_for_some_seconds_is_known_before_it_is_given_up(tmp_path: Path, machines: int) -> None:
    """Where a collective times out sooner than heartbeats do, its launcher need not wait for it."""
    watch = Watch(tmp_path, 2, machines, heartbeat_timeout_seconds=60.0)
    watch.say(1, Heartbeat(1))
    assert all(watch.look(0, 1.0) is None for _ in range(4))
    assert watch.ranks[0].silent_rank() is None
    assert all(watch.look(0, 1.0) is None for _ in range(4))
    assert watch.ranks[0].silent_rank() == 1
    watch.say(1, Heartbeat(2))
    assert watch.look(0, 1.0) is None
    assert watch.ranks[0].silent_rank() is None


def test_ranks_leave_where_their_launcher_has_lost_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Report(tmp_path / "launcher")
    launcher.clear()
    monkeypatch.setattr("cpsr.ranks.link._directory", tmp_path / "launcher")
    watch = Watch(tmp_path, 2, 2, heartbeat_timeout_seconds=60.0)
    assert watch.look(0, 1.0) is None
    launcher.lose("machine-1")
    assert watch.look(0, 1.0) == "the launcher has lost machine-1"


def _hold(courier: Courier) -> None:
    courier.hold()
    time.sleep(WAIT_SECONDS)


@pytest.mark.parametrize("machines", [1, 2])
def test_a_rank_that_beats_without_its_lock_is_judged_by_its_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machines: int
) -> None:
    """A script that copies the run directory closes the file of the machine, and with it the lock."""
    monkeypatch.setattr("cpsr.ranks.liveness.NOTICE_SECONDS", 3600.0)
    watch = Watch(tmp_path, 2, machines, heartbeat_timeout_seconds=60.0)
    locked = multiprocessing.get_context("fork").Process(target=_hold, args=(watch.couriers[1],))
    locked.start()
    until(lambda: watch.holds(1), lambda: "no lock")
    assert watch.look(0, 1.0) is None
    locked.kill()
    locked.join()
    assert watch.look(0, 1.0) is None  # the first late beat
    watch.say(1, Heartbeat(1))
    assert watch.look(0, 1.0) is None
    monkeypatch.setattr("cpsr.ranks.liveness.NOTICE_SECONDS", 0.0)
    assert all(watch.look(0, 1.0) is None for _ in range(20))


def test_one_rank_of_a_machine_carries_and_another_takes_its_place(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 4, 2, heartbeat_timeout_seconds=60.0)
    file = tmp_path / "progress" / "life-00000" / "machine-00002"
    carried = set()
    for _ in range(5):
        for rank in range(4):
            before = file.read_bytes()
            assert watch.look(rank, 1.0) is None
            if file.read_bytes() != before:
                carried.add(rank)
    assert carried == {2}
    reasons = dict[int, str]()  # it is stopped: the others leave because of it alone
    for _ in range(80):
        for rank in (0, 1, 3):
            reason = None if rank in reasons else watch.look(rank, 1.0)
            if reason is not None:
                reasons[rank] = reason
    assert reasons == dict.fromkeys((0, 3), reasons[0])
    assert "rank 2 sent no heartbeat" in reasons[0]


def test_who_writes_for_its_machine_is_not_kept_by_beats_that_come_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On slow storage the others beat within each write: a rank that wrote again for each would seem to be stopped."""
    watch = Watch(tmp_path, 4, 2, heartbeat_timeout_seconds=60.0)
    written = list[bytes]()

    def slowly(files: HeartbeatFiles, machine: int, data: bytes) -> None:
        written.append(data)
        assert len(written) < 10
        watch.couriers[3].beat(Heartbeat(len(written)))

    monkeypatch.setattr(HeartbeatFiles, "write", slowly)
    assert watch.look(2, 1.0) is None
    assert len(written) == 1
    watch.couriers[2].announce(Heartbeat(9, phase=Phase.ENDED))
    assert len(written) == 1 + 2


def test_what_an_interrupted_carrier_writes_late_is_no_beat(tmp_path: Path) -> None:
    """A process that was stopped between reading the board and writing the file writes an older beat."""
    watch = Watch(tmp_path, 2, 2, heartbeat_timeout_seconds=60.0)
    file = tmp_path / "progress" / "life-00000" / "machine-00001"
    watch.say(1, Heartbeat(1))
    old = file.read_bytes()
    watch.say(1, Heartbeat(2))
    reasons = []
    for late in (old, file.read_bytes()) * 31:
        file.write_bytes(late)
        reasons.append(watch.look(0, 1.0))
    assert reasons[:60] == [None] * 60
    assert "rank 1 sent no heartbeat" in str(reasons[-1])


def test_steps_are_awaited_from_the_first_on_and_not_by_busy_ranks(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 2, heartbeat_timeout_seconds=None, step_timeout_seconds=4.0)
    first = watch.ranks[0]
    assert all(watch.look(0, 1.0) is None for _ in range(10))  # compiling, restoring
    first.step(7)
    with first.busy():
        assert all(watch.look(0, 1.0) is None for _ in range(10))
    watch.say(1, Heartbeat(1, 7, 0, Phase.BUSY))
    assert all(watch.look(0, 1.0) is None for _ in range(10))
    watch.say(1, Heartbeat(2, 7, 1, Phase.TRAINING))
    reasons = [watch.look(0, 1.0) for _ in range(6)]
    assert reasons[:4] == [None] * 4
    assert "rank 0 is behind the others, in the step after iteration 7" in str(reasons[-1])
