"""A message of a few integers, for memory that several processes map and for a store."""

import struct
import zlib
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Words"]

_Message = TypeVar("_Message", bound="Words")


@dataclass(frozen=True)
class Words:
    """A message of a few integers of 64 bits, with a checksum: a reader beside the writer may see a torn one."""

    def to_bytes(self) -> bytes:
        """As it lies in a board or a store."""
        words = vars(self).values()  # `astuple` copies, and is ten times as slow
        data = struct.pack(f"<{len(words)}q", *words)
        return data + struct.pack("<Q", zlib.crc32(data))

    @classmethod
    def of_bytes(cls: type[_Message], data: bytes) -> _Message | None:
        """Back from `to_bytes`; None where it is torn or was never written."""
        *words, checksum = struct.unpack(f"<{len(data) // 8 - 1}qQ", data)
        return cls(*words) if checksum and zlib.crc32(data[:-8]) == checksum else None
