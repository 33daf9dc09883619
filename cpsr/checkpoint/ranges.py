"""Ranges of tensors: which are still to be found, and reading them from files, verified without the rest."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy
import torch
import xxhash
from numpy.typing import NDArray

from cpsr.checkpoint.direct_file import BLOCK_BYTES, HASHED_PIECE_BYTES, PIECE_BYTES, block_buffer, pieces_in, read_at
from cpsr.checkpoint.files import open_plain
from cpsr.checkpoint.manifest import FileRecord
from cpsr.checkpoint.tensor_file import NO_HEADER, PlacedTensor, TensorHeader, bytes_of
from cpsr.checkpoint.verify import DamagedFileError, check_piece, persistently, refused_content, require_same

__all__ = ["MissingRanges", "SlabFile", "WantedRange", "lacking_among"]


class MissingRanges:
    """Ranges of one operator, as elements of the whole parameter; each is taken once.

    Args:
        offset: first element of the slice.
        numel: elements of it.

    Attributes:
        left: those that no slice has given yet.
    """

    def __init__(self, offset: int, numel: int) -> None:
        self.left: list[tuple[int, int]] = [(offset, offset + numel)] if numel else []

    def take(self, offset: int, numel: int) -> Iterator[tuple[int, int]]:
        """The ranges that another slice has; they are no longer left once the iterator has ended."""
        first, end = offset, offset + numel
        left: list[tuple[int, int]] = []
        for start, stop in self.left:
            begin, finish = max(start, first), min(stop, end)
            if begin >= finish:
                left.append((start, stop))
                continue
            yield begin, finish
            left += [part for part in ((start, begin), (finish, stop)) if part[0] < part[1]]
        self.left = left


def lacking_among(
    operators: Mapping[str, bool],
    parts: Mapping[int, Mapping[str, tuple[Sequence[int], int, int]]],
    ages: Mapping[int, Mapping[str, int]],
) -> str | None:
    """What these parts lack of the model together, in a sentence; see `cpsr.checkpoint.commit.Missing`.

    Args:
        operators: of the model; whether ranks hold blocks of it, which one rank each has and no range tells.
        parts: by rank and name, the whole shape, the first element and the number of elements.
        ages: not looked at.
    """
    left: dict[str, MissingRanges] = {}
    for part in parts.values():
        for name, (shape, offset, numel) in part.items():
            size = 0 if operators.get(name) else math.prod(shape)
            for _ in left.setdefault(name, MissingRanges(0, size)).take(offset, numel):
                pass
    if absent := sorted(operators.keys() - left.keys()):
        return f"no rank saved {absent[0]}"
    lacking = ((name, *one.left[0]) for name, one in left.items() if one.left)
    return next((f"no rank saved elements {start} to {stop} of {name}" for name, start, stop in lacking), None)


_AT_ONCE = PIECE_BYTES // HASHED_PIECE_BYTES  # hashed pieces of one transfer
_Place = tuple[int, NDArray[numpy.uint8]]  # first byte in the file, and memory


@dataclass(frozen=True)
class WantedRange:
    """Elements of a tensor in a file.

    Attributes:
        key: the tensor's name in the file, as `param/h.0.weight`.
        start: the first wanted element of the flattened tensor.
        target: gets as many elements as it has; of the tensor's dtype, 1-D, contiguous, on the CPU.
    """

    key: str
    start: int
    target: torch.Tensor

    def __post_init__(self) -> None:
        target = self.target
        if self.start < 0 or target.dim() != 1 or not target.is_contiguous() or target.device.type != "cpu":
            raise ValueError(
                f"the range of {self.key!r} from {self.start} goes to a tensor of shape {tuple(target.shape)} on "
                f"{target.device}; it needs a start from 0 on, and one that is 1-D and contiguous on the CPU"
            )


class SlabFile:
    """A file of tensors, from which ranges are read past the page cache, in hashed pieces that are verified.

    Only the pieces with the header, once, and then those with the ranges are read, into one buffer of 16 MiB at most.
    Where the hashes of the pieces are not known, all are read, and compared with the hash of the file.

    Args:
        path: of the file.
        record: what it should be.

    Attributes:
        path, record: as given.
    """

    def __init__(self, path: Path, record: FileRecord) -> None:
        self._descriptor: int | None = None
        self._tensors: Mapping[str, PlacedTensor] = {}
        self.path, self.record = path, record

    def hold(self) -> None:
        """Open it now: what deletes it later does not disturb its reader. It is closed with this object.

        Raises:
            CheckpointCorruptError, UnreadableFileError: it is missing, or cannot be opened now.
        """
        self._descriptor = persistently(partial(open_plain, direct=True), self.path)

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def read(self, wanted: Sequence[WantedRange]) -> int:
        """Copy ranges of its tensors to their targets, in any order; several of one tensor may overlap.

        Returns:
            The bytes that were read from the disk. After an error the targets hold anything.

        Raises:
            CheckpointCorruptError: the file is missing, has another length, or a piece that was read another hash; or
                it has no such tensor, one of another dtype, or a shorter one.
            UnreadableFileError: the file system refuses to give it, also when asked again.
        """
        return persistently(lambda _: self._read(lambda _: wanted), self.path)

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors whose names begin so, in memory of their own; raises as `read`."""
        found: dict[str, torch.Tensor] = {}

        def choose(tensors: Mapping[str, PlacedTensor]) -> list[WantedRange]:
            for name, one in tensors.items():
                if name.startswith(prefix):
                    found[name] = torch.empty(one.shape, dtype=one.dtype, device="cpu")
            return [WantedRange(name, 0, tensor.view(-1)) for name, tensor in found.items()]

        persistently(lambda _: self._read(choose), self.path)
        return found

    def _read(self, choose: Callable[[Mapping[str, PlacedTensor]], Sequence[WantedRange]]) -> int:
        """One attempt of `read`."""
        with _Pieces(self.path, self.record, self._descriptor) as pieces:
            try:
                tensors = self._tensors or _header(pieces, self.record)
                left = _places(tensors, choose(tensors))
            except NO_HEADER as error:
                raise refused_content(self.path, str(error)) from error
            runs, begun = _runs(left), list[_Place]()
            left.reverse()
            for begin, after in runs:
                piece = pieces.read(begin, after)
                start, end = begin * HASHED_PIECE_BYTES, begin * HASHED_PIECE_BYTES + len(piece)
                while left and left[-1][0] < end:
                    begun.append(left.pop())
                values = numpy.frombuffer(piece, numpy.uint8)
                for first, memory in begun:
                    of, to = max(first, start), min(first + memory.nbytes, end)
                    numpy.copyto(memory[of - first : to - first], values[of - start : to - start])
                begun = [(first, memory) for first, memory in begun if first + memory.nbytes > end]
            read = pieces.finish()
        self._tensors = tensors
        return read


