"""Files of one rank's memory that are filled in turn: the one with the oldest content is overwritten next."""

from collections.abc import Collection
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from cpsr.checkpoint.copying import CopyEngine
from cpsr.checkpoint.memory import MemoryFile, SharedMemory
from cpsr.checkpoint.memory_states import MemoryState, SlabSize, describe
from cpsr.checkpoint.parts import Held
from cpsr.state.device_values import Deadline

__all__ = ["MemoryRing", "Slot"]

CLOSE_SECONDS = 5.0  # for a copy that a device has still to make
# Memory that a device may still write to stays mapped, registered and locked until the process ends.
_left_alone: list["MemoryRing"] = []


@dataclass(eq=False)
class Slot:
    """One file.

    Attributes:
        number: in its name.
        file: the memory.
        iteration: of what it holds, or is filled with; -1: nothing that counts.
        last_work: of the engine, with this file.
        held: what its user has in it, by part.
    """

    number: int
    file: MemoryFile
    iteration: int = -1
    last_work: "Future[Any] | None" = None
    held: Held | None = None


class MemoryRing:
    """The files of one kind; all of it is for the training thread.

    Args:
        memory: names and stamps of the files.
        name: what they are called.
        engine: copies into them, and seals them.

    Attributes:
        engine: as given.
        slots: the open files, by number.
    """

    def __init__(self, memory: SharedMemory, name: str, engine: CopyEngine) -> None:
        self._memory, self._name, self.engine = memory, name, engine
        self.slots: dict[int, Slot] = {}

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
        file = self._memory.file(f"{self._name}-{number}", found.size)
        self.slots[number] = Slot(number, file, found.iteration)
        return file.restamp()

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
                self.slots.pop(number).file.close(remove=True)
                slot = None  # its memory is free before the new one is taken
        if slot is None:
            slot = self.slots[number] = Slot(number, self._memory.file(f"{self._name}-{number}", size))
        slot.file.pin(self.engine.device)
        return slot

    def next(self, files: int, size: SlabSize, kept: Collection[int] = (), before: Slot | None = None) -> Slot:
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

    def _oldest(self, kept: Collection[int], before: Slot | None) -> int:
        """The number of the file with the oldest content; not the file, which would keep its memory."""
        others = [slot for slot in self.slots.values() if slot is not before]
        oldest = min(others, key=lambda slot: (slot.iteration in kept, slot.iteration))
        if oldest.last_work is not None and not oldest.last_work.done():
            wait([oldest.last_work])
        oldest.iteration = -1
        return oldest.number

    def forget(self) -> None:
        """Nothing that the files hold counts any more, nor what is being sealed now."""
        self.engine.settle()
        for slot in self.slots.values():
            slot.file.unseal()
            slot.iteration = -1

    def close(self, *, remove: bool) -> bool:
        """Let the memory go, once no copy is under way; see `MemoryFile.close`.

        Returns:
            False where the device has not made its copies after `CLOSE_SECONDS`: all memory is left as it is.
        """
        sent = self.engine.arrives(Deadline(CLOSE_SECONDS))
        self.engine.close(wait=sent)
        if not sent:
            _left_alone.append(self)
            return False
        while self.slots:
            self.slots.popitem()[1].file.close(remove=remove)
        return True
