"""`cpsr bench fit`: how well the loss curves of finished runs would have been fitted and forecast online."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.loss_fit.losses import RunLosses, read_runs
from cpsr.benchmarks.loss_fit.plot import draw
from cpsr.benchmarks.loss_fit.result import CONFIDENCE, PhaseFit, fit_phases, summarise
from cpsr.benchmarks.machine import describe_machine
from cpsr.benchmarks.output import save
from cpsr.errors import CPSRError
from cpsr.tables import print_table

__all__ = ["PHASE_ITERATIONS", "main"]

PHASE_ITERATIONS = 500
# Fig. 12 of the paper; of what losses, and over which stretch, it does not say.
PAPER_RMSE_NATS = {"GPT2-0.35B": 0.0824, "VGG16": 0.3749}

Curves = Sequence[tuple[RunLosses, Sequence[PhaseFit]]]


def main(
    run_directories: Sequence[Path], phase_iterations: int = PHASE_ITERATIONS, json_path: Path | None = None
) -> None:
    """Fit at the end of every phase, forecast the next, print the table, and write the figures with their plot.

    Args:
        run_directories: run directories with their journals, or runs that the recovery benchmark keeps.
        phase_iterations: longest length of a phase.
        json_path: where the figures go; the plot is put beside it.

    Raises:
        CPSRError: a directory is no run, or no run is long enough for one fit and what comes after it.
    """
    console = Console()
    curves = [(losses, fit_phases(losses, phase_iterations)) for path in run_directories for losses in read_runs(path)]
    if not any(fits for _, fits in curves):
        raise CPSRError(
            f"none of {len(run_directories)} runs goes on after a phase of {phase_iterations} iterations: nothing was "
            "fitted; name longer runs, or a shorter --phase-iterations"
        )
    _show(console, curves)
    if json_path is not None:
        report = {
            "benchmark": "fit",
            "machine": describe_machine(json_path.parent),
            "phase_iterations": phase_iterations,
            "confidence": CONFIDENCE,
            "paper_rmse_nats": PAPER_RMSE_NATS,
            "summaries": [asdict(summary) for summary in summarise([fit for _, fits in curves for fit in fits])],
            "results": [fit.to_json() for _, fits in curves for fit in fits],
        }
        plot = save(json_path, report, draw(curves))
        console.print(f"figures: {json_path}   plot: {plot}")


def _show(console: Console, curves: Curves) -> None:
    table = Table(title="Loss curves fitted online, in nats", title_justify="left")
    headings = ("run", "losses", "phase", "ended by", "family", "RMSE", "noise", "RMSE next", "mean next")
    for heading in (*headings, f"in {CONFIDENCE:.0%} band", "one exponential, next", "ms"):
        table.add_column(heading, overflow="fold" if heading == "run" else "ellipsis")
    for _, fits in curves:
        for number, phase in enumerate(fits):
            table.add_row(
                phase.run if number == 0 else "",
                phase.kind if number == 0 else "",
                f"{phase.first_iteration}-{phase.last_iteration}",
                phase.ended_by,
                phase.fit.family.replace("_", " "),
                f"{phase.rmse_nats:.4f}",
                f"{phase.fit.noise_nats:.4f}",
                f"{phase.next_rmse_nats:.4f}",
                f"{phase.next_mean_nats:+.4f}",
                f"{phase.coverage:.1%}",
                f"{phase.unweighted_rmse_nats:.4f}",
                f"{1000 * phase.seconds:.0f}",
            )
        table.add_section()
    print_table(console, table)
    for summary in summarise([fit for _, fits in curves for fit in fits]):
        console.print(
            f"{summary.kind}: {summary.forecasts} forecasts, median RMSE {summary.rmse_nats:.4f} in sample and "
            f"{summary.next_rmse_nats:.4f} next (one exponential: {summary.unweighted_rmse_nats:.4f}), "
            f"{summary.coverage:.1%} in the {CONFIDENCE:.0%} band"
        )
    left_out = sum(losses.left_out for losses, _ in curves)
    figures = ", ".join(f"{rmse} for {model}" for model, rmse in PAPER_RMSE_NATS.items())
    console.print(
        f"The paper's RMSE: {figures}. RMSE: over the phase that was fitted last; RMSE next, mean next and band: over "
        "what came after, as long as the phase. Losses of single batches have the noise of their batch, which no curve "
        f"can forecast. One exponential: by least squares on all losses so far. Left out: {left_out} losses that were "
        "not finite or not positive."
    )
