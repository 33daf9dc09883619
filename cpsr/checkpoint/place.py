"""A place keeps whole slabs under names: shared memory of this machine or of another rank's."""

from collections.abc import Iterator
from typing import Protocol

__all__ = ["Image", "Index"]


class Index(Protocol):
    """Which slab is meant."""

    @property
    def name(self) -> str:
        """Where it lies in its place."""

    @property
    def rank(self) -> int:
        """Whose state it holds."""

    @property
    def iteration(self) -> int:
        """When that was captured."""

    @property
    def kind(self) -> str:
        """What of the state it holds."""


class Image(Protocol):
    """The bytes of a sealed slab, on their way to a place."""

    @property
    def size(self) -> int:
        """How many bytes there are."""

    def pieces(self) -> Iterator[tuple[int, memoryview]]:
        """Offset and bytes, which are valid until the next piece; the first page of the slab comes last.

        Raises:
            CheckpointError: the slab is gone, or was overwritten meanwhile.
        """
