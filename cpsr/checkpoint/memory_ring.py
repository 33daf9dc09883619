"""Files of one rank's memory that are filled in turn: the one with the oldest content is overwritten next."""

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch

from cpsr.checkpoint.device_copy import Pinning
from cpsr.checkpoint.memory import MemoryFile, SharedMemory
from cpsr.checkpoint.memory_states import Kind, MemoryState, SlabSize, describe
from cpsr.checkpoint.parts import Held
from cpsr.state.shard import Shard

__all__ = ["MemoryRing", "Slot"]

CLOSE_SECONDS = 5.0  # for a copy that a device has still to make
# Memory that a device may still write to stays mapped, registered and locked until the process ends.
_left_alone: list["MemoryRing"] = []

_Result = TypeVar("_Result")


@dataclass(eq=False)
class Slot:
    """One file.

    Attributes:
        number: in its name.
        file: the memory.
        iteration: of what it holds, or is filled with; -1: nothing that counts.
        pinning: for copies from a device.
        last_work: of the worker, with this file.
        plans: what its user keeps as long as the memory stays.
    """

    number: int
    file: MemoryFile
    iteration: int = -1
    pinning: Pinning | None = None
    last_work: "Future[Any] | None" = None
    plans: dict[int, Any] = field(default_factory=dict)


class MemoryRing:
    """The files of one kind; a thread of its own hashes and seals them, all else is for the training thread.

    Args:
        memory: names and stamps of the files.
        name: what they are called.
        device: that copies into them; None: the host.

    Attributes:
        slots: the open files, by number.
        stream: for the copies of a device.
    """

    def __init__(self, memory: SharedMemory, name: str, device: torch.device | None) -> None:
        self._memory, self._name, self._device = memory, name, device
        self.slots: dict[int, Slot] = {}
        self.stream: Any = None
        if device is not None:
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's stub has no types
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"cpsr-{name}")
        self._last_copy: Future[Any] | None = None

    def path(self, number: int) -> Path:
        """Where a file lies."""
        return self._memory.path(f"{self._name}-{number}")

    def adopt(self, number: int) -> MemoryState:
        """Keep what a file holds of the life before as a state of this life.

        Raises:
            OSError: it holds nothing any more, or another process has it.
        """
        found = describe(self.path(number))
        if found is None:
            raise OSError(f"{self.path(number)} holds no complete state any more")
        state = replace(found.state, life=self._memory.life, branch=self._memory.branch)
        file = self._memory.file(f"{self._name}-{number}", found.size)
        self.slots[number] = Slot(number, file, state.iteration)
        file.restamp(state.life, state.branch)
        return state

    def open(self, number: int, size: SlabSize) -> Slot:
        """A file with a buffer of that size, and room for such a header; its content stays if it is so already.

        Raises:
            OSError: there is too little memory, or another process has the file.
            SaveError: CUDA refuses to pin it.
        """
        slot = self.slots.get(number)
        if slot is not None:
            there = slot.file.size
            if there.buffer_bytes != size.buffer_bytes or there.header_bytes < size.header_bytes:
                self._close(self.slots.pop(number), remove=True)
                slot = None  # its memory is free before the new one is taken
        if slot is None:
            slot = self.slots[number] = Slot(number, self._memory.file(f"{self._name}-{number}", size))
        if self._device is not None and slot.pinning is None:
            slot.pinning = Pinning(slot.file.bytes, self._device)
        return slot

    def next(self, files: int, size: SlabSize, kept: Collection[int | None] = (), before: Slot | None = None) -> Slot:
        """A file to be filled, whose content counts no more: one more, or the one with the oldest content.

        Args:
            files: how many there may be.
            size: of it.
            kept: iterations that are overwritten last.
            before: is not overwritten.

        Raises:
            OSError, SaveError: as `open`.
        """
        if len(self.slots) < files:
            number = next(number for number in count() if number not in self.slots)
        else:
            number = self._oldest(kept, before)
        slot = self.open(number, size)
        slot.file.unseal()
        return slot

    def _oldest(self, kept: Collection[int | None], before: Slot | None) -> int:
        """The number of the file with the oldest content; not the file, which would keep its memory."""
        others = [slot for slot in self.slots.values() if slot is not before]
        oldest = min(others, key=lambda slot: (slot.iteration in kept, slot.iteration))
        if oldest.last_work is not None:
            wait([oldest.last_work])
        oldest.iteration = -1
        return oldest.number

    def copy(self, work: Callable[[], _Result]) -> "Future[_Result]":
        """Let the worker make a copy, or wait for that of a device."""
        copied = self._worker.submit(work)
        self._last_copy = copied
        return copied

    def submit(self, slot: Slot, work: Callable[..., _Result], *given: Any) -> "Future[_Result]":
        """Let the worker do this with a file, after all that it was given before."""
        done = self._worker.submit(work, *given)
        slot.last_work = done
        return done

    def seal(
        self, slot: Slot, kind: Kind, views: Shard, iteration: int, scalars: Any, held: Held | None = None
    ) -> None:
        """Declare what was written complete; in the worker. See `MemoryFile.prepare`."""
        memory = self._memory
        slot.file.seal(memory.rank, memory.life, kind, views, iteration, scalars, branch=memory.branch, held=held)

    def forget(self) -> None:
        """Nothing that the files hold counts any more, nor what is being sealed now."""
        for slot in self.slots.values():
            self.submit(slot, slot.file.unseal).result()
            slot.iteration = -1

    def hangs(self) -> bool:
        """Whether a copy has not ended after `CLOSE_SECONDS`: its device hangs, and all memory is left as it is."""
        if self._last_copy is None or not wait([self._last_copy], CLOSE_SECONDS).not_done:
            return False
        self._worker.shutdown(wait=False)
        _left_alone.append(self)
        return True

    def close(self, *, remove: bool) -> None:
        """Let the memory go, once no copy is under way; see `MemoryFile.close`."""
        self._worker.shutdown(wait=True)
        while self.slots:
            self._close(self.slots.popitem()[1], remove=remove)

    def _close(self, slot: Slot, *, remove: bool) -> None:
        if slot.pinning is not None:
            slot.pinning.undo()
        slot.file.close(remove=remove)
