"""Parts of a host buffer that are copied, hashed and sent one by one: experts, what ranks share, and the rest."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy
import torch

from cpsr.checkpoint.direct_file import hash_pieces
from cpsr.errors import SaveError
from cpsr.state.shard import Shard

__all__ = ["REST", "Held", "Parts", "Segment", "operator_of"]

REST = ""  # everything that has no part of its own


@dataclass(frozen=True)
class Segment:
    """Bytes of a buffer that belong to one part.

    Attributes:
        part: which one.
        begin: first byte.
        end: byte after the last one.
    """

    part: str
    begin: int
    end: int


class Parts:
    """Which bytes of a buffer belong to which part; the same for all buffers of a pool.

    Args:
        tensors: key of `Shard.tensors`, offset and size in bytes of each tensor in the buffer, in its order.
        size: of the buffer.
        units: operator -> part, of operators in a part of their own; all others are `REST`.
        begins: bytes at which a segment begins even if the part does not change.

    Attributes:
        segments: cover the buffer without gaps, in its order.
        names: of the parts.
        bytes: of each part.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, int, int]],
        size: int,
        units: Mapping[str, str] | None = None,
        begins: Collection[int] = (),
    ) -> None:
        self._units = {} if units is None else dict(units)
        found: list[tuple[str, int]] = []
        names = {REST}  # also of parts without bytes
        for key, offset, length in tensors:
            part = self.of(operator_of(key))
            names.add(part)
            if length and (not found or found[-1][0] != part or offset in begins):
                found.append((part, offset if found else 0))
        ends = [begin for _, begin in found[1:]] + [size]
        self.segments = tuple(
            Segment(part, begin, end) for (part, begin), end in zip(found, ends if found else [], strict=True)
        )
        self.names = frozenset(names)
        self.bytes = Counter[str]()
        for segment in self.segments:
            self.bytes[segment.part] += segment.end - segment.begin

    def of(self, operator: str) -> str:
        """The part of an operator."""
        return self._units.get(operator, REST)

    def between(self, begin: int, end: int) -> Iterator[Segment]:
        """The segments that lie whole between these bytes."""
        return (segment for segment in self.segments if begin <= segment.begin and segment.end <= end)

    def of_all(self, operators: Collection[str]) -> frozenset[str]:
        """The parts of these operators, which a snapshot may leave out.

        Raises:
            SaveError: an operator has no part of its own.
        """
        found = frozenset(map(self.of, operators))
        if REST in found:
            name = min(name for name in operators if self.of(name) == REST)
            raise SaveError(f"{name} has no part of its own, and is in every snapshot")
        return found


class Held:
    """What one buffer holds of each part.

    Args:
        parts: of the buffer.
        content: all its bytes.

    Attributes:
        parts: of the buffer.
        content: as given.
        taken_at: iteration of each part that is complete.
        digests: the hashes of each segment's MiB (`hash_pieces`); only of complete parts.
    """

    def __init__(self, parts: Parts, content: torch.Tensor) -> None:
        self.parts = parts
        self.content, self._bytes = content, content.numpy()
        self.taken_at: dict[str, int] = {}
        self.digests: dict[Segment, bytes] = {}

    def overwrite(self, names: Collection[str]) -> None:
        """These parts are about to be overwritten."""
        for name in names:
            self.taken_at.pop(name, None)
        for segment in self.parts.segments:
            if segment.part in names:
                self.digests.pop(segment, None)

    def fill(self, names: Collection[str], iteration: int) -> None:
        """These parts are complete, as of this iteration."""
        self.taken_at.update(dict.fromkeys(names, iteration))

    def fill_loaded(self, shard: Shard, iteration: int) -> None:
        """A state of this iteration was loaded into the buffer: each part is of the oldest one of its operators."""
        self.fill(self.parts.names, iteration)
        for name, operator in shard.operators.items():
            part = self.parts.of(name)
            self.taken_at[part] = min(self.taken_at[part], operator.iteration)

    def carry(self, taken_at: Mapping[str, int], source: "Held") -> None:
        """Copy each part that is not of the wanted iteration from another buffer, with its hashes.

        Args:
            taken_at: the wanted iteration of every part.
            source: a buffer that nobody changes meanwhile.

        Raises:
            SaveError: the source has a part of another iteration.
        """
        missing = {part for part, at in taken_at.items() if self.taken_at.get(part) != at}
        for part in missing:
            if source.taken_at.get(part) != taken_at[part]:
                raise SaveError(
                    f"no buffer holds expert {part} of iteration {taken_at[part]}, which the snapshot before had"
                )
        self.overwrite(missing)
        for segment in self.parts.segments:
            if segment.part in missing:
                span = slice(segment.begin, segment.end)
                numpy.copyto(self._bytes[span], source._bytes[span])
                if segment in source.digests:
                    self.digests[segment] = source.digests[segment]
        self.taken_at.update({part: taken_at[part] for part in missing})

    def hash_rest(self, segments: Iterable[Segment] | None = None) -> None:
        """Hash those of these segments whose hash is not known; None: of all that are complete."""
        complete = (segment for segment in self.parts.segments if segment.part in self.taken_at)
        for segment in complete if segments is None else segments:
            if segment not in self.digests:
                self.digests[segment] = hash_pieces(self._bytes[segment.begin : segment.end].data)

    def by_address(self) -> dict[int, tuple[int, bytes]]:
        """Address of the first byte of each segment -> its length in bytes, and the hashes of its MiB."""
        start = self._bytes.ctypes.data
        return {start + one.begin: (one.end - one.begin, digests) for one, digests in self.digests.items()}


def operator_of(key: str) -> str:
    """The operator of a tensor; empty of a buffer outside the optimizer. No moment's name has a slash."""
    kind, _, name = key.partition("/")
    return name if kind == "param" else name.partition("/")[2] if kind == "moment" else ""
