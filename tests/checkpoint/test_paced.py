"""Snapshots that are copied while the training thread waits: always whole, whatever the waits are."""

import random
import threading
import time
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch

from cpsr.checkpoint import copying
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.direct_file import PieceHashes
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_states import OpenState
from cpsr.checkpoint.running_copy import GROWTH, RECENT_SNAPSHOTS, CopyPace, PacedCopy
from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool
from cpsr.errors import SaveError
from cpsr.state.codec import SmallState
from cpsr.state.device_values import Arrival
from cpsr.state.shard import Shard
from tests.checkpoint.conftest import assert_same_bits, make_shard

PATIENCE_SECONDS = 10.0
FAR = 1e3  # seconds: a wait with room for any copy
SIZES = (5, 0, 300, 7000, 1)


class Opened:
    """Waits that the test opens and closes."""

    def __init__(self, forecast_seconds: float = FAR, *, opened: bool = False) -> None:
        self.forecast_seconds = forecast_seconds
        self._changed = threading.Condition()
        self._open = opened
        self.asked = threading.Event()

    def set(self, *, opened: bool) -> None:
        with self._changed:
            self._open = opened
            self._changed.notify_all()

    def remaining_seconds(self) -> float:
        return FAR if self._open else 0.0

    def iteration_forecast_seconds(self) -> float:
        return self.forecast_seconds

    def wait(self, needed_seconds: float, timeout_seconds: float) -> bool:
        self.asked.set()
        with self._changed:
            return self._changed.wait_for(lambda: self._open, timeout_seconds)


class Closed(Opened):
    """What a life's end leaves: nobody waits for anything."""

    def wait(self, needed_seconds: float, timeout_seconds: float) -> bool:
        self.asked.set()
        return False


class Noted(PacedCopy):
    """The copies that were begun, newest last."""

    begun: ClassVar[list[PacedCopy]] = []

    def __init__(self, pace: CopyPace, small: SmallState | None, arrival: Arrival | None) -> None:
        super().__init__(pace, small, arrival)
        self.begun.append(self)


@pytest.fixture
def pool(run_id: str, monkeypatch: pytest.MonkeyPatch) -> SnapshotPool:
    """Its pieces are small."""
    monkeypatch.setattr(copying, "HASHED_BYTES", 1000)
    monkeypatch.setattr(copying, "SMALL_ELEMENTS", 100)
    monkeypatch.setattr(copying, "PacedCopy", Noted)
    pool = SnapshotPool(make_shard(0, SIZES), memory=SharedMemory(run_id, 0, 1))
    assert pool.shared_memory_problem is None
    return pool


def first(pool: SnapshotPool, waits: Opened, until_update: float = FAR) -> None:
    """The snapshot that measures how fast copies are; it seemed to have that much time."""
    pool.engine.copy_in(waits)
    copied = copy_of(take(pool, 1))
    assert (copied.copied_bytes, copied.bytes_in_waits, copied.late_bytes) == (TOTAL, 0, 0)
    assert pool.engine.pace is not None
    seconds = pool.engine.pace.seconds(TOTAL)
    for _ in range(RECENT_SNAPSHOTS):
        pool.engine.pace.record(copied, seconds, until_update)
    waits.asked.clear()


def take(pool: SnapshotPool, seed: int, work: Callable[[], object] = lambda: None) -> Snapshot:
    """One snapshot, with something in between, and the engine's update after it."""
    shard = make_shard(seed, SIZES, iteration=seed)
    assert pool.begin(shard, seed, {"seed": seed}) is not None
    work()
    snapshot = pool.finish()
    assert snapshot is not None
    for _, tensor in shard.tensors():
        tensor.zero_()
    assert_same_bits(snapshot.shard, make_shard(seed, SIZES))
    assert {operator.iteration for operator in snapshot.shard.operators.values()} == {seed}
    pool.release(snapshot)
    return snapshot


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def copy_of(snapshot: Snapshot) -> PacedCopy:
    """Of the newest one."""
    assert {operator.iteration for operator in snapshot.shard.operators.values()} == {snapshot.iteration}
    return Noted.begun[-1]


def copied_bytes(shard: Shard) -> int:
    return sum(tensor.nbytes for name, tensor in shard.tensors() if not name.startswith("other/"))


TOTAL = copied_bytes(make_shard(0, SIZES))


def copied(pace: CopyPace, total: int, in_waits: int = 0, late: int = 0) -> PacedCopy:
    """One that is complete, and whose pieces have 100 bytes."""
    made = PacedCopy(pace)
    made.copied_bytes, made.bytes_in_waits, made.late_bytes, made.largest_bytes = total, in_waits, late, 100
    return made


def test_it_plans_by_the_measured_speed_and_by_what_did_fit() -> None:
    pace = CopyPace(Opened(forecast_seconds=1.0))
    assert pace.plan(1000) == 0  # nothing is known of the speed
    pace.record(copied(pace, 500), 1.0, 9.0)
    assert pace.seconds(1000) == 2.0
    assert pace.plan(1000) == 500
    pace.record(copied(pace, 1000, in_waits=200, late=300), 2.0, 9.0)
    assert pace.plan(1000) == 200  # the forecast promised too much
    pace.record(copied(pace, 1000, in_waits=200), 2.0, 9.0)
    assert pace.plan(1000) == int(GROWTH * 200)
    pace.record(copied(pace, 1000, late=250), 2.0, 9.0)
    assert pace.plan(1000) == 100  # one piece still looks for waits


