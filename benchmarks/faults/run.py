"""`cpsr bench faults`: the whole campaign, one table row a scenario."""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.faults.campaign import PARTS
from cpsr.benchmarks.faults.environments import NOT_INJECTED
from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.benchmarks.faults.tracing import require_strace
from cpsr.benchmarks.faults.worker import campaign
from cpsr.benchmarks.machine import describe_machine
from cpsr.benchmarks.output import progress_bar, verdict, work_directory
from cpsr.errors import ConfigError, CPSRError

__all__ = ["main"]

SHOWN_MAX = 20  # faults that were not survived; the JSON file has all
READS_EVERY = 5  # hundreds of calls read the same few files, for each of the errors


def main(json_path: Path | None = None, every: int = 1, only: str = "", workdir: Path | None = None) -> None:
    """Inject everything, print the table, and write the JSON file.

    Args:
        json_path: where the figures go.
        every: only every so many faults of each scenario.
        only: names of parts, comma-separated; empty for all.
        workdir: where the runs lie; by default the temporary directory.

    Raises:
        ConfigError: there is no part of that name.
        CPSRError: strace is absent, or a fault was not survived (after everything is printed and written).
    """
    require_strace()
    console = Console()
    parts = [(name, every * _stride(name)) for name in _chosen(only)]
    outcomes: list[Outcome] = []
    with work_directory(workdir) as directory, progress_bar(console) as bar:
        machine = describe_machine(directory)
        task = bar.add_task("faults", total=None)
        for outcome in campaign(directory.resolve(), parts):
            outcomes.append(outcome)
            bar.update(task, advance=1, description=outcome.scenario)
    rows = _rows(outcomes)
    console.print(_table(rows))
    bad = [outcome for outcome in outcomes if not outcome.good]
    for outcome in bad[:SHOWN_MAX]:
        console.print(f"{outcome.scenario}, {outcome.fault}: {outcome.what}", markup=False, highlight=False)
    for name, why in NOT_INJECTED.items():
        console.print(f"not injected: {name} ({why})", markup=False, highlight=False)
    if json_path is not None:
        _write(json_path, machine, parts, rows, bad)
        console.print(f"figures: {json_path}")
    lost = [outcome for outcome in bad if outcome.injected]
    if lost:
        raise CPSRError(f"{len(lost)} of {len(outcomes)} faults were not survived; the table above says which")


def _chosen(only: str) -> list[str]:
    names = only.split(",") if only else list(PARTS)
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        raise ConfigError(f"no part of the campaign is called {unknown[0]!r}; there are {', '.join(PARTS)}")
    return names


def _stride(name: str) -> int:
    return READS_EVERY if name.startswith("restart: ") or name.endswith("of a read") else 1


def _rows(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
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


def _table(rows: list[dict[str, Any]]) -> Table:
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


def _write(
    path: Path, machine: dict[str, Any], parts: list[tuple[str, int]], rows: list[dict[str, Any]], bad: list[Outcome]
) -> None:
    report = {
        "machine": machine,
        "every": dict(parts),
        "scenarios": rows,
        "not_survived": [outcome.to_plain() for outcome in bad if outcome.injected],
        "not_injected": [outcome.to_plain() for outcome in bad if not outcome.injected],
        "never_injected": NOT_INJECTED,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
