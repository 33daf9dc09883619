"""The end of a process is noticed at once where nothing raises, and nothing else is taken for one."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from cpsr.ranks import neighbour
from cpsr.ranks.emergency_dump import LEFT_EXIT_STATUS
from cpsr.ranks.heartbeat import NOTICE_SECONDS
from cpsr.ranks.neighbour import Neighbour
from tests.ranks.dumping_ranks import ranks, until

LATE_SECONDS = 5.0  # beyond `NOTICE_SECONDS`, on a busy machine; a heartbeat would take 300
SILENT_SECONDS = 1.0  # in which a false alarm would have come


def test_who_hangs_when_another_is_killed_dumps_and_leaves(tmp_path: Path) -> None:
    with ranks(tmp_path, neighbours=True, size=3, faults=dict.fromkeys("012", "hangs")) as job:
        for rank in range(3):
            job.wait_for(rank, "hangs")
        killed = time.monotonic()
        job.signal(1, signal.SIGKILL)
        for rank in (0, 2):
            assert job.status(rank) == LEFT_EXIT_STATUS
            assert [note["iteration"] for note in job.notes(rank, "dump")] == [5]
            assert job.notes(rank, "dump")[0]["at"] - killed < NOTICE_SECONDS + LATE_SECONDS
        # Who watches rank 1 has noticed it by itself, and a third one has read that in its heartbeat.
        assert "the process of rank 1 has ended (connection closed" in job.notes(0, "left")[0]["message"]
        assert "rank 0 has given up rank 1" in job.notes(2, "left")[0]["message"]


def test_a_child_that_outlives_a_rank_does_not_hide_its_end(tmp_path: Path) -> None:
    with ranks(tmp_path, neighbours=True, faults={"0": "waits", "1": "forks"}) as job:
        job.wait_for(0, "waits")
        child = job.wait_for(1, "forked")["pid"]
        try:
            killed = time.monotonic()
            job.signal(1, signal.SIGKILL)
            assert job.status(0) == LEFT_EXIT_STATUS
            assert [note["iteration"] for note in job.notes(0, "dump")] == [5]
            assert job.notes(0, "dump")[0]["at"] - killed < NOTICE_SECONDS + LATE_SECONDS
            assert "the process of rank 1 has ended (connection closed" in job.notes(0, "left")[0]["message"]
            assert psutil.pid_exists(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_training_thread_that_raises_dumps_once_and_by_itself(tmp_path: Path) -> None:
    with ranks(tmp_path, neighbours=True, gloo=True, faults={"1": "hangs"}, dump_seconds=NOTICE_SECONDS + 1.0) as job:
        job.wait_for(1, "hangs")
        job.signal(1, signal.SIGKILL)
        assert job.status(0) == 1
        assert [note["iteration"] for note in job.notes(0, "dump")] == [5]
        assert job.notes(0, "left") == []


def test_ranks_that_end_in_good_order_at_different_times_cause_no_alarm(tmp_path: Path) -> None:
    faults = {"0": "ends", "1": "saves", "2": "ends"}
    with ranks(tmp_path, neighbours=True, size=4, faults=faults, iterations=100) as job:
        assert [job.status(rank) for rank in range(4)] == [0] * 4
        assert all(job.notes(rank, "left") == job.notes(rank, "dump") == [] for rank in range(4))


def test_neither_a_stopped_process_nor_sigterm_causes_an_alarm(tmp_path: Path) -> None:
    with ranks(tmp_path, neighbours=True, faults={"1": "saves"}, fault_iteration=80) as job:
        job.wait_for(1, "step", 3)
        job.signal(1, signal.SIGSTOP)
        count = len(job.notes(0, "step"))
        job.wait_for(0, "step", count + 50)
        job.signal(1, signal.SIGCONT)
        job.wait_for(1, "saves")
        assert job.notes(0, "left") == job.notes(1, "left") == []
        for rank in range(2):
            job.signal(rank, signal.SIGTERM)
        assert [job.status(rank) for rank in range(2)] == [0, 0]
        assert job.notes(0, "left") == job.notes(1, "left") == []


# Ranks as threads of one process


class Meeting:
    """A `Group` among threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.parts: list[Any] = [None] * size
        self.size = size

    def of(self, rank: int) -> Any:
        meeting = self

        class Member:
            size = meeting.size

            def __init__(self) -> None:
                self.rank = rank

            def gather(self, value: Any) -> list[Any]:
                meeting.parts[rank] = value
                meeting.barrier.wait()
                return list(meeting.parts)

        return Member()


class Ring:
    """Neighbours of one process."""

    def __init__(self, size: int) -> None:
        self.lost: list[tuple[int, int, str]] = []
        meeting, made = Meeting(size), {}

        def make(rank: int) -> None:
            made[rank] = Neighbour(meeting.of(rank), lambda other, why: self.lost.append((rank, other, why)))

        threads = [threading.Thread(target=make, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.ranks = [made[rank] for rank in range(size)]
        self.ports = [part[1] for part in meeting.parts]
        until(lambda: all(established(port) for port in self.ports), lambda: "they do not connect")


@contextmanager
def ring(size: int) -> Iterator[Ring]:
    made = Ring(size)
    try:
        yield made
    finally:
        for one in made.ranks:
            one.close(ended=True)
    assert neighbour.THREAD_NAME not in [thread.name for thread in threading.enumerate()]
    assert not any(established(port) for port in made.ports)


def established(port: int) -> list[int]:
    """The sockets of a port's owner on which somebody is connected."""
    connections = psutil.Process().net_connections("tcp")
    return [one.fd for one in connections if one.laddr and one.laddr.port == port and one.status == "ESTABLISHED"]


def break_connections(port: int) -> None:
    """As a network does that forgets a connection; both processes live on."""
    for descriptor in established(port):
        with socket.socket(fileno=os.dup(descriptor)) as one:
            one.shutdown(socket.SHUT_RDWR)


def test_a_broken_connection_is_made_again() -> None:
    with ring(3) as made:
        for _ in range(3):
            before = established(made.ports[1])
            assert before
            break_connections(made.ports[1])
            until(lambda: bool(established(made.ports[1])), lambda: "no new connection")
        time.sleep(SILENT_SECONDS)
        assert made.lost == []
        made.ranks[1].close(ended=False)  # as its end: it is still watched
        until(lambda: bool(made.lost), lambda: "not noticed")
        ((watcher, lost, why),) = made.lost
        assert (watcher, lost) == (0, 1)
        assert "connection closed, a new one refused" in why


def test_who_has_said_that_it_ends_is_not_lost() -> None:
    with ring(3) as made:
        made.ranks[1].close(ended=True)
        made.ranks[1].close(ended=True)
        time.sleep(SILENT_SECONDS)
        made.ranks[0].close(ended=True)
        time.sleep(SILENT_SECONDS)
        assert made.lost == []


def test_who_cannot_be_reached_is_left_to_heartbeats(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(neighbour, "RETRY_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    class Member:
        rank, size = 0, 2

        def gather(self, value: Any) -> list[Any]:
            return [value, [["127.0.0.1"], port, bytes(neighbour.HELLO_BYTES).hex()]]

    lost: list[int] = []
    one = Neighbour(Member(), lambda rank, why: lost.append(rank))  # type: ignore[arg-type]
    until(lambda: "rank 1 cannot be reached at 127.0.0.1" in caplog.text, lambda: caplog.text)
    one.close(ended=True)
    assert lost == []
