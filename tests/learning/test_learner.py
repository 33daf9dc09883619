"""The learner's thread, over real checkpoints on disk."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cpsr.checkpoint.history import DiskHistory
from cpsr.checkpoint.manifest import COMMIT, step_name
from cpsr.checkpoint.store import CheckpointStore
from cpsr.learning import learner as module
from cpsr.learning.bubbles import Bubbles
from cpsr.learning.learner import BudgetPace, Learner
from cpsr.learning.pace import BubblePace
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import History
from tests.checkpoint.conftest import make_snapshot, refuse_asking, save

PATIENCE_SECONDS = 10.0
LIMIT_SECONDS = 0.2


class Reader(LinePredictor):
    """Learns which iterations there are, three slices a checkpoint; waits in the second, or in the last."""

    def __init__(self, fails_at: int | None = None, *, waits_last: bool = False) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.waits_last = waits_last
        self.waiting = threading.Event()
        self.mute = False
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
        if self.mute:
            raise OSError("cannot say")
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


def _failure_of(learner: Learner) -> str:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (failure := learner.failure()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return failure


def in_a_slice(filled: CheckpointStore, predictor: Reader, newest: int, pace: float = 1.0) -> Learner:
    """A learner in the middle of a slice, which holds the predictor until `predictor.go_on` is set."""
    learner = Learner(predictor, BudgetPace(pace))
    learner.start(filled, 0)
    predictor.go_on.clear()
    learner.notify(newest, 0)
    assert predictor.begun.wait(PATIENCE_SECONDS)
    return learner


def test_takes_in_what_was_committed(filled: CheckpointStore) -> None:
    predictor = Reader()
    learner = Learner(predictor, BudgetPace(1.0))
    learner.start(filled, 0)
    assert learner.changes == 0
    learner.notify(20, 0)
    _wait_for(predictor, [10, 20])
    learner.notify(30, 20)  # the history before iteration 20 does not lead here
    _wait_for(predictor, [20, 30])
    assert learner.changes == 2
    with learner.locked():
        pass  # the state may be another one now
    assert learner.changes == 3
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
    learner = Learner(predictor, BudgetPace(1.0))
    learner.start(filled, 0)
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
    learner = Learner(predictor, BudgetPace(1.0))
    learner.start(filled, 0)
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


def test_a_commit_that_is_invisible_for_a_moment_ends_nothing(
    filled: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = Reader()
    learner = Learner(predictor, BudgetPace(1.0))
    learner.start(filled, 0)
    filled.write(make_snapshot(40))
    refuse_asking(monkeypatch, filled.directory / step_name(40) / COMMIT, 9)
    learner.notify(40, 0)
    time.sleep(3 * module.COMMIT_POLL_SECONDS)
    assert learner.failure() is None
    assert predictor.taken_in == []
    assert filled.commit(40, PATIENCE_SECONDS, threading.Event()).committed
    _wait_for(predictor, [10, 20, 30, 40])
    learner.close()


GIVEN_UP: dict[str, Callable[[CheckpointStore], object]] = {
    "abandoned": lambda store: store.skip(40, "a test"),
    "gone": lambda store: shutil.rmtree(store.directory / step_name(40)),
}


@pytest.mark.parametrize("how", GIVEN_UP)
def test_a_checkpoint_that_is_given_up_is_not_waited_for(filled: CheckpointStore, how: str) -> None:
    predictor = Reader()
    learner = Learner(predictor, BudgetPace(1.0))
    learner.start(filled, 0)
    filled.write(make_snapshot(40))
    learner.notify(40, 0)
    time.sleep(2 * module.COMMIT_POLL_SECONDS)
    assert predictor.taken_in == []
    GIVEN_UP[how](filled)
    _wait_for(predictor, [10, 20, 30])
    learner.close()


def test_what_an_attempt_before_was_given_up_for_says_nothing_of_this_one(filled: CheckpointStore) -> None:
    filled.skip(40, "a test")
    filled.attempt += 1
    filled.write(make_snapshot(40))
    predictor = Reader()
    learner = Learner(predictor, BudgetPace(1.0))
    learner.start(filled, 0)
    learner.notify(40, 0)
    time.sleep(2 * module.COMMIT_POLL_SECONDS)
    assert predictor.taken_in == []
    assert filled.commit(40, PATIENCE_SECONDS, threading.Event()).committed
    _wait_for(predictor, [10, 20, 30, 40])
    learner.close()


def test_a_commit_that_does_not_come_is_looked_for_more_and_more_rarely(
    filled: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def is_settled(iteration: int) -> bool:
        asked.append(iteration)
        return False

    monkeypatch.setattr(filled, "is_settled", is_settled)
    monkeypatch.setattr(module, "COMMIT_POLL_SECONDS", 0.01)
    learner = Learner(Reader(), BudgetPace(1.0))
    learner.start(filled, 0)
    learner.notify(40, 0)
    time.sleep(0.4)
    assert 1 < len(asked) <= 6  # after 0, 10, 30, 70, 150 and 310 ms
    with learner.locked():  # another state: whether this one is committed does not matter any more
        pass
    time.sleep(0.4)
    count = len(asked)
    learner.close()
    assert len(asked) == count <= 6


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
    learner = Learner(predictor, BudgetPace(1.0))
    learner.start(filled, 0)
    learner.notify(20, 0)
    _wait_for(predictor, [10, 20])
    learner.notify(30, 0)
    failure = _failure_of(learner)
    assert "RuntimeError: no such tensor" in failure
    assert learner.failure() is None  # reported once
    assert learner.state_dict()["known"] == [10, 20]
    learner.record({"kind": "recovery"})
    learner.close()


def test_what_was_learned_is_kept_where_tidying_up_fails(
    filled: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(history: DiskHistory) -> Iterator[None]:
        yield
        raise OSError("cannot be unmapped")

    monkeypatch.setattr(DiskHistory, "close_in_pieces", fail)
    predictor = Reader()
    learner = Learner(predictor, BudgetPace(1.0))
    learner.start(filled, 0)
    learner.notify(20, 0)
    failure = _failure_of(learner)
    assert "OSError: cannot be unmapped" in failure
    assert learner.state_dict()["known"] == [10, 20]
    learner.close()


def test_a_directory_that_cannot_be_listed_is_listed_again(
    filled: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listed, refusals = Path.iterdir, [1]

    def refusing(path: Path) -> Iterator[Path]:
        if path == filled.directory and refusals:
            refusals.pop()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refusing)
    predictor = Reader()
    learner = Learner(predictor, BudgetPace(1.0))
    learner.start(filled, 0)
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
    learner = Learner(predictor, BudgetPace(1.0))
    learner.start(filled, 0)
    learner.notify(20, 0)
    _wait_for(predictor, [10, 20])
    predictor.waiting.clear()
    predictor.go_on.clear()
    learner.notify(30, 0)
    assert predictor.waiting.wait(PATIENCE_SECONDS)
    return learner


ASKED: dict[str, Callable[[Learner], object]] = {
    "locked": lambda learner: _hold(learner),
    "state_dict": lambda learner: learner.state_dict(),
    "record": lambda learner: learner.record({"kind": "recovery"}),
    "ask": lambda learner: learner.ask(lambda: None),
    "failure": lambda learner: time.sleep(2 * LIMIT_SECONDS),  # nobody else asks: a check at a step boundary reports it
}


def _hold(learner: Learner) -> None:
    with learner.locked():
        pass


def test_who_holds_the_predictor_for_long_is_waited_for(
    filled: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_LIMIT_SECONDS", LIMIT_SECONDS)
    learner = Learner(Reader(), BudgetPace(1.0))
    learner.start(filled, 0)
    other = threading.Thread(target=lambda: learner.ask(lambda: None))  # the planner
    with learner.locked():
        other.start()
        other.join(3 * LIMIT_SECONDS)
        assert other.is_alive()
    other.join(PATIENCE_SECONDS)
    assert not other.is_alive()
    assert learner.failure() is None
    learner.close()


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("waits_last", [False, True])
def test_a_slice_without_an_end_is_left_behind(
    filled: CheckpointStore, monkeypatch: pytest.MonkeyPatch, asked: str, waits_last: bool
) -> None:
    monkeypatch.setattr(module, "SLICE_LIMIT_SECONDS", LIMIT_SECONDS)
    predictor = Reader(waits_last=waits_last)
    learner = hanging(filled, predictor)
    thread = thread_of_learner()
    ASKED[asked](learner)
    failure = learner.failure()
    assert failure is not None
    assert "did not end within" in failure
    assert learner.failure() is None  # reported once
    # From here on nobody waits for it, and what was complete is there.
    started = time.monotonic()
    learner.record({"kind": "recovery"})
    assert learner.state_dict()["known"] == [10, 20]
    assert learner.state_dict()["outcomes"][-1] == {"kind": "recovery"}
    with learner.locked():
        predictor.known = [10]
    assert time.monotonic() - started < LIMIT_SECONDS
    # Should the slice end after all, what it has done does not count, and the thread ends.
    predictor.go_on.set()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert predictor.known == [10]
    learner.close()


def test_the_exit_does_not_wait_for_a_slice_without_an_end(
    filled: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_LIMIT_SECONDS", LIMIT_SECONDS)
    predictor = Reader()
    learner = hanging(filled, predictor)
    started = time.monotonic()
    learner.close()
    assert time.monotonic() - started < PATIENCE_SECONDS / 2
    thread = thread_of_learner()
    predictor.go_on.set()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


def test_a_predictor_that_cannot_be_saved_costs_the_newest_only(filled: CheckpointStore) -> None:
    predictor = Reader()
    learner = Learner(predictor, BudgetPace(1.0))
    learner.start(filled, 0)
    learner.notify(20, 0)
    _wait_for(predictor, [10, 20])
    assert learner.state_dict()["known"] == [10, 20]
    predictor.known, predictor.mute = [], True
    assert learner.state_dict()["known"] == [10, 20]
    failure = learner.failure()
    assert failure is not None
    assert "OSError: cannot say" in failure
    learner.close()


def test_an_outcome_that_is_refused_does_not_reach_training(filled: CheckpointStore) -> None:
    learner = Learner(Reader(), BudgetPace(1.0))
    learner.start(filled, 0)
    learner.record({"kind": object()})
    failure = learner.failure()
    assert failure is not None
    assert "refused the outcome" in failure
    learner.close()


def test_outcomes_that_come_while_it_learns_are_kept(filled: CheckpointStore) -> None:
    predictor = Reader()
    learner = in_a_slice(filled, predictor, 20)
    threading.Timer(0.1, predictor.go_on.set).start()
    learner.record({"kind": "recovery"})
    _wait_for(predictor, [10, 20])
    assert learner.state_dict()["outcomes"] == [{"kind": "recovery"}]
    learner.close()


def test_with_a_pipeline_it_learns_in_bubbles_only(filled: CheckpointStore) -> None:
    predictor, bubbles = Reader(), Bubbles()
    learner = Learner(predictor, BubblePace(bubbles, None, pytest.fail))
    learner.start(filled, 0)
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
    account = bubbles.account()
    assert account.slices >= 3
    assert account.outside_seconds == 0.0
    assert not [thread for thread in threading.enumerate() if thread.name == "cpsr-learner"]


def test_an_error_of_training_inside_a_bubble_leaves_no_thread(filled: CheckpointStore) -> None:
    bubbles = Bubbles()
    learner = Learner(Reader(), BubblePace(bubbles, None, pytest.fail))
    learner.start(filled, 0)
    learner.notify(30, 0)

    def train() -> None:
        with bubbles.waiting("grad"):
            raise RuntimeError("the peer is gone")

    with pytest.raises(RuntimeError, match="the peer"):
        train()
    learner.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "cpsr-learner"]


@pytest.mark.usefixtures("two_threads")
def test_it_computes_on_one_thread_and_training_on_as_many_as_before(filled: CheckpointStore) -> None:
    assert others_share() > 0.3  # training's second thread works
    predictor = Computing()
    learner = Learner(predictor, BudgetPace(1.0))
    learner.start(filled, 0)
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


@pytest.mark.usefixtures("two_threads")
def test_who_computes_for_the_first_time_after_the_start_takes_the_usual_threads(
    filled: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_num_threads = torch.set_num_threads

    def slowly(count: int) -> None:
        set_num_threads(count)
        if count == 1:
            time.sleep(0.3)

    monkeypatch.setattr(torch, "set_num_threads", slowly)
    learner = Learner(Reader(), BudgetPace(1.0))
    learner.start(filled, 0)
    time.sleep(0.1)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [2]
    learner.close()


MKL = """
import ctypes, sys
from pathlib import Path
import torch
from cpsr.checkpoint.store import CheckpointStore
from cpsr.learning.learner import BudgetPace, Learner
from cpsr.predictor.line import LinePredictor
library = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))))
dynamic = library.mkl_serv_get_dynamic if hasattr(library, "mkl_serv_get_dynamic") else lambda: None
store = CheckpointStore(Path(sys.argv[1]), 0, 1, "run", 1)
print(dynamic())
for learns in (False, True):
    learner = Learner(LinePredictor(), BudgetPace(1.0))
    learner.start(store, 0, learns=learns)
    print(dynamic())
    learner.close()
