"""The shared memory of another rank's machine as a place, and this machine's for other ranks."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.memory_states import MemoryState, OpenState
from cpsr.checkpoint.place import Image, Index
from cpsr.errors import CheckpointError
from cpsr.peers.transport import Channel, Kind, Message

__all__ = ["Peer", "answer", "fetched_path"]

# What arrived is verified before the reply, in a thread that yields to the training.
VERIFIED_BYTES_A_SECOND = 50e6


def fetched_path(arena: Arena, receiver: int, index: Index) -> Path:
    """Where the rank that opens a slab of another machine has its copy."""
    return arena.path(index.rank, f"fetched-{receiver:05d}-{index.kind}")


class Peer:
    """The other rank's shared memory, a `Place`; that rank calls `answer` for each request.

    Every method raises RuntimeError where the other rank is gone, or does not answer in time.

    Args:
        channel: to it.
        arena: of this machine, where what is opened gets a copy.
        rank: this one.
        stop: breaks off what is being put.
    """

    def __init__(self, channel: Channel, arena: Arena, rank: int, stop: threading.Event | None = None) -> None:
        self._channel, self._arena, self._rank = channel, arena, rank
        self._stop = threading.Event() if stop is None else stop

    def list(self, rank: int | None = None) -> Sequence[MemoryState]:
        """See `Arena.list`; the paths are bare names, and nothing is told of what the states hold."""
        found = json.loads(self._ask(Message(Kind.LIST, data=b"" if rank is None else b"%d" % rank)).text)
        return [MemoryState(Path(name), *rest) for name, *rest in found]

    def put(self, name: str, image: Image) -> None:
        """See `Place.put`; CheckpointError also for what the other machine's memory refuses."""
        self._channel.send(Message(Kind.PUT, image.size, name.encode()))
        _give(self._channel, image, self._stop)

    def open(self, index: Index) -> OpenState:
        """See `Place.open`; the copy stays until its file is removed.

        Raises:
            OSError: this machine has too little memory.
        """
        size = self._ask(Message(Kind.OPEN, index.iteration, index.name.encode())).number
        slab = _take(self._channel, self._arena, fetched_path(self._arena, self._rank, index).name, size)
        if slab.state.iteration != index.iteration:
            self._arena.drop(slab.state.name)
            raise CheckpointError(f"{index.name} does not hold iteration {index.iteration} any more")
        return slab

    def drop(self, name: str) -> None:
        """See `Place.drop`."""
        self._ask(Message(Kind.DROP, data=name.encode()))

    def _ask(self, message: Message) -> Message:
        self._channel.send(message)
        return _reply(self._channel)


def answer(channel: Channel, arena: Arena, asked: Message) -> None:
    """Do what another rank asks of this machine's memory; where it cannot be done, that rank is told why.

    Raises:
        RuntimeError: it is gone, or does not answer in time, or what it sent is no request.
    """
    if asked.kind is Kind.PUT:
        with suppress(CheckpointError, OSError):
            _take(channel, arena, asked.text, asked.number)
        return
    image, reply = None, Message(Kind.DONE)
    try:
        if asked.kind is Kind.OPEN:
            image = arena.image(asked.text, asked.number)
            reply = Message(Kind.DONE, image.size)
        elif asked.kind is Kind.LIST:
            listed = arena.list(int(asked.text) if asked.data else None)
            found = [(one.name, one.rank, one.iteration, one.life, one.kind, "", one.branch) for one in listed]
            reply = Message(Kind.DONE, data=json.dumps(found).encode())
        elif asked.kind is Kind.DROP:
            arena.drop(asked.text)
        else:
            raise RuntimeError(f"rank {channel.peer} sent {asked.kind.name}, which is no request")
    except (CheckpointError, OSError) as error:
        reply = _refusal(error)
    channel.send(reply)
    if image is not None:
        with suppress(CheckpointError, OSError):
            _give(channel, image)


def _give(channel: Channel, image: Image, stop: threading.Event | None = None) -> None:
    """Send a slab, once the other rank has the memory for it.

    Raises:
        CheckpointError, OSError: there, or of the image; the other rank knows it.
    """
    _reply(channel)
    try:
        for offset, piece in image.pieces():
            if stop is not None and stop.is_set():
                raise CheckpointError("this rank ends")
            channel.send(Message(Kind.PIECE, offset, piece))
    except (CheckpointError, OSError) as error:
        channel.send(_refusal(error))
        with suppress(CheckpointError):
            _reply(channel)
        raise
    channel.send(Message(Kind.DONE))
    _reply(channel, image.size / VERIFIED_BYTES_A_SECOND)


def _take(channel: Channel, arena: Arena, name: str, size: int) -> OpenState:
    """Put a slab of so many bytes that the other rank gives; raises as `Arena.put`, and the other rank knows it."""
    try:
        slab = arena.put(name, _Arriving(channel, size))
    except (CheckpointError, OSError) as error:
        channel.send(_refusal(error))
        raise
    channel.send(Message(Kind.DONE))
    return slab


@dataclass(frozen=True)
class _Arriving:
    """An `Image` that the other rank gives."""

    channel: Channel
    size: int

    def pieces(self) -> Iterator[tuple[int, memoryview]]:
        self.channel.send(Message(Kind.DONE))  # the memory is there
        while (message := self.channel.receive()).kind is Kind.PIECE:
            yield message.number, memoryview(message.data)
        _require_done(message, self.channel)


def _reply(channel: Channel, more_seconds: float = 0.0) -> Message:
    """What the other rank says; CheckpointError where it refuses."""
    return _require_done(channel.receive(more_seconds), channel)


def _require_done(message: Message, channel: Channel) -> Message:
    if message.kind is Kind.REFUSED:
        raise CheckpointError(f"rank {channel.peer}: {message.text}")
    if message.kind is not Kind.DONE:
        raise RuntimeError(f"rank {channel.peer} sent {message.kind.name} in the middle of a request")
    return message


def _refusal(error: Exception) -> Message:
    return Message(Kind.REFUSED, data=str(error).encode())
