"""The bytes of one state, from a file of one rank to a file of another, over a gloo group and in bounded pieces."""

import enum
import errno
import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import Work

from cpsr.checkpoint.memory_reader import verify_memory_state
from cpsr.checkpoint.memory_states import BLOCK_BYTES, PAGE_BYTES, memory_state, write_at
from cpsr.checkpoint.resources import available_host_bytes
from cpsr.checkpoint.tensor_file import LENGTH_BYTES
from cpsr.errors import CheckpointError
from cpsr.ranks.group import SideGroup

__all__ = [
    "PEER_SECONDS",
    "Channel",
    "Kind",
    "Message",
    "Sealed",
    "erase",
    "problem_of",
    "receive_state",
    "sealed",
    "send_state",
]

_WORDS = 5
# How often a rank that waits for the next state looks whether it begins: soon enough for what is sent every few seconds
# at most, and next to nothing of a core.
IDLE_SECONDS = 0.05
# Sent at a time; every sender and receiver has a buffer of this size. Large enough that what is done for each in Python
# is lost beside the network, and small beside any state.
CHUNK_BYTES = 4 << 20
PEER_SECONDS = 60.0  # a peer that sends or takes nothing for so long, in the middle of a state, is given up


class Kind(enum.IntEnum):
    """Kind of a message; never 0, which its first word holds before it has arrived."""

    PIECE = 1  # bytes of a state; the first one begins it
    DROPPED = 2  # what was begun does not come: it was overwritten at its owner
    COMPLETE = 3  # the last bytes: its first page, without which it counts for nothing
    FORGET = 4  # states of later iterations count no more
    END = 5  # nothing comes after this


@dataclass(frozen=True)
class Message:
    """What precedes the bytes of a piece.

    Attributes:
        kind: what it is.
        iteration: of the state; of `FORGET`, the last that counts.
        total_bytes: of the state's file.
        offset: of the bytes that follow, in the file.
        length: of the bytes that follow; 0 where none do.
    """

    kind: Kind
    iteration: int = 0
    total_bytes: int = 0
    offset: int = 0
    length: int = 0


class Channel:
    """Messages between this rank and one other; each direction belongs to one thread.

    Args:
        group: holds both. Where one does not answer in time, gloo closes all connections of the
            group: what must not end together needs groups of its own.
        peer: the other rank.
        timeout_seconds: how long the other rank may take for one message or its bytes.
    """

    def __init__(self, group: SideGroup, peer: int, timeout_seconds: float) -> None:
        self.peer = peer
        self._group = group
        self._timeout = timedelta(seconds=timeout_seconds)
        # The bytes that follow a message.
        self.buffer = torch.empty(max(CHUNK_BYTES, PAGE_BYTES), dtype=torch.uint8, device="cpu")
        self._view = memoryview(self.buffer.numpy())  # type: ignore[arg-type] # numpy's stub knows no buffers yet

    def view(self, length: int) -> memoryview:
        """The first bytes of the buffer, to be filled before `send` or used after `receive`."""
        return self._view[:length]

    def send(self, message: Message) -> None:
        """Say something, with the first `message.length` bytes of the buffer.

        Raises:
            RuntimeError: the other rank is gone, or took nothing in time; the group cannot be used any more.
        """
        words = [message.kind, message.iteration, message.total_bytes, message.offset, message.length]
        self._send(torch.tensor(words, dtype=torch.int64, device="cpu"))
        if message.length:
            self._send(self.buffer[: message.length])

    def receive(self) -> Message:
        """Wait for a message; its bytes are in the buffer.

        Raises:
            RuntimeError: the other rank is gone, or sent nothing in time; the group cannot be used any more.
            CheckpointError: what came is no message.
        """
        words = torch.zeros(_WORDS, dtype=torch.int64, device="cpu")
        self._ask(words).wait(self._timeout)
        return self._message(words)

    def receive_unless(self, stop: threading.Event) -> Message | None:
        """Wait for a message without a timeout; None, for good, once this rank is asked to stop.

        Raises:
            RuntimeError, CheckpointError: as `receive`.
        """
        words = torch.zeros(_WORDS, dtype=torch.int64, device="cpu")
        self._asked = words, self._ask(words)  # kept also when this rank stops: gloo may still write there
        # Not a wait: a thread in one cannot be ended, and gloo's way to break it off closes the connection. Nor does
        # gloo say whether a receive is complete. But what comes first can be seen.
        while not words[0]:
            if stop.wait(IDLE_SECONDS):
                return None
        self._asked[1].wait(self._timeout)
        return self._message(words)

    def _message(self, words: torch.Tensor) -> Message:
        kind, iteration, total_bytes, offset, length = words.tolist()
        fits = 0 <= length <= len(self._view) and 0 <= offset <= total_bytes - length
        if kind not in list(Kind) or not fits:
            raise CheckpointError(f"rank {self.peer} sent no message of this version: {words.tolist()}")
        if length:
            self._ask(self.buffer[:length]).wait(self._timeout)
        return Message(Kind(kind), iteration, total_bytes, offset, length)

    def _send(self, tensor: torch.Tensor) -> None:
        self._group.send(tensor, self.peer).wait(self._timeout)

    def _ask(self, tensor: torch.Tensor) -> Work:
        return self._group.receive(tensor, self.peer)


