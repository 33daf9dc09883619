"""Messages between two ranks over a gloo group: requests in one direction, replies in the other."""

import enum
import threading
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import Work

from cpsr.checkpoint.arena import PIECE_BYTES
from cpsr.ranks.group import SideGroup

__all__ = ["PEER_SECONDS", "Channel", "Kind", "Message"]

_WORDS = 3
# How often a rank that waits for the next request looks whether it begins: soon enough for what is sent every few
# seconds at most, and next to nothing of a core.
IDLE_SECONDS = 0.05
PEER_SECONDS = 60.0  # a peer that sends or takes nothing for so long, when it is its turn, is given up


class Kind(enum.IntEnum):
    """Kind of a message; never 0, which its first word holds before it has arrived."""

    LIST = 1  # requests: of `Place`, and that nothing comes after this
    PUT = 2
    OPEN = 3
    DROP = 4
    END = 5
    PIECE = 6  # bytes of a slab
    DONE = 7  # replies, and the end of the pieces: it went well, or why not
    REFUSED = 8


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        kind: what it is.
        number: bytes of the slab that is about to be sent; of a piece, where in it it lies.
        data: bytes of a piece, or text. Of a message that was received they are valid until the next one.
    """

    kind: Kind
    number: int = 0
    data: bytes | bytearray | memoryview = b""

    @property
    def text(self) -> str:
        """The data as text."""
        return bytes(self.data).decode()


class Channel:
    """Messages between this rank and one other, for one thread of each.

    Args:
        group: holds both. Where one does not answer in time, gloo closes all connections of the group: what must not
            end together needs groups of its own.
        peer: the other rank.
        timeout_seconds: how long the other rank may take for one message or its bytes.
        serves: whether requests come from the other rank; they and replies never meet, though both may serve.
    """

    def __init__(self, group: SideGroup, peer: int, timeout_seconds: float, *, serves: bool = False) -> None:
        self.peer = peer
        self._group, self._serves = group, serves
        self._timeout = timedelta(seconds=timeout_seconds)
        self._room = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")
        self._view = memoryview(self._room.numpy())  # type: ignore[arg-type] # numpy's stub knows no buffers yet

    def send(self, message: Message) -> None:
        """Say something.

        Raises:
            RuntimeError: the other rank is gone, or took nothing in time; the group cannot be used any more.
        """
        data = memoryview(message.data)
        if data.readonly:
            data = memoryview(bytearray(data))  # torch warns of memory that it must not write to
        self._send(torch.tensor([message.kind, message.number, len(data)], dtype=torch.int64, device="cpu"))
        if data:
            self._send(torch.frombuffer(data, dtype=torch.uint8))

    def receive(self, more_seconds: float = 0.0) -> Message:
        """Wait for a message, for so long beyond the timeout.

        Raises:
            RuntimeError: the other rank is gone, or sent nothing in time, or no message; the group cannot be used any
                more.
        """
        words = torch.zeros(_WORDS, dtype=torch.int64, device="cpu")
        self._ask(words).wait(self._timeout + timedelta(seconds=more_seconds))
        return self._message(words)

    def receive_unless(self, stop: threading.Event) -> Message | None:
        """Wait for a message without a timeout; None, for good, once this rank is asked to stop.

        Raises:
            RuntimeError: as `receive`.
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
        kind, number, length = words.tolist()
        if kind not in list(Kind) or number < 0 or not 0 <= length <= len(self._view):
            raise RuntimeError(f"rank {self.peer} sent no message of this version: {words.tolist()}")
        if length:
            self._ask(self._room[:length]).wait(self._timeout)
        return Message(Kind(kind), number, self._view[:length])

    def _send(self, tensor: torch.Tensor) -> None:
        self._group.send(tensor, self.peer, int(self._serves)).wait(self._timeout)

    def _ask(self, tensor: torch.Tensor) -> Work:
        return self._group.receive(tensor, self.peer, int(not self._serves))
