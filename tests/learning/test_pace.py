"""When slices may run, with a thread that works and one that trains."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cpsr.engines import TorchAdapter
from cpsr.engines.adapter import Stage
from cpsr.learning import pace as module
from cpsr.learning.bubbles import BubbleAccount, Bubbles
from cpsr.learning.learner import BudgetPace, Pace
from cpsr.learning.pace import BubblePace, bubbles_of, pace_of
from cpsr.learning.pipeline_schedule import RECEIVE_GRADIENT

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
    worker = work(BubblePace(bubbles, None, pytest.fail))
    train(bubbles, 12)
    time.sleep(0.1)  # no wait: no work
    account = bubbles.account()
    assert account.slices == worker.slices > 0
    assert account.outside_seconds == 0.0
    assert account.used_seconds > account.late_seconds
    worker.close()
    assert bubbles.account() == account


def test_a_wait_too_short_for_any_slice_is_reported_once(
    work: Callable[[Pace], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STARVED_SECONDS", 0.05)
    messages: list[str] = []
    bubbles = Bubbles()
    worker = work(BubblePace(bubbles, None, messages.append))
    time.sleep(0.12)
    assert messages == []  # training has not begun
    train(bubbles, 40, wait_seconds=0.0)
    assert worker.slices == 0
    assert len(messages) == 1
    assert "a slice should take 5.0 ms" in messages[0]


def test_one_freak_among_many_slices_is_not_expected_again() -> None:
    bubbles = Bubbles()
    train(bubbles, 4)
    pace = BubblePace(bubbles, None, pytest.fail)
    for seconds in [60.0, *[SLICE_SECONDS] * (module.RECENT_SLICES - 1)]:
        pace.after_slice(seconds, seconds)
    with bubbles.waiting("grad"):
        started = time.monotonic()
        pace.before_slice()
        assert time.monotonic() - started < WAIT_SECONDS


@pytest.mark.parametrize(
    ("longest", "expected"),
    [
        ([], [SLICE_SECONDS]),
        ([60.0], [SLICE_SECONDS]),  # but one
        ([60.0, 60.0], [60.0, SLICE_SECONDS]),
        ([50.0, 55.0, 60.0], [55.0, 50.0, SLICE_SECONDS]),
    ],
)
def test_every_round_without_work_makes_the_expected_slice_shorter(longest: list[float], expected: list[float]) -> None:
    class TooShort(Bubbles):
        """No bubble has room; between two attempts training goes on for long."""

        def entered(self, needed_seconds: float, timeout_seconds: float, spared_share: float = 0.0) -> None:
            found.append(needed_seconds)
            if len(found) == len(expected):
                pace.close()

        def account(self) -> BubbleAccount:
            return replace(super().account(), iterations=len(found) * module.STARVED_ITERATIONS)

    found: list[float] = []
    pace = BubblePace(TooShort(), None, pytest.fail)
    for seconds in [*[SLICE_SECONDS] * module.RECENT_SLICES, *longest]:
        pace.after_slice(seconds, seconds)
    pace.before_slice()
    assert found == expected


def test_a_delayed_thread_does_not_change_the_expected_duration() -> None:
    pace = BubblePace(Bubbles(), None, pytest.fail)
    for _ in range(3):
        pace.after_slice(SLICE_SECONDS, SLICE_SECONDS)
    pace.after_slice(60.0, SLICE_SECONDS)
    assert pace.expected_seconds() == SLICE_SECONDS
    for _ in range(5):
        pace.after_slice(3 * SLICE_SECONDS, SLICE_SECONDS)  # a slow disk, every time
    assert pace.expected_seconds() == pytest.approx(3 * SLICE_SECONDS)


def test_the_end_of_a_wait_is_not_counted_upon() -> None:
    admitted: list[float | None] = []

    class Noting(Bubbles):
        def entered(self, *seconds: float) -> float | None:
            admitted.append(super().entered(*seconds))
            return admitted[-1]

    bubbles = Noting()
    train(bubbles, 4)
    pace = BubblePace(bubbles, None, pytest.fail)
    pace.after_slice(SLICE_SECONDS, SLICE_SECONDS)
    with bubbles.waiting("grad"):
        room = bubbles.remaining_seconds()
        assert bubbles.entered(0.5 * room, 0.0, module.SPARED_SHARE) is not None
        assert bubbles.entered(0.9 * room, 0.0, module.SPARED_SHARE) is None
        time.sleep(room - 0.2 * WAIT_SECONDS)
        threading.Timer(0.1, pace.close).start()
        admitted.clear()
        pace.before_slice()
        assert set(admitted) == {None}


@pytest.mark.parametrize("lengths", [[60.0], [SLICE_SECONDS, 60.0]])
def test_one_long_slice_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch, lengths: list[float]) -> None:
    monkeypatch.setattr(module, "STARVED_SECONDS", 0.05)
    bubbles = Bubbles()
    train(bubbles, 4)
    pace = BubblePace(bubbles, None, pytest.fail)
    for seconds in lengths:
        pace.after_slice(seconds, seconds)
    found = threading.Event()

    def wait() -> None:
        pace.before_slice()
        found.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not found.is_set() and time.monotonic() < deadline:
        train(bubbles, 1)
    assert found.is_set()
    pace.close()
    waiter.join(PATIENCE_SECONDS)


def test_outside_of_waits_the_budget_holds(work: Callable[[Pace], Worker]) -> None:
    bubbles = Bubbles()
    worker = work(BubblePace(bubbles, BudgetPace(0.1), pytest.fail))
    started = time.perf_counter()
    time.sleep(0.3)
    before = worker.slices
    elapsed = time.perf_counter() - started
    # The last tenth of a second is for a slice that has just begun, on a busy machine.
    assert 0 < bubbles.account().outside_seconds <= 0.1 * elapsed + 0.1
    deadline = time.monotonic() + PATIENCE_SECONDS
    while bubbles.account().used_seconds == 0 and time.monotonic() < deadline:
        train(bubbles, 1)
    assert bubbles.account().used_seconds > 0  # which the budget does not pay for
    assert worker.slices > before


def test_the_budget_pays_for_what_ran_late() -> None:
    bubbles, outside = Bubbles(), BudgetPace(0.5)
    train(bubbles, 4)
    pace = BubblePace(bubbles, outside, pytest.fail)
    with bubbles.waiting("grad"):
        time.sleep(0.01)
        pace.after_slice(0.005, 0.005)
        assert outside.rest_seconds() == 0.0
        time.sleep(0.01)
    time.sleep(0.05)
    pace.after_slice(0.055, 0.055)
    assert 0.02 < outside.rest_seconds() <= 0.055


def test_the_budget_rests_and_can_be_closed() -> None:
    pace = BudgetPace(0.01)
    pace.before_slice()
    pace.after_slice(1.0, 1.0)
    assert 98.0 < pace.rest_seconds() <= 99.0
    threading.Timer(0.05, pace.close).start()
    started = time.monotonic()
    pace.before_slice()
    assert 0.04 < time.monotonic() - started < PATIENCE_SECONDS


def test_the_budget_pays_for_the_processor_alone() -> None:
    budget = BudgetPace(0.01)
    budget.after_slice(60.0, 0.1)  # descheduled, or a disk that hangs: long paid for
    assert budget.rest_seconds() == 0.0
    bubbles, outside = Bubbles(), BudgetPace(0.01)
    pace = BubblePace(bubbles, outside, pytest.fail)
    time.sleep(0.02)
    pace.after_slice(0.02, 0.01)
    assert 0.9 < outside.rest_seconds() <= 0.98


def test_the_budget_pays_for_no_more_than_ran_late() -> None:
    bubbles, outside = Bubbles(), BudgetPace(0.1)
    train(bubbles, 4)
    pace = BubblePace(bubbles, outside, pytest.fail)
    with bubbles.waiting("grad"):
        time.sleep(0.05)
    pace.after_slice(0.045, 60.0)
    assert outside.rest_seconds() <= 0.045 / 0.1


def test_without_a_pipeline_there_is_a_budget() -> None:
    module_ = torch.nn.Linear(2, 1)
    adapter = TorchAdapter(module_, torch.optim.AdamW(module_.parameters()))
    bubbles = bubbles_of(adapter)
    assert pace_of(adapter, bubbles, 0.0, pytest.fail) is None
    pace = pace_of(adapter, bubbles, 1.0, pytest.fail)
    assert pace is not None
    pace.before_slice()  # at once, though nothing waits
    pace.close()


def pipeline_rank(device: torch.device) -> Any:
    """What the pace asks of an adapter."""
    return SimpleNamespace(device=device, pipeline_stage=Stage(0, 2), micro_batches_per_iteration=2)


def queue_receives(bubbles: Bubbles, iterations: int) -> None:
    """As over NCCL: a receive is queued for the device, and the thread goes on."""
    for _ in range(iterations):
        for _ in range(2):
            time.sleep(0.005)
            with bubbles.waiting(RECEIVE_GRADIENT):
                pass
        bubbles.end_iteration()


def test_a_pipeline_without_visible_waits_learns_within_the_budget(work: Callable[[Pace], Worker]) -> None:
    adapter = pipeline_rank(torch.device("cuda", 0))
    bubbles = bubbles_of(adapter)
    pace = pace_of(adapter, bubbles, 0.1, pytest.fail)
    assert isinstance(pace, BubblePace)
    queue_receives(bubbles, 3)
    assert bubbles.iteration_forecast_seconds() == 0.0  # its schedule would forecast waits that nobody sees
    worker = work(pace)
    started = time.perf_counter()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while worker.slices < 5 and time.monotonic() < deadline:
        queue_receives(bubbles, 1)
    elapsed = time.perf_counter() - started
    account = bubbles.account()
    assert worker.slices >= 5
    assert account.used_seconds < 0.1 * account.outside_seconds
    # Each slice but the last has been paid for by a pause.
    assert account.outside_seconds <= 0.1 * elapsed + 0.1


def test_a_pipeline_on_processors_learns_in_its_waits_alone() -> None:
    adapter = pipeline_rank(torch.device("cpu"))
    bubbles = bubbles_of(adapter)
    queue_receives(bubbles, 2)
    assert bubbles.iteration_forecast_seconds() > 0.0
    pace = pace_of(adapter, bubbles, 0.1, pytest.fail)
    assert pace is not None
    threading.Timer(0.1, pace.close).start()
    started = time.monotonic()
    pace.before_slice()
    assert time.monotonic() - started > 0.05
