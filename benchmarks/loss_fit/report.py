"""The fits of loss curves on the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.loss_fit.losses import RunLosses
from cpsr.benchmarks.loss_fit.result import CONFIDENCE, PhaseFit, summarise
from cpsr.tables import print_table

__all__ = ["PAPER_RMSE_NATS", "Curves", "show"]

# Fig. 12 of the paper; of what losses, and over which stretch, it does not say.
PAPER_RMSE_NATS = {"GPT2-0.35B": 0.0824, "VGG16": 0.3749}

Curves = Sequence[tuple[RunLosses, Sequence[PhaseFit]]]


def show(console: Console, curves: Curves) -> None:
    """Print every phase, and how well the next one was forecast."""
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
