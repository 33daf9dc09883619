"""The demo's table, plot and page."""

import base64
import html
import string
from importlib.resources import files
from pathlib import Path

import matplotlib
import numpy
from matplotlib.axes import Axes
from rich.markup import escape
from rich.table import Table

from cpsr.demo.result import DemoResult

__all__ = ["table", "write_report"]

ZOOM_BEFORE_ITERATIONS = 60
ZOOM_AFTER_ITERATIONS = 200


def table(result: DemoResult) -> Table:
    """The result as a table for the terminal."""
    shown = Table(title=_summary(result), show_header=False, title_justify="left")
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    for what, value in result.rows():
        shown.add_row(what, escape(value))
    return shown


def write_report(result: DemoResult, run_dir: Path) -> None:
    """Write `loss.png` and the self-contained `report.html`."""
    plot = run_dir / "loss.png"
    _plot(result, plot)
    rows = "\n".join(f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in result.rows())
    page = string.Template(files("cpsr.demo").joinpath("report.html").read_text(encoding="utf-8")).substitute(
        summary=html.escape(_summary(result)),
        plot=base64.b64encode(plot.read_bytes()).decode("ascii"),
        rows=rows,
        date=html.escape(result.date),
        machine=html.escape(result.machine),
    )
    (run_dir / "report.html").write_text(page, encoding="utf-8")


def _summary(result: DemoResult) -> str:
    return (
        f"Failure at iteration {result.failure_iteration}. An exact restart would have repeated "
        f"{result.lost_iterations} iterations. The predicted state repeated none; lag after 60-160 iterations: "
        f"{result.lag.iterations:+.1f} +- {result.lag.standard_error:.1f}"
    )


def _plot(result: DemoResult, path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (whole, near) = pyplot.subplots(1, 2, figsize=(12, 4.5), width_ratios=(1, 1.2), layout="constrained")
    f = result.failure_iteration
    for axes in (whole, near):
        _curves(axes, result)
        axes.set_xlabel("iteration")
    whole.set_ylabel("validation loss (nats per byte)")
    whole.set_title("the whole run")
    near.set_title("around the failure")
    first, last = f - ZOOM_BEFORE_ITERATIONS, f + ZOOM_AFTER_ITERATIONS
    near.set_xlim(first, last)
    inside = numpy.concatenate(
        [curve.between(first, last).losses.mean(axis=1) for curve in (result.fault_free, result.recovered)]
    )
    margin = 0.08 * (inside.max() - inside.min())
    near.set_ylim(inside.min() - margin, inside.max() + margin)
    near.legend(loc="upper right", frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curves(axes: Axes, result: DemoResult) -> None:
    f = result.failure_iteration
    after = result.recovered.between(f, numpy.inf)
    axes.plot(
        result.fault_free.iterations, result.fault_free.losses.mean(axis=1), color="tab:blue", label="fault-free run"
    )
    axes.plot(
        after.iterations, after.losses.mean(axis=1), color="tab:orange", linestyle="--", label="killed and recovered"
    )
    for index, iteration in enumerate(result.checkpoints):
        axes.axvline(iteration, color="0.85", linewidth=0.8, zorder=0, label="checkpoint" if index == 0 else None)
    axes.axvline(result.checkpoint_iteration, color="tab:green", linewidth=1, label="last checkpoint c")
    axes.axvline(f, color="tab:red", linewidth=1, label="failure f")
