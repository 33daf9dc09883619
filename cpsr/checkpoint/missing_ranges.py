"""The ranges of a rank's slice, or of the whole model, that are still to be found in the files of other ranks."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

__all__ = ["MissingRanges", "lacking_among"]


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


def lacking_among(
    operators: Collection[str],
    parts: Mapping[int, Mapping[str, tuple[Sequence[int], int, int]]],
    ages: Mapping[int, Mapping[str, int]],
) -> str | None:
    """What these parts lack of the model together, in a sentence; see `cpsr.checkpoint.commit.Missing`.

    Args:
        operators: of the model.
        parts: by rank and name, the whole shape, the first element and the number of elements.
        ages: not looked at.
    """
    left: dict[str, MissingRanges] = {}
    for part in parts.values():
        for name, (shape, offset, numel) in part.items():
            for _ in left.setdefault(name, MissingRanges(0, math.prod(shape))).take(offset, numel):
                pass
    if absent := sorted(set(operators) - left.keys()):
        return f"nobody has {absent[0]}"
    lacking = ((name, *one.left[0]) for name, one in left.items() if one.left)
    return next((f"nobody has elements {start} to {stop} of {name}" for name, start, stop in lacking), None)
