"""`cpsr bench fit`: how well the loss curves of finished runs would have been fitted and forecast online."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.loss_fit.losses import read_runs
from cpsr.benchmarks.loss_fit.plot import draw
from cpsr.benchmarks.loss_fit.report import PAPER_RMSE_NATS, show
from cpsr.benchmarks.loss_fit.result import CONFIDENCE, fit_phases, summarise
from cpsr.errors import CPSRError

__all__ = ["PHASE_ITERATIONS", "main"]

PHASE_ITERATIONS = 500


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
    curves = [(losses, fit_phases(losses, phase_iterations)) for path in run_directories for losses in read_runs(path)]
    if not any(fits for _, fits in curves):
        raise CPSRError(
            f"none of {len(run_directories)} runs goes on after a phase of {phase_iterations} iterations: nothing was "
            "fitted; name longer runs, or a shorter --phase-iterations"
        )
    with measuring("fit", json_path, timed=False) as call:
        show(call.console, curves)
        figures = {
            "phase_iterations": phase_iterations,
            "confidence": CONFIDENCE,
            "paper_rmse_nats": PAPER_RMSE_NATS,
            "summaries": [asdict(summary) for summary in summarise([fit for _, fits in curves for fit in fits])],
            "results": [fit.to_json() for _, fits in curves for fit in fits],
        }
        call.leave(figures, draw(curves))
