"""The predictor benchmark on the terminal."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.harness.machine import machine_text
from cpsr.benchmarks.harness.measurement import interval_text, verdict
from cpsr.benchmarks.predictor_cost.result import MEGABYTE, MethodResult
from cpsr.tables import print_table

__all__ = ["show"]

GIGABYTE = 1e9
# Pages that came from the disk, per turn: a handful belong to the interpreter, not to the history.
MAJOR_FAULTS_MAX = 10


def show(
    console: Console, results: list[MethodResult], machine: dict[str, Any], title: str, repeats: int, tokens: int
) -> None:
    """Print what was measured, and the aims."""
    print_table(console, _table(results, title))
    console.print(
        f"Memory: RssAnon of the predicting process above its level before; the mapped history is page cache. Rates: "
        f"forecast and prediction against summing every value of the same checkpoints once, both with the files in "
        f"memory; {repeats} paired turns, medians with 95% bootstrap intervals. A recovery opens the history (hashing "
        f"its files), forecasts, limits and predicts. Training: forward, backward and AdamW on {tokens} tokens, on "
        f"the {machine['device']['kind']}; all else is the CPU's."
    )
    console.print(f"{machine_text(machine)}, torch threads: {machine['torch_threads']}")
    for result in results:
        for aim, met in result.aims().items():
            console.print(f"{verdict(met)}  {aim}")
        if result.major_faults > MAJOR_FAULTS_MAX * repeats:
            console.print(
                f"[yellow]{result.method}: {result.major_faults} pages came from the disk: the history did not stay "
                "in memory, and the rates are the disk's[/yellow]"
            )


def _table(results: list[MethodResult], title: str) -> Table:
    table = Table("", title=title, title_justify="left")
    for result in results:
        table.add_column(result.method, justify="right")
    for name, text in _ROWS.items():
        table.add_row(name, *(text(result) for result in results))
    return table


_ROWS: dict[str, Callable[[MethodResult], str]] = {
    "peak of own memory, MB": lambda result: f"{result.peak_bytes / MEGABYTE:.1f}",
    "history mapped meanwhile, MB": lambda result: f"{result.mapped_bytes / MEGABYTE:.0f}",
    "checkpoints read to decide": lambda result: f"{result.forecast_checkpoints:.2f}",
    "forecast and prediction, GB/s": lambda result: interval_text(result.rate, 1 / GIGABYTE),
    "reading once, GB/s": lambda result: interval_text(result.rate_of_reading, 1 / GIGABYTE),
    "rate over reading once": lambda result: interval_text(result.ratio),
    "rate over copying once": lambda result: interval_text(result.ratio_to_copy),
    "prediction alone over reading once": lambda result: interval_text(result.ratio_of_predict),
    "forecast and prediction, s": lambda result: interval_text(result.seconds),
    "opening, forecast, limits, prediction, s": lambda result: f"{result.recovery_seconds:.2f}",
    "5 training iterations, s": lambda result: f"{result.training_seconds:.2f}",
    "learning one checkpoint, s": lambda result: f"{result.learn_seconds:.2f}",
    "its slices, 99% below, and the longest, ms": lambda result: (
        f"{result.slice_p99_seconds * 1000:.1f}, {result.slice_seconds * 1000:.1f}"
    ),
}
