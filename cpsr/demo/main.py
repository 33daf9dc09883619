"""The demo: the same job twice, once left alone and once killed, and what the failure cost."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cpsr.demo.device import CPU
from cpsr.demo.launch import train
from cpsr.demo.report import table, write_report
from cpsr.demo.result import failure_iteration, measure
from cpsr.errors import ConfigError
from cpsr.tables import print_table

__all__ = ["run_demo"]

DEFAULT_ITERATIONS = 900
INTERVAL_ITERATIONS = 50
KILLED_RANK = 1
# The failure: past the middle of training, most of an interval after a checkpoint, so that recomputing would be dear.
FAILURE_FRACTION = 0.55
INTERVAL_FRACTION = 0.84


def run_demo(run_dir: Path, iterations: int = DEFAULT_ITERATIONS, device: str = CPU) -> None:
    """Train, kill, recover, compare, and print and write the report.

    Args:
        run_dir: holds the runs `killed` and `fault-free` (replaced), `report.html`, `loss.png` and `result.json`.
        iterations: length of each run, in optimizer steps.
        device: `cpu`, or `cuda`, where the ranks share a GPU if there are fewer than two.

    Raises:
        CPSRError: a job failed; the message names its log.
        ConfigError: the run is too short for a failure after several checkpoints and a measurement behind it.
    """
    shortest = 8 * INTERVAL_ITERATIONS
    if iterations < shortest:
        raise ConfigError(f"the demo needs at least {shortest} iterations, not {iterations}")
    console = Console()
    fault_free, killed = run_dir / "fault-free", run_dir / "killed"
    _empty(fault_free, killed)
    with _progress(console) as progress:
        planned = _planned_failure(iterations)
        shown = _shown(progress, f"run with rank {KILLED_RANK} killed at {planned}", iterations)
        kill = train(killed, iterations, planned, KILLED_RANK, shown, device)
        assert kill is not None
        shown = _shown(progress, "the same run, left alone", iterations)
        train(fault_free, iterations, failure_iteration(killed), None, shown, device)
    result = measure(fault_free, killed, kill, device)
    (run_dir / "result.json").write_text(json.dumps(result.to_json(), indent=2))
    write_report(result, run_dir)
    print_table(console, table(result))
    console.print(f"report: {run_dir / 'report.html'}   plot: {run_dir / 'loss.png'}")


def _planned_failure(iterations: int) -> int:
    intervals = int(iterations * FAILURE_FRACTION) // INTERVAL_ITERATIONS
    return intervals * INTERVAL_ITERATIONS - INTERVAL_ITERATIONS + int(INTERVAL_FRACTION * INTERVAL_ITERATIONS)


def _empty(*directories: Path) -> None:
    """Replace what an earlier demo left."""
    for directory in directories:
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)
        config = {
            "run_dir": str(directory),
            "mode": "predict",
            "checkpoint": {"interval_iterations": INTERVAL_ITERATIONS},
        }
        (directory / "cpsr.yaml").write_text(yaml.safe_dump(config))


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description:38}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress


def _shown(progress: Progress, title: str, iterations: int) -> Callable[[int], None]:
    task = progress.add_task(title, total=iterations)
    return lambda iteration: progress.update(task, completed=iteration)
