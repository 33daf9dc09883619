"""A machine's board: memory that its ranks share, with a slot for each rank, and a lock of each while it lives.

The first rank of the machine makes it, and the others map it. It has no name and goes with the last process that maps
it, however that ends. A rank that cannot map it (a container with processes of its own) counts as a machine. A slot
holds what the rank says of proposals, of snapshots that it holds, and its heartbeat; that of all ranks, before the
first, what rank 0 says to them.

The kernel unlocks the byte of a process that ends. A process that is only stopped keeps its lock, and a child that it
has forked does not have it.
"""

import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Sequence

from cpsr.ranks.group import Group

__all__ = ["HEARTBEAT_AT", "HELD_AT", "ORDER_AT", "Board", "has_lock", "lock"]

logger = logging.getLogger(__name__)

SLOT_BYTES = 320  # of rank 0's words, then of each rank's
ORDER_AT = 64  # in rank 0's slot: what all send; before that, its proposal
HELD_AT = 104  # in a slot: what a rank holds; before that, its report
HEARTBEAT_AT = 192
# In rank 0's slot: words that change with each request and proposal, each rank that leaves, and each exchange of
# heartbeats with other machines.
BELL_AT, ALARM_AT, CARRIED_AT = 184, 240, 248
TOKEN_BYTES = 16  # behind the slots, by which a board is told from another file
_LOCK = struct.Struct("@hhqqi4x")  # the kernel's `struct flock`


class Board:
    """One machine's board, as one of its ranks sees it.

    Args:
        rank: which.
        leaders: of each rank of the job, the first rank of its machine, which names the machine.
        mapped: the memory, and the descriptor of it in this process, -1 without: no other process has mapped it then.

    Attributes:
        rank: as given.
        machine: that of this rank.
        machines: the ranks of each.
        ranks: those of this machine.
        bell, alarm, carried: words that change when something has happened; see above.
    """

    def __init__(self, rank: int, leaders: Sequence[int], mapped: tuple[mmap.mmap, int]) -> None:
        self.rank, self.machine = rank, leaders[rank]
        self.machines: dict[int, list[int]] = {}
        for one, leader in enumerate(leaders):
            self.machines.setdefault(leader, []).append(one)
        self.ranks = self.machines[self.machine]
        self._memory, self._descriptor = mapped
        words = memoryview(self._memory)
        self.bell, self.alarm, self.carried = (words[at : at + 8].cast("Q") for at in (BELL_AT, ALARM_AT, CARRIED_AT))

    @staticmethod
    def open(group: Group) -> "Board":
        """That of this machine, in each of its ranks; a collective."""
        token = os.urandom(TOKEN_BYTES)
        own = Board.create(group.size, token)
        offers = group.gather([os.getpid(), own[1], token.hex()])
        leader = group.nodes.index(group.nodes[group.rank])
        process, descriptor, of_leader = offers[leader]
        mapped = None if leader == group.rank else _map(process, descriptor, group.size, bytes.fromhex(of_leader))
        leaders = group.gather(group.rank if mapped is None else leader)  # from here on all boards are mapped
        if mapped is not None and own[1] >= 0:
            os.close(own[1])
        return Board(group.rank, leaders, mapped or own)

    @staticmethod
    def create(ranks: int, token: bytes = b"\0" * TOKEN_BYTES) -> tuple[mmap.mmap, int]:
        """The memory of a new board, and its descriptor in this process."""
        descriptor = os.memfd_create("cpsr-board") if hasattr(os, "memfd_create") else -1
        if descriptor >= 0:
            os.ftruncate(descriptor, _size(ranks))
        memory = mmap.mmap(descriptor, _size(ranks))
        memory[-TOKEN_BYTES:] = token
        return memory, descriptor

    def write(self, slot: int, data: bytes, at: int = 0) -> None:
        """Write to a slot; what begins at one byte has one writer, or several that write the same."""
        begin = slot * SLOT_BYTES + at
        self._memory[begin : begin + len(data)] = data

    def read(self, slot: int, size: int, at: int = 0) -> bytes:
        """So many bytes of a slot, possibly torn."""
        begin = slot * SLOT_BYTES + at
        return self._memory[begin : begin + size]

    def hold(self) -> None:
        """Show the others until the end of this process, or until `release`, that this rank lives; OSError if not."""
        if self._descriptor >= 0:
            lock(self._descriptor, fcntl.LOCK_EX, self.rank, 1)

    def is_held(self, rank: int) -> bool:
        """Whether the process of another rank of this machine holds its lock; OSError where that cannot be known."""
        return has_lock(self._descriptor, rank, 1)

    def release(self) -> None:
        """Show the others that this rank lives no more; a second call has no effect."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def lock(descriptor: int, how: int, start: int = 0, size: int = 0) -> None:
    """Lock some bytes of a file (0: all) for this process, until that ends or closes any descriptor of the file.

    Raises:
        OSError: another process has a lock against it, or the file system has no locks.
    """
    fcntl.lockf(descriptor, how | fcntl.LOCK_NB, size, start)


def has_lock(descriptor: int, start: int = 0, size: int = 0) -> bool:
    """Whether another process has locked any of these bytes; OSError where that cannot be known."""
    asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, size, 0)
    kind, *_ = _LOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return bool(kind != fcntl.F_UNLCK)


def _size(ranks: int) -> int:
    return (1 + ranks) * SLOT_BYTES + TOKEN_BYTES


def _map(process: int, descriptor: int, ranks: int, token: bytes) -> tuple[mmap.mmap, int] | None:
    """The board of another process; None where that cannot be mapped, or is another file."""
    try:
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        logger.debug("process %d has no board for this one: %s", process, error)
        return None
    try:
        memory = mmap.mmap(opened, _size(ranks))
        if memory[-TOKEN_BYTES:] == token:
            return memory, opened
    except (OSError, ValueError) as error:
        logger.debug("what process %d offers as its board is no board: %s", process, error)
    os.close(opened)
    return None
