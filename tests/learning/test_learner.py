"""The learner's thread, over real checkpoints on disk."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cpsr.benchmarks.harness.checkpoint_files import remove_checkpoint, slices_in
from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.store import CheckpointStore
from cpsr.learning import learner as module
from cpsr.learning.bubbles import Bubbles
from cpsr.learning.learner import Learner
from cpsr.learning.pace import Pace
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import History
from tests.checkpoint.conftest import make_snapshot, save
from tests.learning.accounts import account_of

PATIENCE_SECONDS = 10.0
LIMIT_SECONDS = 0.2


class Reader(LinePredictor):
    """Learns which iterations there are, three slices a checkpoint; waits in the second, or in the last."""

    def __init__(self, fails_at: int | None = None, *, waits_last: bool = False) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.waits_last = waits_last
        self.waiting = threading.Event()
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
        if not self.waits_last:
            self._wait()
        yield
        if self.waits_last:
            self._wait()
        self.known = known
        self.taken_in.append(known)

    def _wait(self) -> None:
        self.waiting.set()
        assert self.go_on.wait(PATIENCE_SECONDS)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"known": self.known}


class Computing(LinePredictor):
    """Multiplies large matrices in its only slice."""

    def __init__(self) -> None:
        super().__init__()
        self.done = threading.Event()
        self.threads = 0
        self.others_share = 0.0

    def learn(self, history: History) -> Iterator[None]:
        self.threads = torch.get_num_threads()
        self.others_share = others_share()
        self.done.set()
        yield


def others_share() -> float:
    """CPU time of other threads over this one's own, while this one computes as the predictor does."""
    wide = torch.ones(16, 1 << 18, dtype=torch.float64)
    weights = torch.ones(1 << 22)
    process, own = time.process_time(), time.thread_time()
    for _ in range(4):
        wide @ wide.T
        torch.sub(weights, 1.0).sum()
        torch.nn.functional.linear(weights.view(512, -1), weights.view(-1, 8192)[:64])
    own = time.thread_time() - own
    return (time.process_time() - process - own) / own


@pytest.fixture
def two_threads() -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(usual)


@pytest.fixture
def filled(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path, 0, 1, "run", 1)
    store.prepare()
    for iteration in (10, 20, 30):
        save(store, iteration)
    return store


