"""Copies of a snapshot on the host: planned once, in the order of the buffer, and hashed while in the cache."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy
import torch
import xxhash
from numpy.typing import NDArray

from cpsr.checkpoint.buffers import Span
from cpsr.checkpoint.parts import Segment

__all__ = ["HostCopyPlan", "copy_beside_training"]

# A piece is hashed right after it was copied, while a core's cache still has it: copy and hash together then take 1.2
# times the processor time of the copy alone, and 1.7 times one after the other.
PIECE_BYTES = 1 << 20
# Torch copies smaller tensors with the calling thread alone. Its copy of a larger one would start a second team of
# threads, for whose displaced members the training thread waits.
SMALL_ELEMENTS = 1 << 15

_Bytes = NDArray[numpy.uint8]


@dataclass(frozen=True)
class _Piece:
    """One copy: small tensors in one call, or bytes of a large one.

    Attributes:
        targets, sources: tensors; empty for bytes.
        target_bytes, source_bytes: of a large tensor; empty for tensors.
        end: byte of the buffer behind the piece.
    """

    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    target_bytes: _Bytes
    source_bytes: _Bytes
    end: int

    def copy(self) -> None:
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)
        else:
            numpy.copyto(self.target_bytes, self.source_bytes)


_NO_BYTES: _Bytes = numpy.empty(0, dtype=numpy.uint8)


class HostCopyPlan:
    """The copies that bring tensors of the host into one buffer, by its segments.

    Args:
        spans: in the order of the buffer, each within one segment.
        content: all bytes of the buffer.
        segments: of the buffer.
    """

    def __init__(self, spans: Iterable[Span], content: torch.Tensor, segments: Iterable[Segment]) -> None:
        self._content = content.numpy().data
        self._segments = tuple(segments)
        self._by_segment: list[list[_Piece]] = []
        left = list(reversed(list(spans)))
        for segment in self._segments:
            self._pieces: list[_Piece] = []
            self._by_segment.append(self._pieces)
            own = []
            while left and left[-1].offset < segment.end:
                own.append(left.pop())
            self._add_spans(own, content)

    def _add_spans(self, spans: Iterable[Span], content: torch.Tensor) -> None:
        small: list[tuple[torch.Tensor, torch.Tensor]] = []
        begin = end = 0
        for span in spans:
            target = content[span.offset : span.end].view(span.source.dtype).view(span.source.shape)
            if small and span.end - begin > PIECE_BYTES:
                self._add(small, end)
            if not small:
                begin = span.offset
            if span.source.numel() < SMALL_ELEMENTS or not span.source.is_contiguous():
                small.append((target, span.source))
            else:
                self._add(small, end)
                self._add_large(target, span.source, span.offset)
            end = span.end
        self._add(small, end)

    def _add(self, small: list[tuple[torch.Tensor, torch.Tensor]], end: int) -> None:
        if small:
            targets, sources = [target for target, _ in small], [source for _, source in small]
            self._pieces.append(_Piece(targets, sources, _NO_BYTES, _NO_BYTES, end))
            small.clear()

    def _add_large(self, target: torch.Tensor, source: torch.Tensor, offset: int) -> None:
        into, values = _bytes_of(target), _bytes_of(source)
        for start in range(0, values.nbytes, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, values.nbytes)
            self._pieces.append(_Piece([], [], into[start:stop], values[start:stop], offset + stop))

    @property
    def calls(self) -> int:
        """Number of copies that it makes."""
        return sum(map(len, self._by_segment))

    def run(self, parts: Collection[str]) -> None:
        """Copy these parts."""
        with torch.no_grad():
            for _, _, pieces in self._chosen(parts):
                for piece in pieces:
                    piece.copy()

    def run_hashed(self, parts: Collection[str]) -> dict[int, bytes]:
        """Copy these parts; returns the hash of all bytes of each of their segments, by its place."""
        digests = {}
        with torch.no_grad():
            for place, segment, pieces in self._chosen(parts):
                state, hashed = xxhash.xxh3_128(), segment.begin
                for piece in pieces:
                    piece.copy()
                    state.update(self._content[hashed : piece.end])
                    hashed = piece.end
                state.update(self._content[hashed : segment.end])
                digests[place] = state.digest()
        return digests

    def _chosen(self, parts: Collection[str]) -> Iterator[tuple[int, Segment, list[_Piece]]]:
        for place, (segment, pieces) in enumerate(zip(self._segments, self._by_segment, strict=True)):
            if segment.part in parts:
                yield place, segment, pieces


def _bytes_of(tensor: torch.Tensor) -> _Bytes:
    array: _Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array


def copy_beside_training(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, whatever its type, with the calling thread alone.

    Args:
        pairs: contiguous targets, and sources.
    """
    with torch.no_grad():
        for target, source in pairs:
            if target.dtype == source.dtype and source.is_contiguous():
                numpy.copyto(_bytes_of(target), _bytes_of(source))
                continue
            into, values = target.reshape(-1), source.detach().reshape(-1)
            for start in range(0, values.numel(), SMALL_ELEMENTS - 1):
                into[start : start + SMALL_ELEMENTS - 1].copy_(values[start : start + SMALL_ELEMENTS - 1])
