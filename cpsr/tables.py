"""Tables on a terminal of any width: cells wrap at spaces, long words are broken, and nothing is left out."""

from rich.console import Console
from rich.table import Table

__all__ = ["print_table"]


def print_table(console: Console, *tables: Table) -> None:
    """Print tables that are no wider than the console."""
    for table in tables:
        for column in table.columns:
            column.no_wrap, column.overflow = False, "fold"  # rich would put an ellipsis into longer words
        console.print(table)