def _wait_for(predictor: Reader, known: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while predictor.known != known:
        assert time.monotonic() < deadline, predictor.known
        time.sleep(0.01)


def _failure_of(learner: Learner) -> str:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (failure := learner.failure()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return failure


def in_a_slice(filled: CheckpointStore, predictor: Reader, newest: int, pace: float = 1.0) -> Learner:
    """A learner in the middle of a slice, which holds the predictor until `predictor.go_on` is set."""
    learner = Learner(predictor)
    learner.start(filled, slices_in(filled.directory), Pace(Bubbles(), pace))
    predictor.go_on.clear()
    learner.notify(newest, 0)
    assert predictor.begun.wait(PATIENCE_SECONDS)
    return learner


def test_takes_in_what_was_committed(filled: CheckpointStore) -> None:
    predictor = Reader()
    learner = Learner(predictor)
    learner.start(filled, slices_in(filled.directory), Pace(Bubbles(), 1.0))
    learner.notify(20, 0)
    _wait_for(predictor, [10, 20])
    learner.notify(30, 20)  # the history before iteration 20 does not lead here
    _wait_for(predictor, [20, 30])
    assert learner.state_dict()["known"] == [20, 30]
    assert learner.failure() is None
    learner.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "cpsr-learner"]


class Training(LinePredictor):
    """Takes a checkpoint in at once, and trains for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[int] = []
        self.updates = 0

    def learn(self, history: History) -> Iterator[None]:
        yield
        self.known = [*self.known, history.entries[-1].iteration]
        yield
        while True:
            self.updates = self.updates + 1
            yield


def test_a_newer_checkpoint_cuts_the_training_short_but_not_the_taking_in(filled: CheckpointStore) -> None:
    predictor = Training()
    learner = Learner(predictor)
    learner.start(filled, slices_in(filled.directory), Pace(Bubbles(), 1.0))
    for iteration in (10, 20, 30):
        learner.notify(iteration, 0)
        deadline = time.monotonic() + PATIENCE_SECONDS
        updates = predictor.updates
        while predictor.known[-1:] != [iteration] or predictor.updates < updates + 3:
            assert time.monotonic() < deadline, predictor.known
            time.sleep(0.01)
    assert predictor.known == [10, 20, 30]
    learner.close()
    assert learner.failure() is None


def test_what_this_rank_has_written_is_taken_in_once_it_is_committed(filled: CheckpointStore) -> None:
    predictor = Reader()
    learner = Learner(predictor)
    learner.start(filled, slices_in(filled.directory), Pace(Bubbles(), 1.0))
    filled.write(make_snapshot(40))
    learner.notify(40, 0)  # as on a rank that does not commit
    time.sleep(3 * module.COMMIT_POLL_SECONDS)
    assert predictor.taken_in == []
    assert filled.commit(40, PATIENCE_SECONDS, threading.Event()).committed
    _wait_for(predictor, [10, 20, 30, 40])
    learner.notify(50, 0)  # never committed
    save(filled, 60)
    learner.notify(60, 0)
    _wait_for(predictor, [10, 20, 30, 40, 60])
    learner.notify(70, 0)
    learner.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "cpsr-learner"]


GIVEN_UP: dict[str, Callable[[CheckpointStore], object]] = {
    "abandoned": lambda store: store.skip(40, "a test"),
    "gone": lambda store: remove_checkpoint(store.directory / step_name(40)),
}


@pytest.mark.parametrize("how", GIVEN_UP)
def test_a_checkpoint_that_is_given_up_is_not_waited_for(filled: CheckpointStore, how: str) -> None:
    predictor = Reader()
    learner = Learner(predictor)
    learner.start(filled, slices_in(filled.directory), Pace(Bubbles(), 1.0))
    filled.write(make_snapshot(40))
    learner.notify(40, 0)
    time.sleep(2 * module.COMMIT_POLL_SECONDS)
    assert predictor.taken_in == []
    GIVEN_UP[how](filled)
    _wait_for(predictor, [10, 20, 30])
    learner.close()


def test_what_is_under_way_is_dropped_where_somebody_else_holds_the_predictor(filled: CheckpointStore) -> None:
    predictor = Reader()
    learner = in_a_slice(filled, predictor, 20)
    threading.Timer(0.1, predictor.go_on.set).start()
    with learner.locked():
        pass
    learner.notify(30, 30)
    _wait_for(predictor, [30])
    assert predictor.taken_in == [[30]]
    learner.close()


def test_a_failure_ends_learning_and_nothing_else(filled: CheckpointStore) -> None:
    predictor = Reader(fails_at=30)
    learner = Learner(predictor)
    learner.start(filled, slices_in(filled.directory), Pace(Bubbles(), 1.0))
    learner.notify(20, 0)
    _wait_for(predictor, [10, 20])
    learner.notify(30, 0)
    failure = _failure_of(learner)
    assert "RuntimeError: no such tensor" in failure
    assert learner.failure() is None  # reported once
    assert learner.state_dict()["known"] == [10, 20]
    learner.close()


def test_a_directory_that_cannot_be_listed_is_listed_again(
    filled: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listed, refusals, slices = Path.iterdir, [1], slices_in(filled.directory)

    def refusing(path: Path) -> Iterator[Path]:
        if path == filled.directory and refusals:
            refusals.pop()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refusing)
    predictor = Reader()
    learner = Learner(predictor)
    learner.start(filled, slices, Pace(Bubbles(), 1.0))
    learner.notify(20, 0)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "learns nothing until" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    learner.notify(30, 0)
    _wait_for(predictor, [10, 20, 30])
    assert learner.failure() is None
    learner.close()


def hanging(filled: CheckpointStore, predictor: Reader) -> Learner:
    """A learner that has taken in two checkpoints, and whose slice over the third does not end."""
    learner = Learner(predictor)
    learner.start(filled, slices_in(filled.directory), Pace(Bubbles(), 1.0))
    learner.notify(20, 0)
    _wait_for(predictor, [10, 20])
    predictor.waiting.clear()
    predictor.go_on.clear()
    learner.notify(30, 0)
    assert predictor.waiting.wait(PATIENCE_SECONDS)
    return learner


def test_nobody_waits_for_a_slice_without_an_end(filled: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_LIMIT_SECONDS", LIMIT_SECONDS)
    predictor = Reader()
    learner = hanging(filled, predictor)
    thread = thread_of_learner()
    started = time.monotonic()
    assert learner.state_dict()["known"] == [10, 20]
    with learner.locked():
        predictor.known = [10]
    assert time.monotonic() - started < LIMIT_SECONDS
    time.sleep(2 * LIMIT_SECONDS)
    failure = learner.failure()
    assert failure is not None
    assert "did not end within" in failure
    assert learner.failure() is None  # reported once
    # Should the slice end after all, what it has done does not count, and the thread ends.
    predictor.go_on.set()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert predictor.known == [10]
    learner.close()


def test_with_a_pipeline_it_learns_in_bubbles_only(filled: CheckpointStore) -> None:
    predictor, bubbles = Reader(), Bubbles()
    pace = Pace(bubbles, 0.0)
    account = account_of(pace, bubbles)
    learner = Learner(predictor)
    learner.start(filled, slices_in(filled.directory), pace)
    learner.notify(30, 0)
    time.sleep(0.1)
    assert not predictor.begun.is_set()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while predictor.known != [10, 20, 30]:
        assert time.monotonic() < deadline
        with bubbles.waiting("grad"):
            time.sleep(0.03)
        bubbles.end_iteration()
    learner.notify(20, 0)  # work that has no bubble before the end
    time.sleep(0.05)
    learner.close()
    assert account.slices >= 3
    assert account.inside > account.outside
    assert not [thread for thread in threading.enumerate() if thread.name == "cpsr-learner"]


@pytest.mark.usefixtures("two_threads")
def test_it_computes_on_one_thread_and_training_on_as_many_as_before(filled: CheckpointStore) -> None:
    assert others_share() > 0.3  # training's second thread works
    predictor = Computing()
    learner = Learner(predictor)
    learner.start(filled, slices_in(filled.directory), Pace(Bubbles(), 1.0))
    learner.notify(30, 0)
    assert predictor.done.wait(PATIENCE_SECONDS)
    learner.close()
    assert predictor.threads == 1
    assert predictor.others_share < 0.1
    assert torch.get_num_threads() == 2
    assert others_share() > 0.3
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [2]  # nor does it change who computes for the first time


def thread_of_learner() -> threading.Thread:
    """The thread of the learner that was started last."""
    return [thread for thread in threading.enumerate() if thread.name == "cpsr-learner"][-1]
