"""The ranges of a rank's slice that are still to be found in the files of other ranks."""

from collections.abc import Iterator

__all__ = ["MissingRanges"]


class MissingRanges:
    """Ranges of one operator, as elements of the whole parameter; each is taken once.

    Args:
        offset: first element of the slice.
        numel: elements of it.

    Attributes:
        left: those that nobody has given yet.
    """

    def __init__(self, offset: int, numel: int) -> None:
        self.left: list[tuple[int, int]] = [(offset, offset + numel)] if numel else []

    def take(self, offset: int, numel: int) -> Iterator[tuple[int, int]]:
        """The ranges that another slice has; they are no longer left once the iterator has ended."""
        first, end = offset, offset + numel
        left: list[tuple[int, int]] = []
        for start, stop in self.left:
            begin, finish = max(start, first), min(stop, end)
            if begin >= finish:
                left.append((start, stop))
                continue
            yield begin, finish
            left += [part for part in ((start, begin), (finish, stop)) if part[0] < part[1]]
        self.left = left
