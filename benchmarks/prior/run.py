"""`cpsr bench prior`: measure recoveries on runs of its own, fit the predictor's prior table, and judge it."""

from dataclasses import asdict
from pathlib import Path

import numpy
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table as TextTable

from cpsr.benchmarks.machine import describe_machine
from cpsr.benchmarks.output import progress_bar, save
from cpsr.benchmarks.prior.collect import collect, collect_directions
from cpsr.benchmarks.prior.fit import Left, Recoveries, expected_without, fit, leave_one_run_out, read, read_pairs
from cpsr.benchmarks.prior.runs import RUNS
from cpsr.predictor.calibration import FEATURES, Table
from cpsr.tables import print_table

__all__ = ["CACHE", "DATA", "main"]

CACHE = Path("runs/bench-prior")
DATA = Path("benchmarks/results/2026-11-21-prior")
FAILURES, SETTINGS, DIRECTIONS = 10, 8, 8
SHOWN_ITERATIONS = (-300, 300)


def main(
    data: Path = DATA,
    cache: Path = CACHE,
    failures: int = FAILURES,
    settings: int = SETTINGS,
    directions: int = DIRECTIONS,
    table_path: Path | None = None,
    json_path: Path | None = None,
) -> None:
    """Measure what is missing in the data, fit, print, and write the table where one is asked for.

    Args:
        data: directory of `recoveries.jsonl` and `directions.jsonl`, one failure a line; what is there is kept.
        cache: of the fault-free runs.
        failures: of each run, with settings drawn at random.
        settings: drawn at each of them.
        directions: failures of each run at which the two directions are compared.
        table_path: where the table goes; None: it is only shown.
        json_path: where the figures go; the plot is put beside it.
    """
    console = Console()
    data.mkdir(parents=True, exist_ok=True)
    paths = data / "recoveries.jsonl", data / "directions.jsonl"
    with progress_bar(console) as progress:
        bar = progress.add_task("recoveries", total=(failures + directions) * len(RUNS))
        collect(paths[0], cache, failures, settings, lambda: progress.advance(bar))
        collect_directions(paths[1], cache, directions, lambda: progress.advance(bar))
    recoveries, pairs = read(paths[0]), read_pairs(paths[1])
    table = fit(recoveries, _source(recoveries, pairs), pairs)
    left = leave_one_run_out(recoveries)
    _show(console, table, left)
    if table_path is not None:
        table_path.write_text(table.to_json(), encoding="utf-8")
        console.print(f"table: {table_path}")
    if json_path is not None:
        report = {"benchmark": "prior", "machine": describe_machine(data), "left_out": [asdict(one) for one in left]}
        plot = save(json_path, report | {"table": dict(table.source)}, _draw(recoveries))
        console.print(f"figures: {json_path}   plot: {plot}")


def _source(recoveries: Recoveries, pairs: Recoveries) -> dict[str, object]:
    return {
        "made_by": "cpsr bench prior",
        "runs": sorted(set(recoveries.runs)),
        "failures": len(set(recoveries.failures)),
        "recoveries": len(recoveries.lags),
        "pairs_of_directions": len(pairs.lags) // 2,
    }


def _show(console: Console, table: Table, left: list[Left]) -> None:
    console.print(
        f"{table.source['recoveries']} recoveries at {table.source['failures']} failures; a single one scatters by "
        f"{table.noise_iterations:.0f} iterations around the expectation of its run"
    )
    coefficients = TextTable(title="Terms of the expected lag, in iterations", title_justify="left")
    for heading in ("term", "coefficient", "between runs"):
        coefficients.add_column(heading, justify="left" if heading == "term" else "right")
    for name, mean, variance in zip(FEATURES, table.mean, table.covariance.diagonal(), strict=True):
        coefficients.add_row(name, f"{mean:+.3f}", f"{variance**0.5:.3f}")
    print_table(console, coefficients)
    judged = TextTable(title="Each run, by the table without it", title_justify="left")
    for heading in ("run", "recoveries", "rank correlation", "over the best measured", "restart from c over it"):
        judged.add_column(heading, justify="left" if heading == "run" else "right")
    for one in left:
        row = f"{one.correlation:+.2f}", f"{one.regret_iterations:.0f}", f"{one.stale_regret_iterations:.0f}"
        judged.add_row(one.run, str(one.recoveries), *row)
    print_table(console, judged)


def _draw(recoveries: Recoveries) -> Figure:
    """Expected against measured lag; each run by the table without it."""
    figure = Figure(figsize=(6.5, 6), layout="constrained")
    axes = figure.subplots()
    for name in sorted(set(recoveries.runs)):
        expected, measured = expected_without(recoveries, name)
        axes.plot(numpy.clip(expected, *SHOWN_ITERATIONS), numpy.clip(measured, *SHOWN_ITERATIONS), ".", label=name)
    axes.plot(SHOWN_ITERATIONS, SHOWN_ITERATIONS, color="black", lw=0.8)
    axes.set_xlabel("expected lag, iterations (by the table without the run)")
    axes.set_ylabel("measured lag, iterations")
    axes.legend(fontsize=7, frameon=False)
    return figure
