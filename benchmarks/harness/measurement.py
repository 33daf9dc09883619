"""One call of a benchmark: where it works, on what machine, how far it is, and what it leaves behind."""

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cpsr.benchmarks.harness.intervals import Estimate
from cpsr.benchmarks.harness.machine import busy_warning, describe_machine
from cpsr.demo.device import CPU

__all__ = ["Measurement", "interval_text", "measuring", "verdict"]

DOTS_PER_INCH = 110


@dataclass(frozen=True)
class Measurement:
    """What every benchmark has.

    Attributes:
        name: of the benchmark, in its JSON file.
        json_path: where the figures go; None: they are only printed.
        console: for tables.
        progress: bars on a terminal, nothing elsewhere.
        directory: the work folder, which is removed afterwards, or the place that was named in its stead.
        machine: see `describe_machine`.
    """

    name: str
    json_path: Path | None
    console: Console
    progress: Progress
    directory: Path
    machine: dict[str, Any]

    def bar(self, title: str, total: int | None = None) -> Callable[[], None]:
        """Show how far something is; the result is called after each of its steps."""
        task = self.progress.add_task(title, total=total)
        return lambda: self.progress.advance(task)

    def leave(self, figures: Mapping[str, Any], plots: Mapping[str, Figure] | Figure | None = None) -> None:
        """Write the figures as JSON with the machine, and the plots beside them: the first under the same name.

        Raises:
            ValueError: a figure is NaN or infinite, which JSON does not have.
        """
        if self.json_path is None:
            return
        path = self.json_path
        path.parent.mkdir(parents=True, exist_ok=True)
        report = {"benchmark": self.name, "machine": self.machine, **figures}
        path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        matplotlib.use("Agg")
        drawn = []
        for place, (name, plot) in enumerate(({"": plots} if isinstance(plots, Figure) else plots or {}).items()):
            drawn.append(path.with_name(f"{path.stem}-{name}.png") if place else path.with_suffix(".png"))
            plot.savefig(drawn[-1], dpi=DOTS_PER_INCH)
        shown = f"   plots: {', '.join(map(str, drawn))}" if drawn else ""
        self.console.print(f"figures: {path}{shown}")


@contextmanager
def measuring(
    name: str,
    json_path: Path | None,
    workdir: Path | None = None,
    place: Path | None = None,
    *,
    timed: bool = True,
    device: str = CPU,
) -> Iterator[Measurement]:
    """One call of a benchmark, with warnings of the product's log alone and progress bars on a terminal.

    Args:
        name: of the benchmark.
        json_path: where the figures go.
        workdir: holds the work folder; by default the directory of temporary files.
        place: a directory on the file system in use, where the benchmark keeps what it needs by itself; no work folder
            is made then.
        timed: whether seconds are measured, so that a busy machine is named.
        device: `cpu` or `cuda`, which is measured on.
    """
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with _work_folder(workdir) if place is None else _there(place) as directory:
        machine = describe_machine(directory, device)
        if timed and (warning := busy_warning(machine)):
            console.print(f"[yellow]{warning}[/yellow]")
        with _warnings_only(console), progress:
            yield Measurement(name, json_path, console, progress, directory, machine)


@contextmanager
def _there(place: Path) -> Iterator[Path]:
    yield place


@contextmanager
def _work_folder(parent: Path | None) -> Iterator[Path]:
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cpsr-bench-", dir=parent) as directory:
        yield Path(directory).resolve()


@contextmanager
def _warnings_only(console: Console) -> Iterator[None]:
    """Of CPSR's own log only what went wrong, above the progress bar."""
    logger, handler = logging.getLogger("cpsr"), RichHandler(logging.WARNING, console, show_path=False)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def interval_text(estimate: Estimate, scale: float = 1.0, digits: int = 2, separator: str = " ") -> str:
    """`median (low to high)`; with a new line as separator it fits into a narrow column."""
    value, low, high = (f"{number * scale:.{digits}f}" for number in (estimate.value, estimate.low, estimate.high))
    return f"{value}{separator}({low} to {high})"


def verdict(met: bool) -> str:
    """Rich markup for an aim."""
    return "[green]pass[/green]" if met else "[red]miss[/red]"