@dataclass(frozen=True)
class Sealed:
    """A state in shared memory, as it was at one moment.

    Attributes:
        path: its file.
        iteration: of the state.
        page: its first page at that time, which changes with every state: while it is the same, so is the state.
        small: it is of use only to whom has the same weights and moments.
    """

    path: Path
    iteration: int
    page: bytes
    small: bool = False


def sealed(path: Path, iteration: int, *, small: bool = False) -> Sealed:
    """The state that a file holds now; OSError where it cannot be read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return Sealed(path, iteration, os.pread(descriptor, PAGE_BYTES, 0), small)
    finally:
        os.close(descriptor)


def send_state(channel: Channel, state: Sealed, stop: threading.Event) -> bool:
    """Send a state's file; False where it was overwritten before or meanwhile, or this rank was asked to stop.

    Args:
        channel: to the rank that takes it.
        state: in shared memory of this machine.
        stop: asks to break off.

    Raises:
        RuntimeError: the other rank is gone, or took nothing in time.
        OSError: the file cannot be read.
    """
    descriptor = os.open(state.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        total, offset = os.fstat(descriptor).st_size, PAGE_BYTES
        while offset < total:
            length = os.preadv(descriptor, [channel.view(min(len(channel.buffer), total - offset))], offset)
            # Looked at after the bytes, so that they are of this state.
            if not length or not _holds(descriptor, state) or stop.is_set():
                channel.send(Message(Kind.DROPPED, state.iteration))
                return False
            channel.send(Message(Kind.PIECE, state.iteration, total, offset, length))
            offset += length
        channel.view(PAGE_BYTES)[:] = state.page
        channel.send(Message(Kind.COMPLETE, state.iteration, total, 0, PAGE_BYTES))
        return True
    finally:
        os.close(descriptor)


def _holds(descriptor: int, state: Sealed) -> bool:
    return os.pread(descriptor, PAGE_BYTES, 0) == state.page


def receive_state(channel: Channel, first: Message, path: Path) -> bool:
    """Write what `send_state` sends into a file of shared memory; False where its owner has dropped it.

    The file counts for nothing until all of it is there; what it held before counts no more.

    Args:
        channel: to the rank that sends.
        first: its message that began the state, just received.
        path: the file.

    Raises:
        RuntimeError: the other rank is gone, or sent nothing in time.
        OSError: shared memory is not there, or there is too little memory.
        CheckpointError: the pieces are not those of one state.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        _erase(descriptor)
        os.ftruncate(descriptor, first.total_bytes)
        _require_memory(descriptor, first.total_bytes, path)
        os.posix_fallocate(descriptor, 0, first.total_bytes)  # or a write would fail halfway
        message = first
        while message.kind is Kind.PIECE and (message.iteration, message.total_bytes) == (
            first.iteration,
            first.total_bytes,
        ):
            write_at(descriptor, channel.view(message.length), message.offset)
            message = channel.receive()
        if message.kind is Kind.DROPPED:
            return False
        if message.kind is not Kind.COMPLETE or message.iteration != first.iteration:
            raise CheckpointError(f"rank {channel.peer} sent {message} in the middle of {first}")
        page = channel.view(message.length)  # its first bytes make the state count: they come last, as at its owner
        write_at(descriptor, page[LENGTH_BYTES:], LENGTH_BYTES)
        write_at(descriptor, page[:LENGTH_BYTES], 0)
        return True
    finally:
        os.close(descriptor)


def _require_memory(descriptor: int, total_bytes: int, path: Path) -> None:
    """Shared memory is memory: to take what the control group does not have would end a process, perhaps training."""
    missing = total_bytes - os.fstat(descriptor).st_blocks * BLOCK_BYTES
    if missing > (available := available_host_bytes()):
        raise OSError(errno.ENOMEM, f"{missing} bytes of memory are missing, {available} are available", str(path))


def _erase(descriptor: int) -> None:
    """Take a file's first page away, so that what it holds counts for nothing."""
    os.pwrite(descriptor, bytes(PAGE_BYTES), 0)


def erase(path: Path) -> None:
    """Let a file of shared memory hold nothing; it keeps its size."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _erase(descriptor)
    finally:
        os.close(descriptor)


def problem_of(path: Path, owner: int, iteration: int) -> str | None:
    """Why a file that has arrived does not hold this state, None where every byte is as its owner sealed it."""
    state = memory_state(path)
    if state is None or (state.rank, state.iteration) != (owner, iteration):
        return f"{path} does not hold iteration {iteration} of rank {owner}"
    return verify_memory_state(state)
