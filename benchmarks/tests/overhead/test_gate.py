"""Between a real learner and its pace: nothing is learned while the gate is shut."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from cpsr.benchmarks.overhead.gate import Gate
from cpsr.checkpoint.store import CheckpointStore
from cpsr.learning.learner import BudgetPace, Learner
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import History
from tests.checkpoint.conftest import save

PATIENCE_SECONDS = 10.0


class Reader(LinePredictor):
    """Learns which iterations there are, in two slices."""

    known: tuple[int, ...] = ()

    def learn(self, history: History) -> Iterator[None]:
        yield
        yield
        self.known = tuple(entry.iteration for entry in history.entries)


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    store = CheckpointStore(tmp_path, 0, 1, "run", 1, fsync=False)
    store.prepare()
    save(store, 10)
    save(store, 20)
    learner = Learner(Reader(), BudgetPace(1.0))
    learner.start(store, 0)
    yield learner
    learner.close()


def test_nothing_is_learned_while_it_is_shut_and_the_newest_when_it_opens(learner: Learner) -> None:
    predictor, pace = cast(Reader, learner._predictor), learner._pace

    def shut() -> None:
        learner.notify(10, 0)
        time.sleep(0.3)
        assert predictor.known == ()

    def opened() -> None:
        learner.notify(20, 0)  # as every step does, of the newest checkpoint
        deadline = time.monotonic() + PATIENCE_SECONDS
        while predictor.known != (10, 20):
            assert time.monotonic() < deadline, predictor.known
            time.sleep(0.01)

    with Gate(learner) as gate:
        assert gate.timed(shut, working=False) >= 0.3
        gate.timed(opened, working=True)
    assert learner._pace is pace


def test_a_life_may_end_while_it_is_shut(learner: Learner) -> None:
    gate = Gate(learner)
    gate.__enter__()
    gate.timed(lambda: learner.notify(10, 0), working=False)
    learner.close()
    assert learner._thread is not None
    assert not learner._thread.is_alive()
