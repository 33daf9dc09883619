"""Tables on a terminal of any width: cells wrap at spaces, and nothing is left out."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table

__all__ = ["print_table"]

FOLDED_WIDTH = 16  # of a column that may break words: paths, hosts, reasons


@dataclass(frozen=True)
class _Width:
    """Characters that a column needs, and those with which no cell of it wraps."""

    least: int
    most: int


def print_table(console: Console, *tables: Table) -> None:
    """Print tables that are no wider than the console.

    Columns that do not fit side by side, even with wrapped cells, follow in a table of their own, which repeats the
    first column. Words are broken only in columns with `overflow="fold"`.

    Args:
        console: where.
        tables: each with a box and at least one column.
    """
    for table in tables:
        for part in _parts(table, _widths(console, table), console.width):
            console.print(part)


def _widths(console: Console, table: Table) -> list[_Width]:
    found = []
    for column in table.columns:
        cells: list[RenderableType] = [column.header, *column.cells]
        texts = [console.render_str(cell) if isinstance(cell, str) else cell for cell in cells]
        measured = [Measurement.get(console, console.options.update(max_width=10_000), text) for text in texts]
        least = max(one.maximum if column.no_wrap else one.minimum for one in measured)
        most = max(one.maximum for one in measured)
        if column.overflow == "fold":
            least = min(least, FOLDED_WIDTH)
        found.append(_Width(least, max(least, most)))
    return found


def _parts(table: Table, widths: Sequence[_Width], limit: int) -> Iterator[Table]:
    """The table itself where it fits; else tables that each begin with its first column."""
    left = list(range(1, len(widths)))
    while True:
        taken = [0]
        while left and _outer([widths[index].least for index in (*taken, left[0])]) <= limit:
            taken.append(left.pop(0))
        if len(taken) == 1 and left:  # too wide alone: its words are broken
            taken.append(left.pop(0))
        yield _part(table, taken, _shared_out([widths[index] for index in taken], limit), last=not left)
        if not left:
            return


def _part(table: Table, taken: Sequence[int], widths: Sequence[int], *, last: bool) -> Table:
    part = copy(table)
    part.columns = [
        _sized(table.columns[index], place, width)
        for place, (index, width) in enumerate(zip(taken, widths, strict=True))
    ]
    if 1 not in taken and len(table.columns) > 1:
        part.title = "(continued)"
    if not last:
        part.caption = None
    return part


def _sized(column: Column, place: int, width: int) -> Column:
    return replace(column, _index=place, width=width, no_wrap=False, overflow="fold")


def _shared_out(widths: Sequence[_Width], limit: int) -> list[int]:
    """Width of each column: what it needs least, and then in turn as much more as it could use."""
    given = [width.least for width in widths]
    spare = limit - _outer(given)
    while spare < 0:  # a column that is too wide alone
        given[given.index(max(given))] -= 1
        spare += 1
    wanting = [index for index, width in enumerate(widths) if given[index] < width.most]
    while spare > 0 and wanting:
        index = min(wanting, key=lambda one: given[one])
        given[index] += 1
        spare -= 1
        if given[index] >= widths[index].most:
            wanting.remove(index)
    return given


def _outer(widths: Sequence[int]) -> int:
    """Characters of a line: the cells, a space on both sides of each, and the lines between and around them."""
    return sum(widths) + 3 * len(widths) + 1
