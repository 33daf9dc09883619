"""`cpsr bench simulate`: policies on the failures of a described job, or the planner over a grid of jobs."""

from pathlib import Path

from cpsr.benchmarks.harness.measurement import Measurement, measuring, verdict
from cpsr.benchmarks.simulate import planner_grid
from cpsr.benchmarks.simulate.described import SimulationSpec, outcomes_of, report, show
from cpsr.config import read_model

__all__ = ["main"]

CASES_SHOWN = 12


def main(spec_path: Path | None = None, json_path: Path | None = None) -> None:
    """Simulate, print the tables, and write the JSON file.

    Raises:
        ConfigError: the description cannot be read, or a key does not fit; the message names each.
    """
    with measuring("simulate", json_path, timed=False) as call:
        if spec_path is None:
            step, found = call.bar("cases", planner_grid.CASES), []
            for case in planner_grid.cases():
                found.append(case)
                step()
            _show(call, found)
            call.leave(planner_grid.report(found))
            return
        spec = read_model(SimulationSpec, spec_path)
        outcomes = outcomes_of(spec)
        show(call, spec, outcomes)
        call.leave(report(spec, outcomes))


def _show(call: Measurement, found: list[planner_grid.Case]) -> None:
    """The planner's excess cost over the best, against its aims, and the jobs for which that is largest."""
    rows: list[tuple[str, ...]] = []
    for name, excess in planner_grid.worst(found).items():
        aim = planner_grid.AIMS.get(name)
        judged = ("", "") if aim is None else (f"{100 * aim:.0f}%", verdict(excess <= aim))
        rows.append((name, f"{100 * excess:.1f}%", *judged))
    call.table("Planner: cost above the best, worst of the grid", ("against", "worst", "aim", ""), rows)
    headings = ("min", "state", "phase", "curve x", "planned", "brute force", "above", "over rival")
    rows = [
        (
            str(case.mtbf_minutes),
            case.state,
            case.phase,
            f"{case.curve_error:g}",
            f"{case.mode} {case.interval_iterations}",
            f"{case.brute_mode} {case.brute_interval_iterations}",
            f"{100 * case.over_brute:.1f}%",
            f"{100 * case.over_rival:+.1f}%",
        )
        for case in sorted(found, key=lambda one: -one.over_brute)[:CASES_SHOWN]
    ]
    call.table(f"The {CASES_SHOWN} cases furthest above brute force", headings, rows)
