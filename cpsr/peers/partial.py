"""What a holder is sent of a snapshot: what it lacks in the same place, and of experts as many as its link takes."""

import json
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
from numpy.typing import NDArray

from cpsr.checkpoint.arena import PIECE_BYTES, Sealed
from cpsr.checkpoint.memory_states import (
    HASH_PLACE,
    PAGE_BYTES,
    PENDING_HASH,
    MemoryState,
    hash_of,
)
from cpsr.checkpoint.parts import REST, operator_of
from cpsr.checkpoint.place import Image
from cpsr.errors import CheckpointError

if TYPE_CHECKING:  # loaded when a run opens, by what the job uses
    from cpsr.experts.in_memory import InMemory

__all__ = ["Partial", "Sending"]

MEASURED_SENDS = 8  # the link's rate is the median of this many


@dataclass(frozen=True)
class Partial:
    """An `Image` of a snapshot of which the other machine has some bytes already, at their place.

    Attributes:
        whole: the snapshot.
        header: with what the replica then holds of each part, and its hashes.
        spans: of the file behind the header, first byte and the one after the last, that are sent.
    """

    whole: Sealed
    header: bytes
    spans: Sequence[tuple[int, int]]

    @property
    def size(self) -> int:
        """Of the whole file."""
        return self.whole.size

    def pieces(self) -> Iterator[tuple[int, memoryview]]:
        """See `Image.pieces`; OSError where the file cannot be read."""
        yield from self.whole.between(self.spans)
        header = memoryview(self.header)
        for at in range(PAGE_BYTES, len(header), PIECE_BYTES):
            yield at, header[at : at + PIECE_BYTES]
        yield 0, header[:PAGE_BYTES]


@dataclass
class _Slot:
    """What a holder has in one place.

    Attributes:
        layout: of the parts; another one has other bytes at the same place.
        branch: of the life; the run has left those before.
        digests: of each segment.
        taken_at: iteration of each part.
        tokens: that each expert there has learned from; None: not known.
        ages: snapshots since each expert was sent last.
        number: snapshots that have been sent there.
    """

    layout: tuple[str, str]
    branch: int
    digests: list[str]
    taken_at: dict[str, int]
    tokens: NDArray[numpy.float64] | None
    ages: NDArray[numpy.float64] | None
    number: int = 0


