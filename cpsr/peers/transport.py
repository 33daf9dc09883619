"""The bytes of one state, from a file of one rank to a file of another, over a gloo group and in bounded pieces.

Parts of it that its holder has already, from the state before, are not sent again.
"""

import enum
import errno
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import Work

from cpsr.checkpoint.memory_reader import verify_memory_state
from cpsr.checkpoint.memory_states import BLOCK_BYTES, PAGE_BYTES, describe, memory_state, write_at
from cpsr.checkpoint.resources import available_host_bytes
from cpsr.errors import CheckpointError
from cpsr.ranks.group import SideGroup

__all__ = [
    "TRANSFER",
    "Channel",
    "Kind",
    "Message",
    "Sealed",
    "Transfer",
    "erase",
    "problem_of",
    "receive_state",
    "sealed",
    "send_state",
]

_WORDS = 5
_ANSWERS = 1  # tag: the other direction of the same pair is another state's
# How often a rank that waits for the next state looks whether it begins: soon enough for what is sent every few seconds
# at most, and next to nothing of a core.
IDLE_SECONDS = 0.05
_COPY_BYTES = 1 << 22
# A segment of a state's tensors by its place in the file: first byte, byte after the last one, xxh3-128 of the bytes.
Part = tuple[int, int, str]


class Kind(enum.IntEnum):
    """Kind of a message; never 0, which its first word holds before it has arrived."""

    PIECE = 1  # bytes of a state; the first one begins it
    DROPPED = 2  # what was begun does not come: it was overwritten at its owner
    COMPLETE = 3  # the last bytes: its first page, without which it counts for nothing
    FORGET = 4  # states of later iterations count no more
    END = 5  # nothing comes after this
    OFFER = 6  # the parts of a state, which begins with it; what is needed of them is the answer


@dataclass(frozen=True)
class Message:
    """What precedes the bytes of a piece.

    Attributes:
        kind: what it is.
        iteration: of the state; of `FORGET`, the last that counts.
        total_bytes: of the state's file.
        offset: of the bytes that follow, in the file.
        length: of the bytes that follow; 0 where none do. After `OFFER` they describe the parts.
    """

    kind: Kind
    iteration: int = 0
    total_bytes: int = 0
    offset: int = 0
    length: int = 0


@dataclass(frozen=True)
class Transfer:
    """How states travel between ranks.

    Attributes:
        chunk_bytes: sent at a time; every sender and receiver has a buffer of this size. Large enough that what is
            done for each in Python is lost beside the network, and small beside any state.
        timeout_seconds: a peer that sends or takes nothing for so long, in the middle of a state, is given up.
    """

    chunk_bytes: int = 4 << 20
    timeout_seconds: float = 60.0


TRANSFER = Transfer()


class Channel:
    """Messages between this rank and one other; each direction belongs to one thread.

    Args:
        group: holds both. Where one does not answer in time, gloo closes all connections of the
            group: what must not end together needs groups of its own.
        peer: the other rank.
        chunk_bytes: the most bytes that follow a message.
        timeout_seconds: how long the other rank may take for one message or its bytes.
    """

    def __init__(self, group: SideGroup, peer: int, chunk_bytes: int, timeout_seconds: float) -> None:
        self.peer = peer
        self._group = group
        self._timeout = timedelta(seconds=timeout_seconds)
        # The bytes that follow a message.
        self.buffer = torch.empty(max(chunk_bytes, PAGE_BYTES), dtype=torch.uint8, device="cpu")
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

    def answer(self, wanted: Sequence[bool]) -> None:
        """Say which parts of an offered state must be sent.

        Raises:
            RuntimeError: as `send`.
        """
        words = torch.tensor(wanted, dtype=torch.uint8, device="cpu")
        self._group.send(words, self.peer, _ANSWERS).wait(self._timeout)

    def asked_for(self, parts: int) -> list[bool]:
        """The answer to an offer of so many parts.

        Raises:
            RuntimeError: as `receive`.
        """
        words = torch.zeros(parts, dtype=torch.uint8, device="cpu")
        self._group.receive(words, self.peer, _ANSWERS).wait(self._timeout)
        return [bool(word) for word in words.tolist()]

    def _message(self, words: torch.Tensor) -> Message:
        kind, iteration, total_bytes, offset, length = words.tolist()
        fits = offset <= total_bytes - length or kind == Kind.OFFER
        if kind not in list(Kind) or not (0 <= length <= len(self._view) and offset >= 0 and fits):
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


