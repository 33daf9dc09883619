"""Parts of a state that its holder has already, from the state before: these are not sent again."""

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cpsr.checkpoint.memory_states import PAGE_BYTES, describe, write_at

__all__ = ["FilePart", "decoded", "encoded", "parts_of", "take_over"]

_PART = struct.Struct("<2Q16s")
_COPY_BYTES = 1 << 22


@dataclass(frozen=True)
class FilePart:
    """One segment of a state's tensors, by its place in the file.

    Attributes:
        begin: first byte.
        end: byte after the last one.
        digest: xxh3-128 of the bytes.
    """

    begin: int
    end: int
    digest: bytes


def parts_of(path: Path) -> list[FilePart]:
    """The segments of the complete state in a file; empty where it holds none."""
    found = describe(path)
    if found is None:
        return []
    description = found[1]
    return [
        FilePart(PAGE_BYTES + begin, PAGE_BYTES + end, bytes.fromhex(digest))
        for (begin, end), digest in zip(description["segments"], description["hashes"], strict=True)
    ]


def encoded(parts: Sequence[FilePart]) -> bytes:
    """As it travels."""
    return b"".join(_PART.pack(part.begin, part.end, part.digest) for part in parts)


def decoded(data: bytes) -> list[FilePart]:
    """What `encoded` was given; ValueError where it is something else."""
    try:
        return [FilePart(*fields) for fields in _PART.iter_unpack(data)]
    except struct.error as error:
        raise ValueError(f"{len(data)} bytes are no parts of a state") from error


def take_over(parts: Sequence[FilePart], target: int, held: Sequence[FilePart], newest: Path) -> list[bool]:
    """Copy what the holder's newest state has of an offered one into the file that takes it.

    Args:
        parts: of the offered state.
        target: descriptor of the file that takes it, as long as that state.
        held: what that file held before; it is still there.
        newest: the holder's other file.

    Returns:
        For each part, whether it must be sent.
    """
    there, others, wanted = set(held), set(parts_of(newest)), []
    source = os.open(newest, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC) if others else -1
    try:
        for part in parts:
            if part not in there and part in others:
                _copy(source, target, part)
            wanted.append(part not in there and part not in others)
    finally:
        if source >= 0:
            os.close(source)
    return wanted


def _copy(source: int, target: int, part: FilePart) -> None:
    offset = part.begin
    while offset < part.end:
        data = os.pread(source, min(_COPY_BYTES, part.end - offset), offset)
        if not data:
            return  # it is shorter than it says: the hash of the whole will not hold
        write_at(target, data, offset)
        offset += len(data)
