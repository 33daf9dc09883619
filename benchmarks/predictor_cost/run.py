"""`cpsr bench predictor`: memory and speed of prediction at the size of a real model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.machine import busy_warning, describe_machine
from cpsr.benchmarks.output import interval_text, progress_bar, save, verdict, warnings_only
from cpsr.benchmarks.own_process import in_own_process
from cpsr.benchmarks.predictor_cost.history import SIZES, SyntheticHistory
from cpsr.benchmarks.predictor_cost.measure import METHODS, MethodSamples, measure_method
from cpsr.benchmarks.predictor_cost.plot import draw
from cpsr.benchmarks.predictor_cost.result import MEGABYTE, MethodResult, summarise
from cpsr.benchmarks.predictor_cost.training import training_seconds
from cpsr.demo.model import GPTConfig
from cpsr.errors import ConfigError
from cpsr.tables import print_table

__all__ = ["CACHE", "main"]

CACHE = Path("runs/bench-predictor")
GIGABYTE = 1e9
# Pages that came from the disk, per turn: a handful belong to the interpreter, not to the history.
MAJOR_FAULTS_MAX = 10


def main(
    parameters: str = "350M",
    checkpoints: int = 8,
    methods: str = "default",
    repeats: int = 7,
    tokens: int = 256,
    cache: Path = CACHE,
    keep: bool = False,
    json_path: Path | None = None,
    sizes: dict[str, GPTConfig] = SIZES,
) -> None:
    """Train a few iterations, write the history, predict from it, print the table, and write the figures.

    Args:
        parameters: one of `sizes`.
        checkpoints: in the history, at least 3.
        methods: names of `METHODS`, comma-separated.
        repeats: paired turns of reading and predicting, for each method.
        tokens: a training batch is one sequence of this length.
        cache: holds the history.
        keep: leave the history there, for the next call.
        json_path: where the figures go; the plot is put beside it.
        sizes: name -> shape of the model.

    Raises:
        ConfigError: an argument names nothing that there is.
        CPSRError: the disk or the memory does not suffice.
    """
    names = _methods(methods)
    config = _config(parameters, tokens, sizes)
    console = Console()
    history = SyntheticHistory(cache / f"{parameters}-{checkpoints}", config, checkpoints)
    with warnings_only(console), progress_bar(console) as progress, _removed_unless(keep, history):
        machine = describe_machine(cache)
        if warning := busy_warning(machine):
            console.print(f"[yellow]{warning}[/yellow]")
        task = progress.add_task("training, history, prediction", total=1 + checkpoints + len(names))
        iterations = in_own_process(training_seconds, config, tokens)  # ends before the page cache is filled
        progress.advance(task)
        history.write(lambda: progress.advance(task))
        samples = []
        for name in names:
            samples.append(in_own_process(measure_method, name, history, repeats))
            progress.advance(task)
    results = [summarise(sample, iterations) for sample in samples]
    title = f"{history.parameters / MEGABYTE:.0f}M parameters, {checkpoints} checkpoints"
    _show(console, results, machine, title, repeats, tokens)
    if json_path is not None:
        report = _report(results, samples, machine, history, iterations, tokens)
        plot = save(json_path, report, draw(results, samples, machine, title))
        console.print(f"figures: {json_path}   plot: {plot}")


@contextmanager
def _removed_unless(keep: bool, history: SyntheticHistory) -> Iterator[None]:
    try:
        yield
    finally:
        if not keep:
            history.remove()


def _methods(methods: str) -> list[str]:
    names = [name.strip() for name in methods.split(",")]
    if unknown := [name for name in names if name not in METHODS]:
        raise ConfigError(f"--methods: {', '.join(unknown)} not known; there are {', '.join(METHODS)}")
    return names


def _config(parameters: str, tokens: int, sizes: dict[str, GPTConfig]) -> GPTConfig:
    if parameters not in sizes:
        raise ConfigError(f"--parameters {parameters} is not known; there are {', '.join(sizes)}")
    if tokens > sizes[parameters].context:
        raise ConfigError(f"--tokens {tokens}: the context of {parameters} is {sizes[parameters].context}")
    return sizes[parameters]


def _report(
    results: list[MethodResult],
    samples: list[MethodSamples],
    machine: dict[str, Any],
    history: SyntheticHistory,
    iterations: Sequence[float],
    tokens: int,
) -> dict[str, Any]:
    return {
        "benchmark": "predictor",
        "machine": machine,
        "model": asdict(history.config),
        "parameters": history.parameters,
        "checkpoints": history.checkpoints,
        "training": {"tokens": tokens, "iteration_seconds": list(iterations)},
        "results": [result.to_json() for result in results],
        "samples": {sample.method: asdict(sample) for sample in samples},
    }


def _show(
    console: Console, results: list[MethodResult], machine: dict[str, Any], title: str, repeats: int, tokens: int
) -> None:
    print_table(console, _table(results, title))
    console.print(
        f"Memory: RssAnon of the predicting process above its level before; the mapped history is page cache. Rates: "
        f"forecast and prediction against summing every value of the same checkpoints once, both with the files in "
        f"memory; {repeats} paired turns, medians with 95% bootstrap intervals. A recovery opens the history (hashing "
        f"its files), forecasts, limits and predicts. Training: forward, backward and AdamW on {tokens} tokens."
    )
    console.print(f"{machine['cpu_model']}, {machine['cores']} cores, torch threads: {machine['torch_threads']}")
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
