"""`cpsr simulate`: policies side by side on the same failures."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from cpsr.errors import ConfigError
from cpsr.simulate.arrivals import Arrivals, TraceReplay, Weibull
from cpsr.simulate.outcome import Outcome
from cpsr.simulate.policies import systems
from cpsr.simulate.run import simulate
from cpsr.simulate.spec import SECONDS_PER_DAY, SimulationSpec, read_spec
from cpsr.simulate.system import Job
from cpsr.simulate.trace import Trace, read_trace
from cpsr.tables import print_table

__all__ = ["run_simulation"]

DOTS_PER_INCH = 130
MALFORMED_SHOWN_MAX = 20


def run_simulation(
    spec_path: Path,
    trace_path: Path | None = None,
    policies: Sequence[str] | None = None,
    json_path: Path | None = None,
) -> list[Outcome]:
    """Simulate, print the table, and write the JSON file with its plot.

    Args:
        spec_path: the simulation's description.
        trace_path: failures as recorded there, in place of the description's.
        policies: names, instead of the description's.
        json_path: where the figures go; the plot is put beside it.

    Raises:
        ConfigError: the description, the trace or a policy's name is not usable.
    """
    console, spec = Console(), read_spec(spec_path)
    if json_path is not None:
        import matplotlib  # at once: nothing is simulated for a plot that cannot be drawn

        from cpsr.simulate.plot import draw
    trace = _trace(spec, trace_path)
    arrivals, mtbf_seconds = _arrivals(spec, trace)
    for line in () if trace is None else trace.malformed[:MALFORMED_SHOWN_MAX]:
        console.print(
            f"{trace_path or spec.failures.trace}: {line}; the line was left out", style="yellow", markup=False
        )
    job = _job(spec)
    chosen = systems(spec, mtbf_seconds, policies)
    watched = track(chosen, "systems", console=console, transient=True, disable=not console.is_terminal)
    outcomes = [simulate(job, system, arrivals, spec.runs, spec.seed) for system in watched]
    title = _title(spec, trace, mtbf_seconds)
    print_table(console, _table(outcomes, title))
    if json_path is not None:
        report = _report(spec, trace, mtbf_seconds, outcomes)
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        matplotlib.use("Agg")
        plot = json_path.with_suffix(".png")
        draw(outcomes, title).savefig(plot, dpi=DOTS_PER_INCH)
        console.print(f"figures: {json_path}   plot: {plot}")
    return outcomes


def _trace(spec: SimulationSpec, trace_path: Path | None) -> Trace | None:
    if trace_path is not None:
        return read_trace(trace_path)
    if spec.failures.process != "trace" or spec.failures.trace is None:
        return None
    return read_trace(spec.failures.trace)


def _arrivals(spec: SimulationSpec, trace: Trace | None) -> tuple[Arrivals, float]:
    """The source of failures, and the mean time between them that policies get."""
    if trace is not None:
        if not len(trace.removed):
            raise ConfigError(f"the trace {trace.source} has no incident: there is nothing to simulate")
        try:
            replay = TraceReplay(trace, spec.failures.trace_nodes)
        except ValueError as error:
            raise ConfigError(f"failures.trace_nodes: {error}") from error
        return replay, replay.mtbf_seconds
    shape = spec.failures.weibull_shape if spec.failures.process == "weibull" else 1.0
    return Weibull(spec.mtbf_seconds, shape), spec.mtbf_seconds


def _job(spec: SimulationSpec) -> Job:
    return Job(
        iteration_seconds=spec.iteration_seconds,
        wall_seconds=spec.wall_days * SECONDS_PER_DAY,
        detection_seconds=spec.failures.detection_seconds,
        replacement_seconds=spec.failures.replacement_seconds,
        restart_seconds=spec.failures.restart_seconds,
        samples_per_iteration=spec.samples_per_iteration,
    )


def _title(spec: SimulationSpec, trace: Trace | None, mtbf_seconds: float) -> str:
    source = f"{spec.failures.process} failures" if trace is None else f"trace {Path(trace.source).name}"
    return (
        f"Simulated: {spec.runs} runs of {spec.wall_days:g} days, {source}, MTBF {mtbf_seconds / 60:.1f} min, "
        f"iteration {spec.iteration_seconds:g} s"
    )


def _table(outcomes: Sequence[Outcome], title: str) -> Table:
    error = max(outcome.mean_and_error(outcome.ettr)[1] for outcome in outcomes)
    note = (
        "every: iterations between checkpoints; stall, lost and down (restarting and waiting): % of the wall time; "
        f"standard error of a mean ETTR: up to {error:.5f}"
    )
    table = Table(title=title, caption=note, title_justify="left", caption_justify="left")
    table.add_column("system")
    for heading in ("every", "ETTR", "5%", "95%", "stall", "lost", "down", "fails"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        figures = outcome.to_json()
        quantiles, shares = figures["ettr_quantiles"], figures["wall_time_fractions"]
        table.add_row(
            outcome.system.name,
            str(figures["interval_iterations"]),
            *(f"{value:.4f}" for value in (figures["ettr_mean"], quantiles["0.05"], quantiles["0.95"])),
            *(f"{100 * share:.2f}" for share in (shares["stall"], shares["lost"])),
            f"{100 * (shares['restart'] + shares['waiting']):.2f}",
            f"{figures['failures_mean']:.0f}",
            style="bold" if outcome.system.name == "cpsr" else None,
        )
    return table


def _report(
    spec: SimulationSpec, trace: Trace | None, mtbf_seconds: float, outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    return {
        "simulated": True,
        "spec": spec.model_dump(mode="json"),
        "mtbf_seconds": mtbf_seconds,
        "trace": None
        if trace is None
        else {
            "source": Path(trace.source).name,
            "span_seconds": trace.span_seconds,
            "incidents": len(trace.removed),
            "removed": int(trace.removed.sum()),
            "malformed": list(trace.malformed),
        },
        "systems": [outcome.to_json() for outcome in outcomes],
    }