class Sending:
    """Chooses what one holder is sent, and remembers what it has; for one thread.

    Each of the holder's places keeps what it has of an expert that is left out. What the same place holds already is
    not sent again.

    Args:
        experts: select among the experts that have changed; None: all are sent.

    Source: moetion, section 4.2 (remote budget).
    """

    def __init__(self, experts: "InMemory | None") -> None:
        self._experts = experts
        self._slots: dict[str, _Slot] = {}
        self._next: _Slot | None = None
        self._rates: deque[float] = deque(maxlen=MEASURED_SENDS)  # bytes per second
        self._bytes = 0
        self._parts: tuple[tuple[str, str], list[str]] = ("", ""), []

    def image(self, name: str, whole: Sealed) -> Image:
        """What is sent for that place, of which nothing is known until `arrived`.

        Raises:
            CheckpointError: the snapshot is not there any more.
        """
        slot, self._next, self._bytes = self._slots.pop(name, None), None, whole.size
        if self._experts is None or (state := whole.described()).kind != "snapshot":
            return whole
        self._bytes = _bytes_of(state, state.spans())
        layout = state.index["operators"], state.index["segments"]
        digests, taken_at = json.loads(state.index["hashes"]), json.loads(state.index["taken_at"])
        tokens = self._experts.held_tokens(state.iteration)
        now = self._next = _Slot(
            layout, state.branch, digests, taken_at, tokens, None if tokens is None else numpy.zeros(len(tokens))
        )
        if slot is None or (slot.layout, slot.branch) != (layout, state.branch):
            return whole
        now.number = slot.number + 1
        parts = self._parts_of(state)
        # What other ranks of the machine hold has no hash, and is not sent.
        changed = [number for number, digest in enumerate(digests) if digest and digest != slot.digests[number]]
        experts = {parts[number] for number in changed} & slot.taken_at.keys() & {*self._experts.units.values()}
        left_out = self._left_out(state, slot, experts, changed)
        sent = {number for number in changed if parts[number] not in left_out}
        for number, part in enumerate(parts):
            if part in left_out:
                now.digests[number] = slot.digests[number]
        now.taken_at.update({part: slot.taken_at[part] for part in left_out})
        spans = state.spans(sent)
        self._bytes = _bytes_of(state, spans)
        return Partial(whole, _header(state, whole, now), spans)

    def arrived(self, name: str, seconds: float) -> None:
        """The holder has the last image in that place, after so many seconds."""
        if seconds > 0:
            self._rates.append(self._bytes / seconds)
        if self._next is not None:
            self._slots[name] = self._next

    def _left_out(self, state: MemoryState, slot: _Slot, experts: set[str], changed: Sequence[int]) -> frozenset[str]:
        """Of these experts, which have changed, those that the link does not take until the next snapshot."""
        now, own = self._next, self._experts
        assert now is not None
        assert own is not None
        if not self._rates or now.tokens is None or slot.tokens is None or slot.ages is None:
            return frozenset()
        segments, parts = json.loads(slot.layout[1]), self._parts_of(state)
        rest = sum(segments[number][1] - segments[number][0] for number in changed if parts[number] not in experts)
        rest += state.size.header_bytes + int(state.index["file_bytes"]) - state.size.bytes
        link_bytes = statistics.median(self._rates) * own.period_seconds - rest
        sent = own.for_peers(slot.number, now.tokens - slot.tokens, slot.ages, link_bytes, experts)
        now.tokens, now.ages = own.kept(sent, (now.tokens, slot.tokens), slot.ages, experts)
        return frozenset(experts - sent)

    def _parts_of(self, state: MemoryState) -> list[str]:
        """The part of each segment."""
        layout = state.index["operators"], state.index["segments"]
        if self._parts[0] != layout:
            of_operator = {name: part for name, (*_, part) in json.loads(layout[0]).items()}
            ends = [end for _, end in json.loads(layout[1])]
            parts = [REST] * len(ends)
            for one in state.placed:
                if one.numel and (part := of_operator.get(operator_of(one.name), REST)) != REST:
                    parts[int(numpy.searchsorted(ends, one.first - state.size.header_bytes, side="right"))] = part
            self._parts = layout, parts
        return self._parts[1]


def _bytes_of(state: MemoryState, spans: Sequence[tuple[int, int]]) -> int:
    return state.size.header_bytes + sum(end - begin for begin, end in spans)


def _header(state: MemoryState, whole: Sealed, slot: _Slot) -> bytes:
    """The header of a replica that holds these parts; CheckpointError where the snapshot is not there any more."""
    held: Mapping[str, object] = {"taken_at": slot.taken_at, "hashes": slot.digests}
    content = state.header.content
    text = content.rstrip(b" ")
    for name, value in held.items():
        before = json.dumps({name: state.index[name]}, separators=(",", ":"), ensure_ascii=False).encode()[1:-1]
        after = json.dumps({name: json.dumps(value)}, separators=(",", ":"), ensure_ascii=False).encode()[1:-1]
        if text.count(before) != 1:
            raise CheckpointError(f"the header of {whole.path.name} is not as it was written")
        text = text.replace(before, after)
    if len(text) > len(content):
        raise CheckpointError(f"the header of a replica of {whole.path.name} does not fit")
    header = bytearray(text.ljust(len(content)))
    header[HASH_PLACE] = PENDING_HASH.encode()
    with whole.path.open("rb") as file:
        file.seek(state.size.bytes)
        behind = file.read(whole.size - state.size.bytes)
    header[HASH_PLACE] = hash_of(bytes(header), behind).encode()
    return bytes(header)
