"""One call of a benchmark: its folder, its machine, how far it is, what it prints, and what it leaves behind."""

import json
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cpsr.benchmarks.harness.intervals import Estimate
from cpsr.demo.device import CPU, describe_device, device_text
from cpsr.tables import print_table

__all__ = [
    "Measurement",
    "busy_warning",
    "describe_machine",
    "interval_text",
    "measured_code",
    "measuring",
    "verdict",
]

PACKAGES = ("cpsr", "torch", "deepspeed", "safetensors", "xxhash", "numpy")
GIT_SECONDS = 10.0
LOAD_PER_CORE_MAX = 0.25  # above it, other processes take turns with what is measured


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

    def table(
        self, title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], caption: str | None = None
    ) -> None:
        """Print a table: its first column is text, the others are figures."""
        table = Table(title=title, title_justify="left", caption=caption)
        for place, heading in enumerate(headings):
            table.add_column(heading, justify="right" if place else "left")
        for row in rows:
            table.add_row(*row)
        print_table(self.console, table)

    def judge(self, aims: Mapping[str, bool]) -> None:
        """Print each aim, and whether it is met."""
        for aim, met in aims.items():
            self.console.print(f"{verdict(met)}  {aim}")

    def leave(self, figures: Mapping[str, Any]) -> None:
        """Name the machine, and write the figures as JSON.

        Raises:
            ValueError: a figure is NaN or infinite, which JSON does not have.
        """
        machine, device = self.machine, device_text(self.machine["device"])
        self.console.print(f"{machine['cpu_model']}, {machine['cores']} cores, device: {device}")
        if self.json_path is None:
            return
        path = self.json_path
        path.parent.mkdir(parents=True, exist_ok=True)
        report = {"benchmark": self.name, "machine": machine, **figures}
        path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        self.console.print(f"figures: {path}")


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
    with _work_folder(workdir) if place is None else nullcontext(place) as directory:
        machine = describe_machine(directory, device)
        if timed and (warning := busy_warning(machine)):
            console.print(f"[yellow]{warning}[/yellow]")
        with _warnings_only(console), progress:
            yield Measurement(name, json_path, console, progress, directory, machine)


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


def describe_machine(workdir: Path, device: str = CPU) -> dict[str, Any]:
    """Date, processor, the device that is measured on, memory, file system, commit and versions, as plain data."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu_model": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": describe_device(device),
        "memory_bytes": psutil.virtual_memory().total,
        "load_before": os.getloadavg()[0],
        "file_system": _file_system(workdir),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch_threads": torch.get_num_threads(),
        "code": measured_code(Path(__file__).resolve().parent),
        "versions": {package: version(package) for package in PACKAGES},
    }


def measured_code(directory: Path) -> str | None:
    """The git commit of the sources there, with `+` where files differ from it; None where git does not have them."""
    tracked = _git(directory, "ls-files", "--error-unmatch", ".")  # an installed package may lie in another's checkout
    return _git(directory, "describe", "--always", "--abbrev=40", "--match=", "--dirty=+") if tracked else None


def busy_warning(machine: dict[str, Any]) -> str | None:
    """A line for the reader where other processes were running when the measurement began."""
    if machine["load_before"] <= LOAD_PER_CORE_MAX * machine["cores"]:
        return None
    return (
        f"the machine was busy before this began (load {machine['load_before']:.1f} on {machine['cores']} cores): "
        "take the figures again when it is quiet"
    )


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git here
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _file_system(path: Path) -> str:
    mounts = [disk for disk in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(disk.mountpoint)]
    return str(max(mounts, key=lambda disk: len(disk.mountpoint)).fstype) if mounts else "unknown"
