"""Files in pieces: reading and writing past the page cache where the file system permits it.

Descriptors are opened with `DIRECT` (O_DIRECT). A file system that does not permit it refuses the open, or the first
transfer; the same bytes then take the way through the page cache. What is shorter than a block, at the end of a file,
always takes that way: a file never has bytes past its end.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy
import xxhash
from numpy.typing import NDArray

__all__ = ["BLOCK_BYTES", "DIRECT", "HASHED_PIECE_BYTES", "PIECE_BYTES", "PIECE_DIGITS", "PieceHashes"]
__all__ += [
    "aligned_pieces",
    "block_buffer",
    "hash_pieces",
    "open_direct",
    "piece_hash",
    "pieces_in",
    "read_at",
    "write_piece",
]

HASHED_PIECE_BYTES = 1 << 20  # of each piece but the last
PIECE_DIGITS = 16  # of an xxh3-64 in hexadecimal


class PieceHashes:
    """The xxh3-64 of every MiB of bytes that are taken once and in order."""

    def __init__(self) -> None:
        self.bytes = 0
        self._piece = xxhash.xxh3_64()
        self._digests = bytearray()

    def take(self, data: memoryview) -> None:
        """Take the bytes that follow."""
        while data:
            part = data[: HASHED_PIECE_BYTES - self.bytes % HASHED_PIECE_BYTES]
            self._piece.update(part)
            self.bytes += len(part)
            if self.bytes % HASHED_PIECE_BYTES == 0:
                self._digests += self._piece.digest()
                self._piece.reset()
            data = data[len(part) :]

    def digests(self) -> bytes:
        """The hashes one after the other, 8 bytes each."""
        last = self._piece.digest() if self.bytes % HASHED_PIECE_BYTES else b""
        return bytes(self._digests) + last


def hash_pieces(data: memoryview) -> bytes:
    """`PieceHashes` of these bytes."""
    found = PieceHashes()
    found.take(data)
    return found.digests()


def pieces_in(size: int) -> int:
    """Number of hashed pieces in so many bytes."""
    return -(-size // HASHED_PIECE_BYTES)


def piece_hash(pieces: str, index: int) -> str:
    """Hash of one piece, of those of a file."""
    return pieces[index * PIECE_DIGITS : (index + 1) * PIECE_DIGITS]


_log = logging.getLogger(__name__)

DIRECT = os.O_DIRECT
# Memory, places in the file and sizes are multiples of it: of the blocks of today's disks, and a page.
BLOCK_BYTES = 4096
PIECE_BYTES = 16 << 20  # of one transfer: at this size a disk is as fast as at larger ones

_stated: set[int] = set()  # devices of which the log states that they refuse


def open_direct(path: Path, flags: int) -> int:
    """Descriptor of a file with `DIRECT`, or without where the file system refuses that.

    Raises:
        OSError: the file cannot be opened either way.
    """
    try:
        return os.open(path, flags | DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    descriptor = os.open(path, flags, 0o600)
    _state_refusal(descriptor, path)
    return descriptor


def write_piece(descriptor: int, piece: memoryview, path: Path) -> None:
    """Write all of a piece behind what was written before.

    Args:
        descriptor: of `open_direct`, or of any file to write to.
        piece: of `aligned_pieces`.
        path: of the file, for messages.

    Raises:
        OSError: the file system failed, or accepted no byte (EIO).
    """
    while piece:
        blocks = piece[: len(piece) // BLOCK_BYTES * BLOCK_BYTES]
        if not blocks:
            _through_cache(descriptor)
        try:
            count = os.write(descriptor, blocks or piece)
        except OSError as error:
            if error.errno != errno.EINVAL or not _through_cache(descriptor):
                raise
            _state_refusal(descriptor, path)
            continue
        if not count:
            raise OSError(errno.EIO, "the file system accepted no byte of a write", str(path))
        if count % BLOCK_BYTES:  # the rest does not lie as blocks do
            _through_cache(descriptor)
        piece = piece[count:]


def read_at(descriptor: int, buffer: memoryview, start: int, size: int) -> int:
    """Read so many bytes of a file from a place on; returns how many came, fewer only at its end.

    Args:
        descriptor: of `open_direct`, or of any file to read from.
        buffer: of `block_buffer`, as long as the whole blocks with these bytes; more than these may come.
        start: a multiple of `BLOCK_BYTES`.
        size: of what is wanted.

    Raises:
        OSError: the file system failed.
    """
    filled = 0
    while filled < size:
        try:
            count = os.preadv(descriptor, [buffer[filled:]], start + filled)
        except OSError as error:
            if error.errno != errno.EINVAL or not _through_cache(descriptor):
                raise
            continue
        if not count:
            break
        if count % BLOCK_BYTES:  # the rest does not lie as blocks do
            _through_cache(descriptor)
        filled += count
    return filled


def aligned_pieces(runs: Sequence[NDArray[numpy.uint8]]) -> Iterator[memoryview]:
    """The bytes of all runs one after the other, in pieces that `DIRECT` permits, each valid until the next.

    A piece is a part of a run where the run lies as blocks do in the file, and is gathered from runs where not. Only
    the last piece may end within a block.

    Args:
        runs: what a file is to hold, in its order.
    """
    gathered = numpy.frombuffer(block_buffer(min(PIECE_BYTES, sum(run.nbytes for run in runs))), numpy.uint8)
    filled = 0
    for run in runs:
        rest, address = run, run.ctypes.data
        while rest.nbytes:
            in_place = address % BLOCK_BYTES == 0 and rest.nbytes >= BLOCK_BYTES
            if filled == gathered.nbytes or (filled and filled % BLOCK_BYTES == 0 and in_place):
                yield gathered[:filled].data
                filled = 0
            if in_place and not filled:
                size = min(rest.nbytes // BLOCK_BYTES * BLOCK_BYTES, PIECE_BYTES)
                yield rest[:size].data
            else:
                size = min(rest.nbytes, gathered.nbytes - filled)
                to_block = -filled % BLOCK_BYTES
                if to_block and (address + to_block) % BLOCK_BYTES == 0:  # the rest lies as blocks do in the file
                    size = min(size, to_block)
                numpy.copyto(gathered[filled : filled + size], rest[:size])  # without the interpreter's lock
                filled += size
            rest, address = rest[size:], address + size
    if filled:
        yield gathered[:filled].data


def block_buffer(size: int) -> memoryview:
    """Memory of whole blocks, at least one; in huge pages where there are, of which a transfer looks up fewer."""
    memory = mmap.mmap(-1, max(1, -(-size // BLOCK_BYTES)) * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # After a fork either process may get a copy of the page that the device still writes to.
    memory.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # kernels without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _through_cache(descriptor: int) -> bool:
    """From now on transfer through the page cache; False where that was so already."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~DIRECT)
    return True


def _state_refusal(descriptor: int, path: Path) -> None:
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_dev not in _stated:  # directories and pipes refuse everywhere
        _stated.add(found.st_dev)
        _log.warning(
            "the file system of %s refuses direct I/O (O_DIRECT): files there are written and verified through the "
            "page cache, which takes more processor time",
            path.parent,
        )
