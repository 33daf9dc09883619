"""What `cpsr bench plan --real` shows: tables, the plot, and the JSON file."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, get_args

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from cpsr.benchmarks.harness.measurement import verdict
from cpsr.benchmarks.plan.forecast import LAG_WINDOW, Cost, Realised
from cpsr.benchmarks.plan.injection import MTBF_PRIOR_FAILURES, PHASE_ITERATIONS, Injection, Mode
from cpsr.benchmarks.plan.judgement import JobResult, relative_error
from cpsr.planner.recovery_curve import LEAD_AFTER_ITERATIONS
from cpsr.predictor.watch import WATCH_ITERATIONS

__all__ = ["AIM_FRACTION", "draw", "report", "tables"]

AIM_FRACTION = 0.25
QUIET_ITERATIONS = LEAD_AFTER_ITERATIONS  # without another failure, a recovery's lag can show
COLOURS = {"stalls": "tab:orange", "lag": "tab:blue"}
MARKERS = {"exact": "o", "auto": "^"}


def tables(results: Sequence[JobResult]) -> list[Table]:
    """Cost beside forecast, what the forecast rested on, and what single recoveries did."""
    return [_costs(results), _reasons(results), _single(results)]


def report(results: Sequence[JobResult], injection: Injection) -> dict[str, Any]:
    """Everything as plain data, for the JSON file."""
    return {
        "aim_fraction": AIM_FRACTION,
        "lag_window_iterations": LAG_WINDOW,
        "settings": {
            "mtbf_hours": "true rate: work in which it can fail times the fault-free iteration, over the failures",
            "mtbf_prior_failures": MTBF_PRIOR_FAILURES,
            "phase_iterations": PHASE_ITERATIONS,
        },
        "injection": asdict(injection),
        "jobs": [
            {
                **asdict(result),
                "error": result.error,
                "error_at_true_rate": result.error_at_true_rate,
                "recoveries_lag_iterations": result.recoveries_lag_iterations,
            }
            for result in results
        ],
        "all_seeds": {mode: _all_seeds(mine) for mode, mine in _by_mode(results).items()},
    }


def draw(results: Sequence[JobResult]) -> Figure:
    """Cost beside forecast of every job, how far each failure lay behind its checkpoint, and what the lag became."""
    figure = Figure(figsize=(18, 5), layout="constrained")
    bars, horizons, course = figure.subplots(1, 3)
    _draw_costs(bars, results)
    _draw_horizons(horizons, results)
    _draw_course(course, results)
    return figure


def _costs(results: Sequence[JobResult]) -> Table:
    table = Table(title="Cost of checkpoints and failures: measured / forecast by the plans, restarts apart")
    for heading in ("mode", "seed"):
        table.add_column(heading)
    for heading in (
        "stalls, s",
        "lag, s",
        "lag, iterations",
        "total, s",
        "error",
        "error at the true rate",
        "within 25%",
    ):
        table.add_column(heading, justify="right")
    for mode, mine in _by_mode(results).items():
        for result in mine:
            happened, forecast = result.measured, result.forecast
            lag = f"{happened.lag_iterations:.0f} / {forecast.lag_iterations:.0f}"
            if happened.bound_iterations is not None:
                lag = f"beyond {lag}"
            table.add_row(
                mode,
                str(result.seed),
                f"{happened.stall_seconds:.2f} / {forecast.stall_seconds:.2f}",
                f"{happened.lag_seconds:.1f} / {forecast.lag_seconds:.1f}",
                lag,
                f"{happened.total_seconds:.1f} / {forecast.total_seconds:.1f}",
                f"{result.error:+.0%}",
                f"{result.error_at_true_rate:+.0%}",
                verdict(abs(result.error_at_true_rate) <= AIM_FRACTION),
            )
        table.add_row(mode, "all", *_summary(mine), end_section=True)
    table.caption = (
        "a forecast near zero makes a large error of a few seconds; true rate: the forecast for just the failures that "
        "there were"
    )
    return table


def _summary(results: Sequence[JobResult]) -> list[str]:
    happened = _together([result.measured for result in results])
    planned = _together([result.forecast for result in results])
    true = _together([result.forecast_at_true_rate for result in results])
    errors = [relative_error(happened, planned), relative_error(happened, true)]
    spreads = [
        statistics.stdev(getattr(result, name) for result in results) if len(results) > 1 else 0.0
        for name in ("error", "error_at_true_rate")
    ]
    return [
        f"{happened.stall_seconds:.2f} / {planned.stall_seconds:.2f}",
        f"{happened.lag_seconds:.1f} / {planned.lag_seconds:.1f}",
        f"{happened.lag_iterations:.0f} / {planned.lag_iterations:.0f}",
        f"{happened.total_seconds:.1f} / {planned.total_seconds:.1f}",
        *(f"{error:+.0%} (sd {spread:.0%})" for error, spread in zip(errors, spreads, strict=True)),
        verdict(abs(errors[1]) <= AIM_FRACTION),
    ]


def _reasons(results: Sequence[JobResult]) -> Table:
    table = Table(title="What the forecasts rested on: measured / forecast, while the job could fail")
    for heading in ("mode", "seed"):
        table.add_column(heading)
    for heading in (
        "failures",
        "mean horizon, iterations",
        "of these uncommitted",
        "predicted",
        "lag of the plans",
        "at the true rate",
        "of the recoveries",
        "measured",
        "of it repeated",
        "interval",
        "planned mode",
        "restart, s",
    ):
        table.add_column(heading, justify="right")
    for result in results:
        failures = result.failures
        behind = result.measured.behind
        table.add_row(
            result.mode,
            str(result.seed),
            f"{len(result.restart_seconds)} / {result.forecast.failures:.1f}",
            f"{_mean_horizon(result):.1f} / {result.forecast.horizon_iterations:.1f}",
            str(sum(failure.uncommitted for failure in failures)),
            str(sum(failure.repeated == 0 for failure in failures)),
            f"{result.forecast.lag_iterations:+.0f}",
            f"{result.forecast_at_true_rate.lag_iterations:+.0f}",
            f"{result.recoveries_lag_iterations:+.0f}",
            f"{result.measured.lag_iterations:+.0f}" + ("" if behind is None else f" ± {behind.standard_error:.0f}"),
            str(result.measured.repeated_iterations),
            ", ".join(f"{interval} ({work})" for interval, work in sorted(result.intervals.items())),
            ", ".join(f"{mode} ({work})" for mode, work in sorted(result.modes.items())),
            f"{statistics.median(result.restart_seconds):.1f}",
        )
    table.caption = (
        "uncommitted: the life before was still watched; lags in iterations: of the recoveries is what each expected, "
        "knowing its horizon; interval and mode: with the iterations for which they applied"
    )
    return table


def _single(results: Sequence[JobResult]) -> Table:
    table = Table(title="Predicted recoveries: lag as each expected, and by how much it moved, in iterations")
    for heading in ("until the next failure", "recoveries", "expected, mean", "moved, mean ± standard error"):
        table.add_column(heading, justify="right")
    for name, mine in _by_quiet(results).items():
        if len(mine) > 1:
            moved = [one.moved for one in mine]
            error = statistics.stdev(moved) / math.sqrt(len(moved))
            expected = statistics.fmean(one.expected for one in mine)
            table.add_row(name, str(len(mine)), f"{expected:+.0f}", f"{statistics.fmean(moved):+.0f} ± {error:.0f}")
    return table


def _by_quiet(results: Sequence[JobResult]) -> dict[str, list[Realised]]:
    recoveries = [one for result in results for one in result.realised]
    return {
        f"{QUIET_ITERATIONS} or more": [one for one in recoveries if one.quiet >= QUIET_ITERATIONS],
        "fewer": [one for one in recoveries if one.quiet < QUIET_ITERATIONS],
    }


def _by_mode(results: Sequence[JobResult]) -> dict[Mode, list[JobResult]]:
    found: dict[Mode, list[JobResult]] = {
        mode: [result for result in results if result.mode == mode] for mode in get_args(Mode)
    }
    return {mode: mine for mode, mine in found.items() if mine}


def _all_seeds(results: Sequence[JobResult]) -> dict[str, Any]:
    """Of the jobs' costs together: a seed whose forecast is near zero counts by its seconds, as the others."""
    happened = _together([result.measured for result in results])
    planned = _together([result.forecast for result in results])
    error = relative_error(happened, _together([result.forecast_at_true_rate for result in results]))
    return {
        "measured": {**vars(happened), "total_seconds": happened.total_seconds},
        "forecast": {**vars(planned), "total_seconds": planned.total_seconds},
        "error": relative_error(happened, planned),
        "error_at_true_rate": error,
        "within_aim": abs(error) <= AIM_FRACTION,
    }


