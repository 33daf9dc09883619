"""Files that are filled in turn: which is overwritten next, what the next life adopts, and a device that hangs."""

import time
import weakref
from pathlib import Path

import pytest
import torch

from cpsr.checkpoint import memory_ring
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.copying import CopyEngine
from cpsr.checkpoint.file_lock import FileInUseError, FileLock
from cpsr.checkpoint.memory import MemoryFile, SharedMemory
from cpsr.checkpoint.memory_ring import MemoryRing, Slot
from cpsr.checkpoint.memory_states import SlabSize
from cpsr.state.codec import encode
from cpsr.state.shard import Shard
from tests.stand_in_device import stand_in_device

RUN_ID = "0123abcd"
SIZE = SlabSize.for_tensors(["other/all"], 4096)
LARGER = SlabSize.for_tensors(["other/all"], 8192)


def ring_of(directory: Path, life: int = 0, device: torch.device | None = None) -> MemoryRing:
    memory = SharedMemory(RUN_ID, 0, life, directory, wait_seconds=0.1)
    return MemoryRing(memory, "ring", CopyEngine("ring", device))


def fill(ring: MemoryRing, slot: Slot, iteration: int) -> None:
    slot.iteration = iteration
    slot.file.bytes.fill_(iteration)
    slot.file.prepare("upstream", Shard({}, {"all": slot.file.bytes}), iteration, encode({"at": iteration}))()


def left(directory: Path) -> dict[int, int]:
    """Iterations of complete states, and the life that each is of."""
    return {state.iteration: state.life for state in Arena(RUN_ID, directory).list()}


def test_the_oldest_is_overwritten_but_not_what_is_kept_nor_the_one_before(tmp_path: Path) -> None:
    ring = ring_of(tmp_path)
    for iteration in (1, 2, 3):
        fill(ring, ring.next(3, SIZE), iteration)
    first = ring.slots[0]
    assert first.iteration == 1
    assert ring.next(3, SIZE, kept={1}).number == 1
    assert set(left(tmp_path)) == {1, 3}
    fill(ring, ring.slots[1], 4)
    assert ring.next(3, SIZE, before=first).number == 2
    assert ring.next(3, LARGER, before=first).file.size == LARGER  # what holds nothing goes first
    ring.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_the_memory_of_the_oldest_is_free_before_a_larger_file_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = ring_of(tmp_path)
    for iteration in (1, 2):
        fill(ring, ring.next(2, SIZE), iteration)
    mapped, free, real = weakref.ref(ring.slots[0].file), [], SharedMemory.file

    def file(memory: SharedMemory, slot: str, size: SlabSize) -> MemoryFile:
        free.append(mapped() is None)
        return real(memory, slot, size)

    monkeypatch.setattr(SharedMemory, "file", file)
    assert ring.next(2, LARGER).number == 0
    assert free == [True]
    ring.close(remove=True)


def test_the_next_life_adopts_what_is_complete(tmp_path: Path) -> None:
    ring = ring_of(tmp_path)
    for iteration in (1, 2):
        fill(ring, ring.next(2, SIZE), iteration)
    ring.next(2, SIZE)  # begun, and never sealed
    ring.close(remove=False)
    later = ring_of(tmp_path, life=1)
    assert (later.adopt(1).iteration, left(tmp_path)) == (2, {2: 1})
    with pytest.raises(OSError, match="holds no complete state"):
        later.adopt(0)
    assert later.slots[1].file.bytes.equal(torch.full((4096,), 2, dtype=torch.uint8))
    later.forget()
    assert left(tmp_path) == {}
    later.close(remove=True)


def test_where_a_device_hangs_the_memory_stays_locked_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_ring, "CLOSE_SECONDS", 0.1)
    with stand_in_device() as device:
        ring = ring_of(tmp_path, device=torch.device("cuda", 0))
        slot = ring.next(1, SIZE)
        device.hang()
        ring.engine.copy_beside(slot.file.bytes, device.tensor(torch.ones(4096, dtype=torch.uint8)))
        started = time.monotonic()
        assert not ring.close(remove=True)
        assert time.monotonic() - started < 5.0
        assert device.calls("synchronize", "unregister") == []
        with pytest.raises(FileInUseError):
            FileLock(slot.file.path)
    slot.file.close(remove=True)
