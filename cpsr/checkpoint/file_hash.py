"""The hashes of a file: one of all its bytes, and one of every piece, so that a part is verified without the whole."""

from dataclasses import dataclass, field

import xxhash

__all__ = ["HASHED_PIECE_BYTES", "PIECE_DIGITS", "Digest", "FileHash", "piece_hash", "pieces_in"]

HASHED_PIECE_BYTES = 1 << 20  # of each piece but the last
PIECE_DIGITS = 16  # of an xxh3-64 in hexadecimal


@dataclass(frozen=True)
class Digest:
    """Size in bytes and hashes (hexadecimal) of one file.

    Attributes:
        bytes: its size.
        xxh3_128: of all bytes.
        pieces: the xxh3-64 of every piece, one after the other; None where only the whole was hashed. Two digests are
            compared without it: it follows from the bytes.
    """

    bytes: int
    xxh3_128: str
    pieces: str | None = field(default=None, compare=False)


class FileHash:
    """Hashes the bytes of a file, which are taken once and in order.

    Args:
        pieces: hash every piece, too.
    """

    def __init__(self, *, pieces: bool = False) -> None:
        self._bytes = 0
        self._whole = xxhash.xxh3_128()
        self._piece = xxhash.xxh3_64()
        self._pieces: list[str] | None = [] if pieces else None

    def take(self, data: memoryview) -> None:
        """Take the bytes that follow."""
        if self._pieces is None:
            self._whole.update(data)
            self._bytes += len(data)
            return
        while data:  # both hashes of a part before the next one: the second finds it in the processor's cache
            part = data[: HASHED_PIECE_BYTES - self._bytes % HASHED_PIECE_BYTES]
            self._whole.update(part)
            self._piece.update(part)
            self._bytes += len(part)
            if self._bytes % HASHED_PIECE_BYTES == 0:
                self._pieces.append(self._piece.hexdigest())
                self._piece.reset()
            data = data[len(part) :]

    def digest(self) -> Digest:
        """Of what was taken."""
        pieces = self._pieces
        if pieces is not None and self._bytes % HASHED_PIECE_BYTES:
            pieces = [*pieces, self._piece.hexdigest()]
        return Digest(self._bytes, self._whole.hexdigest(), None if pieces is None else "".join(pieces))


def pieces_in(size: int) -> int:
    """Number of hashed pieces in so many bytes."""
    return -(-size // HASHED_PIECE_BYTES)


def piece_hash(pieces: str, index: int) -> str:
    """Hash of one piece, of those of a file."""
    return pieces[index * PIECE_DIGITS : (index + 1) * PIECE_DIGITS]