def _together(costs: Sequence[Cost]) -> Cost:
    return Cost(
        sum(cost.stall_seconds for cost in costs),
        sum(cost.lag_seconds for cost in costs),
        sum(cost.lag_iterations for cost in costs),
    )


def _mean_horizon(result: JobResult) -> float:
    return statistics.fmean(failure.horizon for failure in result.failures) if result.failures else 0.0


def _draw_costs(axes: Axes, results: Sequence[JobResult]) -> None:
    places = numpy.arange(len(results))
    for side, (name, width) in enumerate((("forecast", -0.2), ("measured", 0.2))):
        costs = [getattr(result, name) for result in results]
        stalls = numpy.array([cost.stall_seconds for cost in costs])
        lags = numpy.array([cost.lag_seconds for cost in costs])
        hatch = "" if side else "//"
        axes.bar(places + width, lags, 0.38, color=COLOURS["lag"], hatch=hatch, edgecolor="white", label=f"lag, {name}")
        axes.bar(
            places + width,
            stalls,
            0.38,
            bottom=numpy.maximum(lags, 0.0),
            color=COLOURS["stalls"],
            hatch=hatch,
            edgecolor="white",
            label=f"stalls, {name}",
        )
        axes.plot(places + width, stalls + lags, linestyle="", marker="_", color="black", markersize=16)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set_xticks(places, [f"{result.mode}\nseed {result.seed}" for result in results])
    axes.set(ylabel="seconds", title="Cost of all failures and checkpoints (bar: total)")
    axes.legend(fontsize=8)


