"""The tensors of a safetensors file, put into their places while its bytes are read."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray

from cpsr.checkpoint.tensor_image import HEADER_BYTES_MAX, LENGTH_BYTES, METADATA, bytes_of, dtype_of

__all__ = ["NO_HEADER", "PlacedTensor", "TensorContent", "TensorHeader"]

# What reading a header raises that is none.
NO_HEADER = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor that a header describes; `first` is its first byte in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    first: int

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


class TensorHeader:
    """The header of a safetensors file, from the file's first bytes.

    Args:
        file_bytes: length of the whole file.

    Attributes:
        end: the byte behind it, as far as that is known.
        whole: whether all of it was taken.
    """

    def __init__(self, file_bytes: int) -> None:
        self.end = LENGTH_BYTES
        self.whole = False
        self._file_bytes = file_bytes
        self._taken = bytearray()

    def take(self, piece: memoryview) -> None:
        """Take the bytes that follow, as far as they are the header's.

        Raises:
            ValueError: a header of this length is none.
        """
        while piece and len(self._taken) < self.end:
            part = piece[: self.end - len(self._taken)]
            self._taken += part
            piece = piece[len(part) :]
            if len(self._taken) == LENGTH_BYTES:
                self.end += int.from_bytes(self._taken, "little")
                if self.end > min(self._file_bytes, LENGTH_BYTES + HEADER_BYTES_MAX):
                    raise ValueError(f"its header would end at byte {self.end}")
        self.whole = len(self._taken) == self.end

    def tensors(self) -> Iterator[PlacedTensor]:
        """The tensors as they follow each other in the file; call it once the header is whole.

        Raises:
            Exception: any of `NO_HEADER`: it describes no tensors that this file can hold.
        """
        described = json.loads(self._taken[LENGTH_BYTES:])
        described.pop(METADATA, None)
        end = 0
        for name, one in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
            (first, last), shape, dtype = one["data_offsets"], tuple(one["shape"]), dtype_of(one["dtype"])
            size = math.prod(shape) * dtype.itemsize
            lies_there = end <= first and first + size == last <= self._file_bytes - self.end
            if min(shape, default=0) < 0 or not lies_there:
                raise ValueError(f"{name!r} of shape {shape} and {dtype} lies at {first} to {last}")
            end = last
            yield PlacedTensor(name, shape, dtype, self.end + first)


class TensorContent:
    """Takes the bytes of one file once, in order, and copies those of each tensor to its place.

    The bytes may be damaged, which a hash of all of them shows afterwards: until then the places hold anything.

    Args:
        file_bytes: length of the whole file.
        place: gives the tensor that one of this name, shape and dtype is copied to, contiguous on the CPU, or None
            where nobody wants it; raises ValueError where the file should hold another one.
    """

    def __init__(
        self, file_bytes: int, place: Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor | None]
    ) -> None:
        self._place = place
        self._taken = 0
        self._header: TensorHeader | None = TensorHeader(file_bytes)  # None once it is read
        self._tensors: dict[str, torch.Tensor] = {}
        self._left: list[tuple[int, NDArray[numpy.uint8]]] = []  # places in the file and memory, the next one last
        self._problem: str | None = None

    def take(self, piece: memoryview) -> None:
        """Take the bytes that follow."""
        start, self._taken = self._taken, self._taken + len(piece)
        if self._header is not None and self._problem is None:
            try:
                self._take_header(self._header, piece)
            except NO_HEADER as error:
                self._problem = str(error)
                self._left.clear()
        values = numpy.frombuffer(piece, numpy.uint8)
        while self._left and self._left[-1][0] < self._taken:
            first, memory = self._left[-1]
            begin, end = max(first, start), min(first + memory.nbytes, self._taken)
            numpy.copyto(memory[begin - first : end - first], values[begin - start : end - start])
            if end < first + memory.nbytes:
                return
            self._left.pop()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that had a place, by name; call it once all bytes were taken.

        Raises:
            ValueError: these were none of a safetensors file, or `place` refused one.
        """
        if self._problem is None and (self._header is not None or self._left):
            self._problem = f"it ends at byte {self._taken}, within its header or a tensor"
        if self._problem is not None:
            raise ValueError(self._problem)
        return self._tensors

    def _take_header(self, header: TensorHeader, piece: memoryview) -> None:
        header.take(piece)
        if not header.whole:
            return
        for one in header.tensors():
            tensor = self._place(one.name, one.shape, one.dtype)
            if tensor is not None:
                self._tensors[one.name] = tensor
                if tensor.nbytes:
                    self._left.append((one.first, bytes_of(tensor)))
        self._left.reverse()
        self._header = None
