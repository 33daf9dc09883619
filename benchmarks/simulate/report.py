"""What is simulated, as tables."""

import numpy
from rich.table import Table

from cpsr.benchmarks.harness.measurement import verdict
from cpsr.benchmarks.simulate import fault_cost, moevement, planner_grid

__all__ = ["cases", "comparisons", "figure_11", "sweeps", "table_3", "worst"]


def _columns(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def table_3(cells: list[moevement.Cell]) -> Table:
    """That paper's table beside simulated values."""
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


def figure_11(cells: list[moevement.ScaledCell]) -> Table:
    """That paper's larger clusters."""
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


def comparisons(compared: list[fault_cost.Comparison]) -> Table:
    """What the predictor saves in the paper's setting, by its end cost."""
    title = "CPSR, Fig. 9: cost of CPSR at Table III's interval, lower than the rivals' by, %"
    names = [comparison.workload for comparison in compared]
    table = _columns(title, "end cost over u", "rival", *names, "mean", "paper")
    for rival, paper in fault_cost.PAPER_SAVINGS.items():
        for index, share in enumerate(fault_cost.COST_SHARES):
            savings = [100 * comparison.savings[rival][index] for comparison in compared]
            row = [f"{saving:.1f}" for saving in (*savings, float(numpy.mean(savings)))]
            table.add_row(
                f"{share:+.2f}", rival, *row, f"{100 * paper:.1f}", end_section=share == fault_cost.COST_SHARES[-1]
            )
    for rival in (*fault_cost.PAPER_SAVINGS, "Young"):
        ends = [f"{comparison.break_even[rival]:+.1f} u" for comparison in compared]
        table.add_row("break-even", rival, *ends, "", "")
    for system in compared[0].costs:
        table.add_row("cost, %", system, *(f"{100 * comparison.costs[system]:.3f}" for comparison in compared), "", "")
    return table


def sweeps(swept: list[fault_cost.Sweep]) -> Table:
    """The same by the mean time between failures."""
    title = f"{swept[0].workload}: lower cost at its own planned interval, %, over CheckFreq at 2% / over Young"
    hours = [f"{value * 60:.0f} min" if value < 1 else f"{value:.0f} h" for value in fault_cost.MTBF_HOURS]
    table = _columns(title, "end cost", *hours)
    for sweep in swept:
        pairs = zip(sweep.over_checkfreq, sweep.over_young, sweep.intervals, strict=True)
        cells = [f"{100 * one:.0f} / {100 * other:.0f}\nevery {every}" for one, other, every in pairs]
        table.add_row(sweep.curve, *cells)
    return table


def worst(found: list[planner_grid.Case]) -> Table:
    """The planner's excess cost over the best, against its aims."""
    table = _columns("Planner: cost above the best, worst of the grid", "against", "worst", "aim", "")
    for name, excess in planner_grid.worst(found).items():
        aim = planner_grid.AIMS.get(name)
        judged = ("", "") if aim is None else (f"{100 * aim:.0f}%", verdict(excess <= aim))
        table.add_row(name, f"{100 * excess:.1f}%", *judged)
    return table


def cases(found: list[planner_grid.Case], rows: int = 12) -> Table:
    """The jobs for which that is largest."""
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