def test_a_snapshot_that_is_needed_at_once_measures_nothing() -> None:
    """Few waits come before `save_now`, a load or the exit."""
    pace = CopyPace(Opened(forecast_seconds=0.5))
    for _ in range(3):
        pace.record(copied(pace, 1000, in_waits=500), 1.0, 9.0)
    assert pace.plan(1000) == 500
    pace.record(copied(pace, 1000, late=1000), 0.1, 0.0)
    assert pace.seconds(1000) == 1.0  # it was not hashed on the way
    assert pace.plan(1000) == 500
    pace.record(copied(pace, 1000, in_waits=200, late=300), 1.0, 5.0)  # a short iteration, as others may be
    assert pace.plan(1000) == 200
    pace.record(copied(pace, 1000, in_waits=200), 1.0, 0.0)
    assert pace.plan(1000) == 200


def test_shorter_iterations_are_learned() -> None:
    pace = CopyPace(Opened(forecast_seconds=2.0))
    for _ in range(RECENT_SNAPSHOTS):
        pace.record(copied(pace, 1000), 1.0, 9.0)
    for _ in range(RECENT_SNAPSHOTS):
        pace.record(copied(pace, 1000, late=1000), 1.0, 0.1)
    assert pace.plan(1000) == 100


def test_nothing_is_copied_before_the_wait(pool: SnapshotPool) -> None:
    waits = Opened()
    first(pool, waits)

    def work() -> None:
        assert waits.asked.wait(PATIENCE_SECONDS)
        assert Noted.begun[-1].copied_bytes == 0
        waits.set(opened=True)
        wait_for(lambda: Noted.begun[-1].bytes_in_waits == TOTAL)

    take(pool, 2, work)
    pool.close()


def test_the_update_waits_for_no_hash(pool: SnapshotPool, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the update waits for is hashed afterwards, when it is sealed."""
    hashed = []

    class Counted(PieceHashes):
        def take(self, data: memoryview) -> None:
            hashed.append(len(data))
            super().take(data)

    monkeypatch.setattr(copying, "PieceHashes", Counted)
    waits = Opened()
    first(pool, waits)
    hashed.clear()
    shard = make_shard(2, SIZES, iteration=2)
    assert pool.begin(shard, 2, None) is not None
    assert waits.asked.wait(PATIENCE_SECONDS)
    snapshot = pool.finish()
    assert snapshot is not None
    assert copy_of(snapshot).late_bytes == TOTAL
    assert not hashed
    assert snapshot.sealed is not None
    assert snapshot.sealed.result()
    [state] = [state for state in Arena(run_id).list() if state.iteration == 2]
    with OpenState(state) as opened:  # verifies all hashes
        for name, tensor in shard.tensors():
            assert torch.equal(opened.as_it_is(name), tensor)
    pool.close()


@pytest.mark.parametrize("kind", [Opened, Closed])
def test_a_wait_that_never_comes_costs_no_byte(pool: SnapshotPool, kind: type[Opened]) -> None:
    waits = kind()
    first(pool, waits, until_update=0.1)
    assert copy_of(take(pool, 2, lambda: time.sleep(0.06))).late_bytes == TOTAL
    third = copy_of(take(pool, 3, lambda: wait_for(lambda: Noted.begun[-1].copied_bytes > 0)))
    assert 0 < third.late_bytes <= 1000  # it has learned not to count on it
    pool.close()


def test_whatever_the_waits_do_it_is_bitwise(pool: SnapshotPool) -> None:
    waits = Opened()
    pool.engine.copy_in(waits)
    ended = threading.Event()
    chance = random.Random(3)

    def flicker() -> None:
        while not ended.wait(chance.random() * 1e-3):
            waits.set(opened=chance.random() < 0.5)

    thread = threading.Thread(target=flicker)
    thread.start()
    copies = []
    for seed in range(150):
        copies.append(copy_of(take(pool, seed, lambda: time.sleep(chance.random() * 2e-3))))
    ended.set()
    thread.join()
    assert {copy.copied_bytes for copy in copies} == {TOTAL}
    assert any(copy.bytes_in_waits for copy in copies)
    pool.close()


def test_an_end_does_not_wait_for_a_wait(pool: SnapshotPool) -> None:
    first(pool, Opened())
    assert pool.begin(make_shard(2, SIZES), 2, None) is not None
    pool.forget_after(0)  # looks at what is being sealed, which the same thread does
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 5.0


def test_what_is_left_when_the_group_breaks_is_whole(pool: SnapshotPool, run_id: str) -> None:
    """The dump takes a running copy over, whatever it waits for."""
    waits = Opened()
    first(pool, waits)
    shard = make_shard(2, SIZES, iteration=2)
    assert pool.begin(shard, 2, {"seed": 2}) is not None
    assert waits.asked.wait(PATIENCE_SECONDS)
    pool.mark_boundary()
    pool.dump(lambda: shard, 2, lambda: {"seed": 2})
    assert [state.iteration for state in Arena(run_id).list() if state.iteration == 2] == [2]
    snapshot = pool.finish()
    assert snapshot is not None
    assert_same_bits(snapshot.shard, make_shard(2, SIZES))
    pool.close()


def test_a_forward_that_takes_a_copy_back_waits_for_no_wait(pool: SnapshotPool, run_id: str) -> None:
    waits = Opened()
    first(pool, waits)
    shard = make_shard(2, SIZES, iteration=2)
    assert pool.begin(shard, 2, None) is not None
    assert waits.asked.wait(PATIENCE_SECONDS)
    for operator in shard.operators.values():
        operator.parameter.values.zero_()
    started = time.monotonic()
    pool.look()
    assert time.monotonic() - started < 5.0
    assert [state.iteration for state in Arena(run_id).list()] == [1]
    with pytest.raises(SaveError, match="the loop changes weights"):
        pool.finish()
    pool.close()