def _header(pieces: "_Pieces", record: FileRecord) -> dict[str, PlacedTensor]:
    """The tensors of a file by name; any of `NO_HEADER` where it describes none."""
    header, begin = TensorHeader(record.bytes), 0
    while not header.whole and begin < pieces.count:
        after = min(pieces_in(header.end), begin + _AT_ONCE)
        header.take(pieces.read(begin, after))
        begin = after
    if not header.whole:
        raise ValueError(f"it ends at byte {record.bytes}, within its header")
    return {one.name: one for one in header.tensors()}


class _Pieces:
    """The hashed pieces of a file, read past the page cache and verified, at most 16 at a time.

    Raises:
        CheckpointCorruptError: it has another length than was committed.
    """

    def __init__(self, path: Path, record: FileRecord, descriptor: int | None) -> None:
        self._path, self._record = path, record
        self._descriptor = open_plain(path, direct=True) if descriptor is None else os.dup(descriptor)
        try:
            size = os.fstat(self._descriptor).st_size
            if size != record.bytes:
                raise DamagedFileError(path, f"has {size} bytes, {record.bytes} were committed")
            self.count = pieces_in(size)
            self._buffer = block_buffer(min(PIECE_BYTES, size))
        except BaseException:
            os.close(self._descriptor)
            raise
        self._held = 0, 0  # what the buffer holds
        self._hashes: dict[int, str] = {}  # of those that were read, where they are not known
        self._read = 0

    def __enter__(self) -> "_Pieces":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self, begin: int, after: int) -> memoryview:
        """The bytes of these pieces; valid until the next call."""
        path, record = self._path, self._record
        start, end = begin * HASHED_PIECE_BYTES, min(after * HASHED_PIECE_BYTES, record.bytes)
        room = self._buffer[: -(-(end - start) // BLOCK_BYTES) * BLOCK_BYTES]
        first = self._held[1] if begin == self._held[0] and after >= self._held[1] else begin  # that is not there yet
        self._held = 0, 0
        there = (first - begin) * HASHED_PIECE_BYTES
        count = read_at(self._descriptor, room[there:], start + there, end - start - there)
        self._read += count
        if count < end - start - there:
            raise DamagedFileError(path, f"has {start + there + count} bytes, {record.bytes} were committed")
        for index in range(first, after):
            piece = room[(index - begin) * HASHED_PIECE_BYTES : min((index + 1) * HASHED_PIECE_BYTES, end) - start]
            found = xxhash.xxh3_64_hexdigest(piece)
            if record.pieces is not None:
                check_piece(path, record, index, found)
            elif self._hashes.setdefault(index, found) != found:
                raise DamagedFileError(path, "changes while it is read")
        self._held = begin, after
        return room[: end - start]

    def finish(self) -> int:
        """Check what could not be checked yet; returns the bytes that were read."""
        if self._record.pieces is None:
            for index in range(self.count):
                if index not in self._hashes:
                    self.read(index, index + 1)
            hashes = "".join(self._hashes[index] for index in range(self.count))
            require_same(self._path, FileRecord.of_pieces(self._record.bytes, hashes), self._record)
        return self._read


def _places(tensors: Mapping[str, PlacedTensor], wanted: Sequence[WantedRange]) -> list[_Place]:
    """Where the ranges lie in the file and in memory, the first one first; ValueError where one does not lie there."""
    found = []
    for one in wanted:
        tensor, target = tensors.get(one.key), one.target
        if tensor is None:
            raise ValueError(f"it has no tensor {one.key!r}")
        if tensor.dtype != target.dtype:
            raise ValueError(f"{one.key!r} is of {tensor.dtype}, {target.dtype} is wanted")
        if one.start + target.numel() > tensor.numel:
            raise ValueError(
                f"{one.key!r} has {tensor.numel} elements, {one.start} to {one.start + target.numel()} are wanted"
            )
        if target.nbytes:
            found.append((tensor.first + one.start * target.element_size(), bytes_of(target)))
    return sorted(found, key=lambda place: place[0])


def _runs(places: Sequence[_Place]) -> list[tuple[int, int]]:
    """The hashed pieces with these ranges, each once, in runs of at most 16."""
    pieces: list[tuple[int, int]] = []
    for first, memory in places:
        begin, after = first // HASHED_PIECE_BYTES, pieces_in(first + memory.nbytes)
        if pieces and begin <= pieces[-1][1]:
            begin, after = pieces[-1][0], max(pieces.pop()[1], after)
        pieces.append((begin, after))
    return [(one, min(one + _AT_ONCE, after)) for begin, after in pieces for one in range(begin, after, _AT_ONCE)]
