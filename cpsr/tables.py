"""Tables on a terminal of any width: cells wrap at spaces, and nothing is left out."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

__all__ = ["print_table"]

FOLDED_WIDTH = 16  # of a column that may break words: paths, hosts, reasons


def print_table(console: Console, *tables: Table) -> None:
    """Print tables that are no wider than the console.

    A table whose longest words do not fit side by side is printed as one list for each of its rows: a line for each
    column, with its heading. Words are broken only in columns with `overflow="fold"`, and where one is alone too wide.

    Args:
        console: where.
        tables: each with a box and at least one column.
    """
    for table in tables:
        spare = console.width - 3 * len(table.columns) - 1  # the cells have a space on both sides, and lines between
        widths = [_widths(console, column) for column in table.columns]
        spare -= sum(least for least, _ in widths)
        if spare < 0:
            _print_lists(console, table)
            continue
        for column, (least, most) in sorted(zip(table.columns, widths, strict=True), key=lambda one: one[1][1]):
            column.width = min(most, least + spare)
            column.no_wrap, column.overflow = False, "fold"
            spare -= column.width - least
        console.print(table)


def _widths(console: Console, column: Column) -> tuple[int, int]:
    """Characters that a column needs, and those with which no cell of it wraps."""
    texts = [console.render_str(cell) if isinstance(cell, str) else cell for cell in (column.header, *column.cells)]
    measured = [Measurement.get(console, console.options.update(max_width=10_000), text) for text in texts]
    most = max(one.maximum for one in measured)
    least = most if column.no_wrap else max(one.minimum for one in measured)
    return min(least, FOLDED_WIDTH) if column.overflow == "fold" else least, most


def _print_lists(console: Console, table: Table) -> None:
    for text in (table.title, table.caption):
        if text:
            console.print(text)
    for row in zip(*(column.cells for column in table.columns), strict=True):
        shown = Table(show_header=False)
        shown.add_column(style="bold", overflow="fold")
        shown.add_column(overflow="fold")
        for column, cell in zip(table.columns, row, strict=True):
            shown.add_row(column.header, cell)
        console.print(shown)
