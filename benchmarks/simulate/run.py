"""`cpsr bench simulate`: policies on the failures of a described job, or the planner over a grid of jobs."""

from pathlib import Path

from rich.table import Table

from cpsr.benchmarks.harness.measurement import measuring, verdict
from cpsr.benchmarks.simulate import planner_grid
from cpsr.benchmarks.simulate.described import outcomes_of, read_spec, report, table_of
from cpsr.tables import print_table

__all__ = ["main"]

CASES_SHOWN = 12


def main(spec_path: Path | None = None, trace_path: Path | None = None, json_path: Path | None = None) -> None:
    """Simulate, print the tables, and write the JSON file.

    Arguments are the options of the command.

    Raises:
        ConfigError: the description or the trace is not usable.
    """
    with measuring("simulate", json_path, timed=False) as call:
        if spec_path is None:
            step, found = call.bar("cases", planner_grid.CASES), []
            for case in planner_grid.cases():
                found.append(case)
                step()
            print_table(call.console, _worst(found), _furthest(found))
            call.leave(planner_grid.report(found))
            return
        spec = read_spec(spec_path, trace_path)
        outcomes, mtbf_seconds = outcomes_of(spec)
        print_table(call.console, table_of(spec, outcomes, mtbf_seconds))
        call.leave(report(spec, outcomes, mtbf_seconds))


def _columns(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _worst(found: list[planner_grid.Case]) -> Table:
    """The planner's excess cost over the best, against its aims."""
    table = _columns("Planner: cost above the best, worst of the grid", "against", "worst", "aim", "")
    for name, excess in planner_grid.worst(found).items():
        aim = planner_grid.AIMS.get(name)
        judged = ("", "") if aim is None else (f"{100 * aim:.0f}%", verdict(excess <= aim))
        table.add_row(name, f"{100 * excess:.1f}%", *judged)
    return table


def _furthest(found: list[planner_grid.Case]) -> Table:
    """The jobs for which that is largest."""
    headings = ("min", "state", "phase", "curve x", "planned", "brute force", "above", "over rival")
    table = _columns(f"The {CASES_SHOWN} cases furthest above brute force", *headings)
    for case in sorted(found, key=lambda one: -one.over_brute)[:CASES_SHOWN]:
        table.add_row(
            str(case.mtbf_minutes),
            case.state,
            case.phase,
            f"{case.curve_error:g}",
            f"{case.mode} {case.interval_iterations}",
            f"{case.brute_mode} {case.brute_interval_iterations}",
            f"{100 * case.over_brute:.1f}%",
            f"{100 * case.over_rival:+.1f}%",
        )
    return table
