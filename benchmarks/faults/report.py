"""The campaign as tables: one row a scenario."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.benchmarks.harness.measurement import verdict

__all__ = ["live_table", "rows_of", "store_table"]


def rows_of(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Counts and seconds by scenario."""
    by_scenario: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_scenario.setdefault(outcome.scenario, []).append(outcome)
    rows = []
    for scenario, found in by_scenario.items():
        injected = [outcome for outcome in found if outcome.injected]
        seconds = [outcome.seconds for outcome in injected]
        rows.append(
            {
                "scenario": scenario,
                "tried": len(found),
                "injected": len(injected),
                "survived": sum(outcome.survived for outcome in injected),
                "state_equal": sum(outcome.state_equal for outcome in injected),
                "median_seconds": statistics.median(seconds) if seconds else None,
                "longest_seconds": max(seconds, default=None),
            }
        )
    return rows


def store_table(rows: list[dict[str, Any]]) -> Table:
    """Faults of the store."""
    table = Table(title="Faults of the checkpoint store, each followed by a restart", title_justify="left")
    table.add_column("scenario", no_wrap=True)
    for heading in ("injected", "survived", "equal", "time s", ""):
        table.add_column(heading, justify="right")
    for row in rows:
        good = row["tried"] == row["injected"] == row["survived"] == row["state_equal"]
        table.add_row(
            row["scenario"],
            f"{row['injected']}/{row['tried']}",
            str(row["survived"]),
            str(row["state_equal"]),
            "-" if row["median_seconds"] is None else f"{row['median_seconds']:.2f}",
            verdict(good),
        )
    return table


def live_table(outcomes: Sequence[Outcome]) -> Table:
    """Scenarios of live jobs."""
    table = Table(title="Live jobs of two ranks, from the last signal to the first new step", title_justify="left")
    table.add_column("scenario", no_wrap=True)
    for heading in ("injected", "survived", "equal", "resumed s", ""):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        answers = [("yes" if yes else "no") for yes in (outcome.injected, outcome.survived, outcome.state_equal)]
        table.add_row(outcome.scenario, *answers, f"{outcome.seconds:.1f}", verdict(outcome.good))
    return table