def send_state(
    channel: Channel,
    state: Sealed,
    stop: threading.Event,
    bytes_per_second: float | None = None,
    *,
    offers: bool = False,
) -> bool:
    """Send a state's file; False where it was overwritten before or meanwhile, or this rank was asked to stop.

    Args:
        channel: to the rank that takes it.
        state: in shared memory of this machine.
        stop: asks to break off.
        bytes_per_second: the rate not to be exceeded.
        offers: whether a state of several parts is offered first, and only what the other rank lacks is sent.

    Raises:
        RuntimeError: the other rank is gone, or took nothing in time.
        OSError: the file cannot be read.
    """
    descriptor = os.open(state.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        total, sent, whole = os.fstat(descriptor).st_size, 0, True
        started = time.monotonic()
        for begin, end in _ranges(channel, descriptor, state, total) if offers else [(PAGE_BYTES, total)]:
            offset = begin
            while whole and offset < end:
                length = os.preadv(descriptor, [channel.view(min(len(channel.buffer), end - offset))], offset)
                # Looked at after the bytes, so that they are of this state.
                whole = length > 0 and _holds(descriptor, state) and not stop.is_set()
                if whole:
                    channel.send(Message(Kind.PIECE, state.iteration, total, offset, length))
                    offset, sent = offset + length, sent + length
                    if bytes_per_second is not None:
                        stop.wait(max(0.0, started + sent / bytes_per_second - time.monotonic()))
        if not whole:
            channel.send(Message(Kind.DROPPED, state.iteration))
            return False
        channel.view(PAGE_BYTES)[:] = state.page
        channel.send(Message(Kind.COMPLETE, state.iteration, total, 0, PAGE_BYTES))
        return True
    finally:
        os.close(descriptor)


def _ranges(channel: Channel, descriptor: int, state: Sealed, total: int) -> list[tuple[int, int]]:
    """What must be sent of the file, after its first page."""
    parts = file_parts(state.path)
    data = json.dumps(parts).encode()
    if len(parts) < 2 or len(data) > len(channel.buffer) or not _holds(descriptor, state):
        return [(PAGE_BYTES, total)]
    channel.view(len(data))[:] = data
    channel.send(Message(Kind.OFFER, state.iteration, total, 0, len(data)))
    wanted = channel.asked_for(len(parts))
    ranges = [(begin, end) for (begin, end, _), asked in zip(parts, wanted, strict=True) if asked]
    return [*ranges, (parts[-1][1], total)]  # what follows the tensors is new in every state


def _holds(descriptor: int, state: Sealed) -> bool:
    return os.pread(descriptor, PAGE_BYTES, 0) == state.page


def receive_state(channel: Channel, first: Message, path: Path, newest: Path | None = None) -> bool:
    """Write what `send_state` sends into a file of shared memory; False where its owner has dropped it.

    The file counts for nothing until all of it is there; what it held before counts no more.

    Args:
        channel: to the rank that sends.
        first: its message that began the state, just received.
        path: the file.
        newest: the file of the newest state before, which parts may be taken from; None where nothing is offered.

    Raises:
        RuntimeError: the other rank is gone, or sent nothing in time.
        OSError: shared memory is not there, or there is too little memory.
        CheckpointError: the pieces are not those of one state.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        held = file_parts(path) if first.kind is Kind.OFFER else []
        _erase(descriptor)
        os.ftruncate(descriptor, first.total_bytes)
        _require_memory(descriptor, first.total_bytes, path)
        os.posix_fallocate(descriptor, 0, first.total_bytes)  # or a write would fail halfway
        message = first
        if first.kind is Kind.OFFER and newest is not None:
            channel.answer(copy_unchanged(_offered(channel, first), descriptor, held, newest))
            message = channel.receive()
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
        write_at(descriptor, channel.view(message.length), message.offset)
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


def file_parts(path: Path) -> list[Part]:
    """The segments of the complete state in a file; empty where it holds none."""
    found = describe(path)
    if found is None:
        return []
    described = zip(found[1]["segments"], found[1]["hashes"], strict=True)
    return [(PAGE_BYTES + begin, PAGE_BYTES + end, digest) for (begin, end), digest in described]


def copy_unchanged(parts: Sequence[Part], target: int, held: Sequence[Part], newest: Path) -> list[bool]:
    """Copy what the holder's newest state has of an offered one into the file that takes it.

    Args:
        parts: of the offered state.
        target: descriptor of the file that takes it, as long as that state.
        held: what that file held before; it is still there.
        newest: the holder's other file.

    Returns:
        For each part, whether it must be sent.
    """
    there, others, wanted = set(held), set(file_parts(newest)), []
    source = os.open(newest, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC) if others else -1
    try:
        for part in parts:
            if part not in there and part in others:
                _copy(source, target, part)
            wanted.append(part not in there and part not in others)
    finally:
        if source >= 0:
            os.close(source)
    return wanted


def _offered(channel: Channel, message: Message) -> list[Part]:
    """The parts that follow an offer; ValueError where it is something else."""
    return [
        (int(begin), int(end), str(digest)) for begin, end, digest in json.loads(bytes(channel.view(message.length)))
    ]


def _copy(source: int, target: int, part: Part) -> None:
    offset, end, _ = part
    while offset < end:
        data = os.pread(source, min(_COPY_BYTES, end - offset), offset)
        if not data:
            return  # it is shorter than it says: the hash of the whole will not hold
        write_at(target, data, offset)
        offset += len(data)
