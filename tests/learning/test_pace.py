"""When slices may run, with a thread that works and one that trains."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cpsr.learning.bubbles import Bubbles
from cpsr.learning.pace import Pace, pace_of
from tests.learning.accounts import account_of

PATIENCE_SECONDS = 10.0
WAIT_SECONDS = 0.03
SLICE_SECONDS = 0.002


class Worker:
    """Slices of 2 ms at a pace, until it is closed."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._closing = False
        self.slices = 0
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while True:
            self._pace.before_slice()
            if self._closing:
                return
            started = time.perf_counter()
            time.sleep(SLICE_SECONDS)
            self._pace.after_slice(time.perf_counter() - started, SLICE_SECONDS)
            self.slices += 1

    def close(self) -> None:
        self._closing = True
        self._pace.close()
        self.thread.join(PATIENCE_SECONDS)
        assert not self.thread.is_alive()


@pytest.fixture
def work() -> Iterator[Callable[[Pace], Worker]]:
    workers: list[Worker] = []

    def at_pace(pace: Pace) -> Worker:
        workers.append(Worker(pace))
        return workers[-1]

    yield at_pace
    for worker in workers:
        worker.close()


def train(bubbles: Bubbles, iterations: int, wait_seconds: float = WAIT_SECONDS) -> None:
    for _ in range(iterations):
        time.sleep(0.005)
        with bubbles.waiting("grad"):
            time.sleep(wait_seconds)
        bubbles.end_iteration()


def test_slices_run_in_waits_only(work: Callable[[Pace], Worker]) -> None:
    bubbles = Bubbles()
    pace = Pace(bubbles, 0.0)
    account = account_of(pace, bubbles)
    worker = work(pace)
    train(bubbles, 12)
    before = worker.slices
    assert before > 0
    time.sleep(0.1)  # no wait: no work
    assert worker.slices <= before + 1  # one may have begun in the last wait
    assert account.inside > account.outside


def test_outside_of_waits_the_budget_holds(work: Callable[[Pace], Worker]) -> None:
    bubbles = Bubbles()
    pace = Pace(bubbles, 0.1)
    account = account_of(pace, bubbles)
    worker = work(pace)
    started = time.perf_counter()
    time.sleep(0.3)
    before = worker.slices
    elapsed = time.perf_counter() - started
    # The last tenth of a second is for a slice that has just begun, on a busy machine.
    assert 0 < account.outside <= 0.1 * elapsed + 0.1
    deadline = time.monotonic() + PATIENCE_SECONDS
    while account.inside == 0 and time.monotonic() < deadline:
        train(bubbles, 1)
    assert account.inside > 0  # which the budget does not pay for
    assert worker.slices > before


def pipeline_rank(device: torch.device) -> Any:
    """What the pace asks of an adapter."""
    return SimpleNamespace(device=device, pipeline=SimpleNamespace(stage=0, stages=2), micro_batches_per_iteration=2)


def queue_receives(bubbles: Bubbles, iterations: int) -> None:
    """As over NCCL: a receive is queued for the device, and the thread goes on."""
    for _ in range(iterations):
        for _ in range(2):
            time.sleep(0.005)
            with bubbles.waiting("RecvGrad"):
                pass
        bubbles.end_iteration()


def test_a_pipeline_without_visible_waits_learns_within_the_budget(work: Callable[[Pace], Worker]) -> None:
    adapter = pipeline_rank(torch.device("cuda", 0))
    bubbles = Bubbles()
    pace = pace_of(adapter, bubbles, 0.1)
    queue_receives(bubbles, 3)
    account = account_of(pace, bubbles)
    worker = work(pace)
    started = time.perf_counter()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while worker.slices < 5 and time.monotonic() < deadline:
        queue_receives(bubbles, 1)
    elapsed = time.perf_counter() - started
    assert worker.slices >= 5
    assert account.inside < 0.1 * account.outside
    # Each slice but the last has been paid for by a pause.
    assert account.outside <= 0.1 * elapsed + 0.1


def test_a_pipeline_on_processors_learns_in_its_waits_alone() -> None:
    adapter = pipeline_rank(torch.device("cpu"))
    bubbles = Bubbles()
    queue_receives(bubbles, 2)
    pace = pace_of(adapter, bubbles, 0.1)
    threading.Timer(0.1, pace.close).start()
    started = time.monotonic()
    pace.before_slice()
    assert time.monotonic() - started > 0.05
