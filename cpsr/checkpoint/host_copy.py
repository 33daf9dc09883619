"""Copies of a snapshot on the host: planned once, in the order of the buffer, and hashed while in the cache."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy
import torch
import xxhash
from numpy.typing import NDArray

from cpsr.checkpoint.buffers import Span

__all__ = ["HostCopyPlan"]

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
    """The copies that bring tensors of the host into one buffer.

    Args:
        spans: in the order of the buffer.
        content: all bytes of the buffer.
    """

    def __init__(self, spans: Iterable[Span], content: torch.Tensor) -> None:
        self._content = content.numpy().data
        self._pieces: list[_Piece] = []
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
        return len(self._pieces)

    def run(self) -> None:
        """Copy everything."""
        with torch.no_grad():
            for piece in self._pieces:
                piece.copy()

    def run_hashed(self) -> xxhash.xxh3_128:
        """Copy everything; returns the hash of all bytes of the buffer, also of those that were there before."""
        state, hashed = xxhash.xxh3_128(), 0
        with torch.no_grad():
            for piece in self._pieces:
                piece.copy()
                state.update(self._content[hashed : piece.end])
                hashed = piece.end
        state.update(self._content[hashed:])
        return state


def _bytes_of(tensor: torch.Tensor) -> _Bytes:
    array: _Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array