"""


def test_the_process_computes_alike_whether_it_learns_or_not(tmp_path: Path) -> None:
    """How MKL chooses its threads is of the whole process, and changed by the first setting of their number."""
    ended = subprocess.run([sys.executable, "-c", MKL, str(tmp_path)], check=True, capture_output=True, text=True)
    before, without, learning = ended.stdout.split()
    if before == "None":
        pytest.skip("this torch does not show its MKL")
    assert without == learning


def thread_of_learner() -> threading.Thread:
    """The thread of the learner that was started last."""
    return [thread for thread in threading.enumerate() if thread.name == "cpsr-learner"][-1]


def test_without_a_budget_there_is_no_thread(filled: CheckpointStore) -> None:
    learner = Learner(Reader(), None)
    learner.start(filled, 0)
    learner.notify(20, 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "cpsr-learner"]
    learner.close()


class Busy(Reader):
    """Computes for a tenth of a second in its second slice."""

    def _wait(self) -> None:
        began = time.thread_time()
        while time.thread_time() - began < 0.1:
            pass


def test_the_budget_holds(filled: CheckpointStore) -> None:
    predictor = Busy()
    learner = Learner(predictor, BudgetPace(0.05))
    learner.start(filled, 0)
    started = time.monotonic()
    learner.notify(30, 0)
    _wait_for(predictor, [10, 20, 30])  # in the third slice
    assert time.monotonic() - started >= 0.1 / 0.05
    learner.close()


def test_an_end_between_two_looks_is_not_missed(filled: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []

    class EndsWhenCleared(threading.Event):
        """Closing comes after the thread has woken, and before it makes ready for the next call."""

        def __init__(self) -> None:
            super().__init__()
            events.append(self)

        def clear(self) -> None:
            for event in events:  # those of the learner, as its `close` sets them
                event.set()
            super().clear()

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Event", EndsWhenCleared)
        learner = Learner(Reader(), BudgetPace(1.0))
    learner.start(filled, 0)
    thread = thread_of_learner()
    learner.notify(20, 0)
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
