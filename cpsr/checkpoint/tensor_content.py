"""The tensors of a safetensors file, put into their places while its bytes are read."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from cpsr.checkpoint.tensor_image import HEADER_BYTES_MAX, LENGTH_BYTES, METADATA, bytes_of, dtype_of

__all__ = ["TensorContent"]

# What reading a header raises that is none.
_NO_HEADER = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)


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
        self._file_bytes = file_bytes
        self._place = place
        self._taken = 0
        self._header: bytearray | None = bytearray()  # None once it is read
        self._header_end = LENGTH_BYTES  # as far as it is known
        self._tensors: dict[str, torch.Tensor] = {}
        self._left: list[tuple[int, NDArray[numpy.uint8]]] = []  # places in the file and memory, the next one last
        self._problem: str | None = None

    def take(self, piece: memoryview) -> None:
        """Take the bytes that follow."""
        start, self._taken = self._taken, self._taken + len(piece)
        if self._header is not None and self._problem is None:
            try:
                self._take_header(self._header, piece)
            except _NO_HEADER as error:
                self._problem = str(error)
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

    def _take_header(self, header: bytearray, piece: memoryview) -> None:
        while piece and len(header) < self._header_end:
            part = piece[: self._header_end - len(header)]
            header += part
            piece = piece[len(part) :]
            if len(header) == LENGTH_BYTES:
                self._header_end += int.from_bytes(header, "little")
                if self._header_end > min(self._file_bytes, LENGTH_BYTES + HEADER_BYTES_MAX):
                    raise ValueError(f"its header would end at byte {self._header_end}")
        if len(header) == self._header_end:
            self._find_places(json.loads(header[LENGTH_BYTES:]))
            self._header = None

    def _find_places(self, described: dict[str, Any]) -> None:
        described.pop(METADATA, None)
        end = 0
        for name, one in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
            (first, last), shape, dtype = one["data_offsets"], tuple(one["shape"]), dtype_of(one["dtype"])
            size = math.prod(shape) * dtype.itemsize
            lies_there = end <= first and first + size == last <= self._file_bytes - self._header_end
            if min(shape, default=0) < 0 or not lies_there:
                raise ValueError(f"{name!r} of shape {shape} and {dtype} lies at {first} to {last}")
            end = last
            tensor = self._place(name, shape, dtype)
            if tensor is not None:
                self._tensors[name] = tensor
                if size:
                    self._left.append((self._header_end + first, bytes_of(tensor)))
        self._left.reverse()
