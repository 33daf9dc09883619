"""`cpsr bench simulate`: papers' results beside simulated ones, and the planner against brute force."""

from pathlib import Path
from typing import Literal

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.simulate import fault_cost, moevement, planner_grid, report
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
    with measuring("simulate", json_path, timed=False) as call:
        if subject == "moevement":
            cells, scaled = moevement.table_3(), moevement.figure_11()
            print_table(call.console, report.table_3(cells), report.figure_11(scaled))
            figures, plot = moevement.report(cells, scaled), draw_moevement(cells, scaled)
        elif subject == "planner":
            step, found = call.bar("cases", planner_grid.CASES), []
            for case in planner_grid.cases():
                found.append(case)
                step()
            print_table(call.console, report.worst(found), report.cases(found))
            figures, plot = planner_grid.report(found), draw_planner(found)
        else:
            compared, swept = fault_cost.comparisons(), fault_cost.sweeps()
            print_table(call.console, report.comparisons(compared), report.sweeps(swept))
            for point in fault_cost.COST_POINTS:
                call.console.print(f"{point.share:+.2f} u: {point.label}")
            figures, plot = fault_cost.report(compared, swept), draw_fault_cost(compared, swept)
        call.leave(figures, plot)