def _draw_horizons(axes: Axes, results: Sequence[JobResult]) -> None:
    for mode, mine in _by_mode(results).items():
        failures = [failure for result in mine for failure in result.failures]
        for predicted, filled in ((True, True), (False, False)):
            some = [failure for failure in failures if (failure.repeated == 0) == predicted]
            if not some:
                continue
            axes.plot(
                [failure.since_restart for failure in some],
                [failure.horizon for failure in some],
                linestyle="",
                marker=MARKERS[mode],
                fillstyle="full" if filled else "none",
                label=f"{mode}, {'predicted' if predicted else 'recomputed'}",
            )
        planned = statistics.fmean(result.forecast.horizon_iterations for result in mine)
        axes.axhline(planned, linestyle="--" if mode == "exact" else ":", color="grey", label=f"mean planned, {mode}")
    watch = WATCH_ITERATIONS
    axes.axvline(watch, color="tab:red", linewidth=0.8, label="a predicted state is watched up to here")
    axes.set(
        xlabel="iterations since the last restart",
        ylabel="checkpoint to failure, iterations",
        title="How far each failure lay behind its checkpoint",
    )
    axes.legend(fontsize=8)


def _draw_course(axes: Axes, results: Sequence[JobResult]) -> None:
    """The lag with its standard error; at every failure of a job a mark on its line."""
    for result in results:
        if not result.course:
            continue
        iterations, lags, errors = (numpy.array(column) for column in zip(*result.course, strict=True))
        style = "--" if result.mode == "exact" else "-"
        (line,) = axes.plot(iterations, lags, linestyle=style, label=f"{result.mode}, seed {result.seed}")
        axes.fill_between(iterations, lags - errors, lags + errors, color=line.get_color(), alpha=0.15)
        failed = [failure.iteration for failure in result.failures]
        axes.plot(failed, numpy.interp(failed, iterations, lags), linestyle="", marker="x", color=line.get_color())
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set(
        xlabel="iteration (x: failures)",
        ylabel="behind the run without failures, iterations",
        title="Lag of the losses over the run; what is repeated is not in it",
    )
    axes.legend(fontsize=8)
