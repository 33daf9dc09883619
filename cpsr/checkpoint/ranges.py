"""Ranges of tensors: which are still to be found, and reading them from files, verified without the rest."""

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
import xxhash
from numpy.typing import NDArray

from cpsr.checkpoint.direct_file import BLOCK_BYTES, HASHED_PIECE_BYTES, PIECE_BYTES, block_buffer, pieces_in, read_at
from cpsr.checkpoint.files import open_plain
from cpsr.checkpoint.manifest import FileRecord
from cpsr.checkpoint.tensor_file import NO_HEADER, PlacedTensor, TensorHeader, bytes_of
from cpsr.checkpoint.verify import DamagedFileError, check_piece, persistently, refused_content

__all__ = ["MissingRanges", "WantedRange", "lacking_among", "read_ranges"]


class MissingRanges:
    """Ranges of one operator, as elements of the whole parameter; each is taken once.

    Args:
        offset: first element of the slice.
        numel: elements of it.

    Attributes:
        left: those that nobody has given yet.
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
    operators: Collection[str],
    parts: Mapping[int, Mapping[str, tuple[Sequence[int], int, int]]],
    ages: Mapping[int, Mapping[str, int]],
) -> str | None:
    """What these parts lack of the model together, in a sentence; see `cpsr.checkpoint.commit.Missing`.

    Args:
        operators: of the model.
        parts: by rank and name, the whole shape, the first element and the number of elements.
        ages: not looked at.
    """
    left: dict[str, MissingRanges] = {}
    for part in parts.values():
        for name, (shape, offset, numel) in part.items():
            for _ in left.setdefault(name, MissingRanges(0, math.prod(shape))).take(offset, numel):
                pass
    if absent := sorted(set(operators) - left.keys()):
        return f"nobody has {absent[0]}"
    lacking = ((name, *one.left[0]) for name, one in left.items() if one.left)
    return next((f"nobody has elements {start} to {stop} of {name}" for name, start, stop in lacking), None)


_AT_ONCE = PIECE_BYTES // HASHED_PIECE_BYTES  # hashed pieces of one transfer


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


def read_ranges(path: Path, record: FileRecord, wanted: Sequence[WantedRange]) -> int:
    """Copy ranges of a file's tensors to their targets, from hashed pieces that are read past the page cache.

    Only the pieces with the header and the ranges are read, each once and into one buffer of 16 MiB at most.

    Args:
        path: of the file.
        record: what it should be, with the hashes of its pieces.
        wanted: in any order; several of one tensor may overlap.

    Returns:
        The bytes that were read from the disk. After an error the targets hold anything.

    Raises:
        CheckpointCorruptError: the file is missing, has another length, or a piece that was read another hash; or it
            has no such tensor, one of another dtype, or a shorter one.
        UnreadableFileError: the file system refuses to give it, also when asked again.
    """
    if record.pieces is None:
        raise DamagedFileError(path, "is not described with hashes of its pieces")
    return persistently(lambda path: _read_pieces(path, record, wanted), path)


class _Ranges:
    """Takes bytes of one file in order, its header first, and copies what is wanted of them.

    Args:
        file_bytes: length of the whole file.
        wanted: ranges of its tensors.
    """

    def __init__(self, file_bytes: int, wanted: Sequence[WantedRange]) -> None:
        self._bytes = file_bytes
        self._wanted = wanted
        self._taken = 0  # the byte behind what was taken
        self._header = TensorHeader(file_bytes)
        self._left: list[tuple[int, NDArray[numpy.uint8]]] = []  # first byte in the file, and memory; the next one last
        self._begun: list[tuple[int, NDArray[numpy.uint8]]] = []  # of which some bytes were taken
        self._problem: str | None = None

    def take(self, piece: memoryview, start: int | None = None) -> None:
        """Take bytes from a place in the file on; None: those that follow."""
        start = self._taken if start is None else start
        end = self._taken = start + len(piece)
        if not self._header.whole and self._problem is None:
            try:
                self._header.take(piece)
                if self._header.whole:
                    self._left = self._find({one.name: one for one in self._header.tensors()})
            except NO_HEADER as error:
                self._problem = str(error)
        values = numpy.frombuffer(piece, numpy.uint8)
        while self._left and self._left[-1][0] < end:
            self._begun.append(self._left.pop())
        for first, memory in self._begun:
            begin, after = max(first, start), min(first + memory.nbytes, end)
            numpy.copyto(memory[begin - first : after - first], values[begin - start : after - start])
        self._begun = [one for one in self._begun if one[0] + one[1].nbytes > end]

    def pieces(self, path: Path) -> Iterator[tuple[int, int]]:
        """The hashed pieces to take, as ranges of at most 16; the next one once the one before was taken.

        Raises:
            DamagedFileError: as `require`, once the header was taken.
        """
        taken = 0
        while not self._header.whole and self._problem is None and taken < pieces_in(self._bytes):
            begin, taken = taken, min(pieces_in(self._header.end), taken + _AT_ONCE)
            yield begin, taken
        self.require(path, header=True)
        runs: list[tuple[int, int]] = []
        for first, memory in [*self._begun, *reversed(self._left)]:
            begin, after = max(first // HASHED_PIECE_BYTES, taken), pieces_in(first + memory.nbytes)
            if runs and begin <= runs[-1][1]:
                begin, after = runs[-1][0], max(runs.pop()[1], after)
            runs.append((begin, after))
        for begin, after in runs:
            for first in range(begin, after, _AT_ONCE):
                yield first, min(first + _AT_ONCE, after)

    def require(self, path: Path, *, header: bool = False) -> None:
        """Raise DamagedFileError where the file does not hold what is wanted, or ended before it.

        Args:
            path: of the file.
            header: judge only what the header tells.
        """
        if self._problem is None and (not self._header.whole or ((self._left or self._begun) and not header)):
            self._problem = f"it ends at byte {self._taken}, within its header or a tensor"
        if self._problem is not None:
            raise refused_content(path, self._problem)

    def _find(self, tensors: dict[str, PlacedTensor]) -> list[tuple[int, NDArray[numpy.uint8]]]:
        """Where the ranges lie, the first one last."""
        found = []
        for one in self._wanted:
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
        return sorted(found, key=lambda place: -place[0])


def _read_pieces(path: Path, record: FileRecord, wanted: Sequence[WantedRange]) -> int:
    """One attempt of `read_ranges` by pieces."""
    descriptor = open_plain(path, direct=True)
    try:
        size = os.fstat(descriptor).st_size
        if size != record.bytes:
            raise DamagedFileError(path, f"has {size} bytes, {record.bytes} were committed")
        ranges, read = _Ranges(size, wanted), 0
        buffer = block_buffer(min(PIECE_BYTES, size))
        for begin, after in ranges.pieces(path):
            start, end = begin * HASHED_PIECE_BYTES, min(after * HASHED_PIECE_BYTES, size)
            room = buffer[: -(-(end - start) // BLOCK_BYTES) * BLOCK_BYTES]
            count = read_at(descriptor, room, start, end - start)
            if count < end - start:
                raise DamagedFileError(path, f"has {start + count} bytes, {size} were committed")
            for index in range(begin, after):
                piece = room[(index - begin) * HASHED_PIECE_BYTES : min((index + 1) * HASHED_PIECE_BYTES, end) - start]
                check_piece(path, record, index, xxhash.xxh3_64_hexdigest(piece))
            ranges.take(room[: end - start], start)
            read += end - start
        return read
    finally:
        os.close(descriptor)
