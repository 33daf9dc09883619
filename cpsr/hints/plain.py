"""Values that never change, as plain data for the codec: bits and exact types survive."""

import math
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import numpy
import torch

from cpsr.hints.memory import UnsavableError

__all__ = ["OBJECT", "plain_value", "value_of_plain"]

OBJECT = object()  # it is no plain value

_INTEGER_BITS = 14_000  # Python writes no longer ones as digits


def plain_value(value: Any) -> Any:
    """The value itself if the codec takes it as it is, else its kind and content; `OBJECT` if it may change.

    Raises:
        UnsavableError: it is plain, and no file holds it.
    """
    kind = type(value)
    if kind is int:
        if value.bit_length() > _INTEGER_BITS:
            raise UnsavableError(f"an integer of {value.bit_length()} bits is too long: split it")
        return value
    if kind is float:
        # JSON has one NaN, and a float many.
        return ("float", struct.pack("<d", value)) if math.isnan(value) else value
    if kind is str:
        return _text(value)
    if value is None or kind in (bool, bytes):
        return value
    if isinstance(value, numpy.generic):
        if value.dtype.kind not in "biufc":
            raise UnsavableError(f"a NumPy scalar of {value.dtype}: take its item()")
        return value
    write = _WRITERS.get(kind)
    return OBJECT if write is None else (kind.__name__, write(value))


def value_of_plain(kind: str, content: Any) -> Any:
    """Reverse `plain_value` where it returned kind and content."""
    return _READERS[kind](content)


def _text(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UnsavableError(f"its text has half a character ({error.reason}): decode it otherwise") from None
    return value


_WRITERS: dict[type[Any], Callable[[Any], Any]] = {
    complex: lambda value: struct.pack("<2d", value.real, value.imag),
    range: lambda value: [value.start, value.stop, value.step],
    torch.dtype: lambda value: str(value).removeprefix("torch."),
    torch.device: str,
    torch.Size: list,
    pathlib.PosixPath: str,
}
_READERS: dict[str, Callable[[Any], Any]] = {
    "float": lambda content: struct.unpack("<d", content)[0],
    "complex": lambda content: complex(*struct.unpack("<2d", content)),
    "range": lambda content: range(*content),
    "dtype": lambda content: getattr(torch, content),
    "device": torch.device,
    "Size": torch.Size,
    "PosixPath": pathlib.PosixPath,
}
