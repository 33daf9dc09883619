"""`cpsr bench simulate`: papers' results beside simulated ones, and the planner against brute force."""

from pathlib import Path
from typing import Literal

import numpy
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cpsr.benchmarks.machine import describe_machine
from cpsr.benchmarks.output import save, verdict
from cpsr.benchmarks.simulate import fault_cost, moevement, planner_grid
from cpsr.benchmarks.simulate.plot import draw_fault_cost, draw_moevement, draw_planner
from cpsr.tables import print_table

__all__ = ["SUBJECTS", "Subject", "main"]

Subject = Literal["moevement", "cpsr", "planner"]
SUBJECTS: tuple[Subject, ...] = ("moevement", "cpsr", "planner")


def main(subject: Subject, json_path: Path | None = None) -> None:
    """Simulate, print the tables, and write the JSON file with its plot.

    Args:
        subject: moevement is that paper's Table 3 and Fig. 11; cpsr its paper's Fig. 9; planner a grid of jobs.
        json_path: where the figures go; the plot is put beside it.
    """
    console = Console()
    if subject == "moevement":
        cells, scaled = moevement.table_3(), moevement.figure_11()
        print_table(console, _table_3(cells), _figure_11(scaled))
        report, figure = moevement.report(cells, scaled), draw_moevement(cells, scaled)
    elif subject == "planner":
        bar = track(planner_grid.cases(), "cases", planner_grid.CASES, console=console, disable=not console.is_terminal)
        found = list(bar)
        print_table(console, _worst(found), _cases(found))
        report, figure = planner_grid.report(found), draw_planner(found)
    else:
        compared, swept = fault_cost.comparisons(), fault_cost.sweeps()
        print_table(console, _comparisons(compared), _sweeps(swept))
        for point in fault_cost.LAG_POINTS:
            console.print(f"{point.share:+.2f} u: {point.label}")
        report, figure = fault_cost.report(compared, swept), draw_fault_cost(compared, swept)
    if json_path is not None:
        plot = save(json_path, report | {"machine": describe_machine(json_path.parent)}, figure)
        console.print(f"figures: {json_path}   plot: {plot}")


def _columns(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _table_3(cells: list[moevement.Cell]) -> Table:
    title = "MoEvement, Table 3: ETTR; formula: the paper's own, of its printed recovery times"
    table = _columns(title, "model", "system", "min", "printed", "sim.", "points", "formula", "missing")
    for cell in cells:
        table.add_row(
            cell.model,
            cell.system,
            str(cell.mtbf_minutes),
            f"{cell.paper_ettr:.3f}",
            f"{cell.simulated_ettr:.3f}",
            f"{100 * cell.difference:+.1f}",
            f"{cell.formula_ettr:.3f}",
            f"{cell.unexplained_seconds:.0f} s",
        )
    return table


def _figure_11(cells: list[moevement.ScaledCell]) -> Table:
    table = _columns("MoEvement, Fig. 11", "size", "MTBF min", "iteration", "system", "every", "simulated", "printed")
    for cell in cells:
        table.add_row(
            cell.cluster,
            str(cell.mtbf_minutes),
            f"{cell.iteration_seconds:.1f} s",
            cell.system,
            str(cell.interval_iterations),
            f"{cell.simulated_ettr:.3f}",
            "" if cell.paper_ettr is None else f"{cell.paper_ettr:.2f} ({cell.missing_seconds:+.0f} s)",
        )
    return table


def _comparisons(compared: list[fault_cost.Comparison]) -> Table:
    title = "CPSR, Fig. 9: cost of CPSR at Table III's interval, lower than the rivals' by, %"
    names = [comparison.workload for comparison in compared]
    table = _columns(title, "lag over u", "rival", *names, "mean", "paper")
    for rival, paper in fault_cost.PAPER_SAVINGS.items():
        for index, share in enumerate(fault_cost.LAG_SHARES):
            savings = [100 * comparison.savings[rival][index] for comparison in compared]
            row = [f"{saving:.1f}" for saving in (*savings, float(numpy.mean(savings)))]
            table.add_row(
                f"{share:+.2f}", rival, *row, f"{100 * paper:.1f}", end_section=share == fault_cost.LAG_SHARES[-1]
            )
    for rival in (*fault_cost.PAPER_SAVINGS, "Young"):
        ends = [f"{comparison.break_even[rival]:+.1f} u" for comparison in compared]
        table.add_row("break-even", rival, *ends, "", "")
    for system in compared[0].costs:
        table.add_row("cost, %", system, *(f"{100 * comparison.costs[system]:.3f}" for comparison in compared), "", "")
    return table


def _sweeps(swept: list[fault_cost.Sweep]) -> Table:
    title = f"{swept[0].workload}: lower cost at its own planned interval, %, over CheckFreq at 2% / over Young"
    hours = [f"{value * 60:.0f} min" if value < 1 else f"{value:.0f} h" for value in fault_cost.MTBF_HOURS]
    table = _columns(title, "lag", *hours)
    for sweep in swept:
        pairs = zip(sweep.over_checkfreq, sweep.over_young, sweep.intervals, strict=True)
        cells = [f"{100 * one:.0f} / {100 * other:.0f}\nevery {every}" for one, other, every in pairs]
        table.add_row(sweep.curve, *cells)
    return table


def _worst(found: list[planner_grid.Case]) -> Table:
    table = _columns("Planner: cost above the best, worst of the grid", "against", "worst", "aim", "")
    for name, excess in planner_grid.worst(found).items():
        aim = planner_grid.AIMS.get(name)
        judged = ("", "") if aim is None else (f"{100 * aim:.0f}%", verdict(excess <= aim))
        table.add_row(name, f"{100 * excess:.1f}%", *judged)
    return table


def _cases(found: list[planner_grid.Case], rows: int = 12) -> Table:
    headings = ("min", "state", "phase", "curve x", "planned", "brute force", "above", "over rival")
    table = _columns(f"The {rows} cases furthest above brute force", *headings)
    for case in sorted(found, key=lambda one: -one.over_brute)[:rows]:
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
