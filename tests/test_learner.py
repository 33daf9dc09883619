"""The learner's thread, over real checkpoints on disk."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.store import CheckpointStore
from cpsr.learner import Learner
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import History
from tests.checkpoint.conftest import save

PATIENCE_SECONDS = 10.0


class Reader(LinePredictor):
    """Learns which iterations there are, two slices a checkpoint."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.known: list[int] = []
        self.taken_in: list[list[int]] = []
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def learn(self, history: History) -> Iterator[None]:
        known = [entry.iteration for entry in history.entries]
        self.begun.set()
        if known[-1] == self.fails_at:
            raise RuntimeError("no such tensor")
        yield
        assert self.go_on.wait(PATIENCE_SECONDS)
        yield
        self.known = known
        self.taken_in.append(known)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"known": self.known}


@pytest.fixture
def filled(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path, 0, 1, "run", 1, fsync=False)
    store.prepare()
    for iteration in (10, 20, 30):
        save(store, iteration)
    return store


def _wait_for(predictor: Reader, known: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while predictor.known != known:
        assert time.monotonic() < deadline, predictor.known
        time.sleep(0.01)


def test_takes_in_what_was_committed(filled: CheckpointStore) -> None:
    predictor = Reader()
    learner = Learner(predictor, 1.0)
    learner.start(filled.directory, 0)
    learner.notify(20, 0)
    _wait_for(predictor, [10, 20])
    learner.notify(30, 20)  # the history before iteration 20 does not lead here
    _wait_for(predictor, [20, 30])
    assert learner.state_dict()["known"] == [20, 30]
    assert learner.failure() is None
    learner.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "cpsr-learner"]


def test_what_is_under_way_is_dropped_where_somebody_else_holds_the_predictor(filled: CheckpointStore) -> None:
    predictor = Reader()
    learner = Learner(predictor, 1.0)
    learner.start(filled.directory, 0)
    predictor.go_on.clear()
    learner.notify(20, 0)
    assert predictor.begun.wait(PATIENCE_SECONDS)
    release = threading.Timer(0.1, predictor.go_on.set)  # the slice that waits holds the predictor
    release.start()
    with learner.held():
        pass
    learner.notify(30, 30)
    _wait_for(predictor, [30])
    assert predictor.taken_in == [[30]]
    learner.close()


def test_a_failure_ends_learning_and_nothing_else(filled: CheckpointStore) -> None:
    predictor = Reader(fails_at=30)
    learner = Learner(predictor, 1.0)
    learner.start(filled.directory, 0)
    learner.notify(20, 0)
    _wait_for(predictor, [10, 20])
    learner.notify(30, 0)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (failure := learner.failure()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "RuntimeError: no such tensor" in failure
    assert learner.failure() is None  # said once
    assert learner.state_dict()["known"] == [10, 20]
    learner.record({"kind": "recovery"})
    learner.close()


def test_without_a_budget_there_is_no_thread(filled: CheckpointStore) -> None:
    learner = Learner(Reader(), 0.0)
    learner.start(filled.directory, 0)
    learner.notify(20, 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "cpsr-learner"]
    learner.close()


def test_the_budget_holds(filled: CheckpointStore) -> None:
    predictor = Reader()
    learner = Learner(predictor, 0.1)
    learner.start(filled.directory, 0)
    predictor.go_on.clear()
    learner.notify(30, 0)
    assert predictor.begun.wait(PATIENCE_SECONDS)
    started = time.monotonic()
    threading.Timer(0.3, predictor.go_on.set).start()  # the second slice takes 0.3 s: 2.7 s of rest follow it
    _wait_for(predictor, [10, 20, 30])
    assert time.monotonic() - started >= 2.0
    learner.close()


def test_an_end_between_two_looks_is_not_missed(filled: CheckpointStore) -> None:
    class EndsWhenCleared(threading.Event):
        """Closing comes after the thread has woken, and before it makes ready for the next call."""

        def clear(self) -> None:
            learner._closing.set()
            self.set()
            super().clear()

    learner = Learner(Reader(), 1.0)
    learner._wake = EndsWhenCleared()
    learner.start(filled.directory, 0)
    assert learner._thread is not None
    learner.notify(20, 0)
    learner._thread.join(PATIENCE_SECONDS)
    assert not learner._thread.is_alive()
