"""What every benchmark shows and leaves behind: a progress bar, a table, a JSON file with a plot beside it."""

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cpsr.benchmarks.intervals import Estimate

__all__ = ["interval_text", "progress_bar", "save", "save_beside", "verdict", "warnings_only", "work_directory"]

DOTS_PER_INCH = 130


def progress_bar(console: Console) -> Progress:
    """A bar on a terminal, nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def warnings_only(console: Console) -> Iterator[None]:
    """Of CPSR's own log only what went wrong, above the progress bar."""
    logger, handler = logging.getLogger("cpsr"), RichHandler(logging.WARNING, console, show_path=False)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def work_directory(parent: Path | None) -> Iterator[Path]:
    """A directory on the file system to be measured; gone afterwards."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cpsr-bench-", dir=parent) as directory:
        yield Path(directory)


def save(path: Path, report: dict[str, Any], figure: Figure) -> Path:
    """Write the JSON file and the plot beside it; returns the plot's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return _draw(path.with_suffix(".png"), figure)


def save_beside(path: Path, name: str, figure: Figure) -> Path:
    """Write one more plot beside the JSON file or its plot, under their name and `name`; returns its path."""
    return _draw(path.with_name(f"{path.stem}-{name}.png"), figure)


def _draw(plot: Path, figure: Figure) -> Path:
    matplotlib.use("Agg")
    figure.savefig(plot, dpi=DOTS_PER_INCH)
    return plot


def interval_text(estimate: Estimate, scale: float = 1.0, digits: int = 2, separator: str = " ") -> str:
    """`median (low to high)`; with a new line as separator it fits into a narrow column."""
    value, low, high = (f"{number * scale:.{digits}f}" for number in (estimate.value, estimate.low, estimate.high))
    return f"{value}{separator}({low} to {high})"


def verdict(met: bool) -> str:
    """Rich markup for an aim."""
    return "[green]pass[/green]" if met else "[red]miss[/red]"
