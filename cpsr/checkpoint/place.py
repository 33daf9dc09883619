"""A place keeps whole slabs under names: shared memory of this machine or of another rank's."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from cpsr.checkpoint.assemble import Slab

__all__ = ["Image", "Index", "Place"]


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


class Place(Protocol):
    """Where slabs are listed, put whole, opened and dropped."""

    def list(self) -> Sequence[Index]:
        """Every slab that was put or sealed whole; by its own word, nothing is verified."""

    def put(self, name: str, image: Image) -> object:
        """Keep a slab under this name, in place of the one that has it; what is torn or damaged never lists.

        Raises:
            CheckpointError: the image ended early, or its hashes do not hold, or it is of another run or rank.
            OSError: the place is full, or refuses.
        """

    def open(self, index: Index) -> Slab:
        """The slab; all that it gives is verified.

        Raises:
            CheckpointError: it is not there any more, or damaged.
        """

    def drop(self, name: str) -> None:
        """Remove a slab, if it is there."""
