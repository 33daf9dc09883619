"""`cpsr bench faults`: the whole campaign, one table row a scenario: first the checkpoint store, then live jobs."""

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.faults.campaign import PARTS
from cpsr.benchmarks.faults.environments import NOT_INJECTED
from cpsr.benchmarks.faults.live import live
from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.benchmarks.faults.scenarios import NEVER_SENT, chosen
from cpsr.benchmarks.faults.tracing import require_strace
from cpsr.benchmarks.faults.worker import campaign
from cpsr.benchmarks.machine import describe_machine
from cpsr.benchmarks.output import progress_bar, verdict, work_directory
from cpsr.errors import ConfigError, CPSRError
from cpsr.tables import print_table

__all__ = ["main", "parts_asked_for"]

SHOWN_MAX = 20  # faults that were not survived; the JSON file has all
READS_EVERY = 5  # hundreds of calls read the same few files, for each of the errors
LIVE = "live"
SPARSE = "sparse"


def main(
    json_path: Path | None = None, every: int = 1, only: str = "", workdir: Path | None = None, seed: int = 0
) -> None:
    """Inject everything, print the tables, and write the JSON file.

    Args:
        json_path: where the figures go.
        every: only every so many faults of each scenario, and scenarios of live jobs.
        only: names of parts, comma-separated; empty for all. Live jobs are the part `live`; `sparse` stands for all
            parts with sparse checkpoints.
        workdir: where the runs lie; by default the temporary directory.
        seed: the scenarios of live jobs are drawn with it.

    Raises:
        ConfigError: there is no part of that name.
        CPSRError: strace is absent, or a fault was not survived (after everything is printed and written).
    """
    names = parts_asked_for(only)
    parts = [(name, every * _stride(name)) for name in names if name != LIVE]
    if parts:
        require_strace()
    console = Console()
    with work_directory(workdir) as directory:
        machine = describe_machine(directory)
        stored = _progressing(console, campaign(directory.resolve(), parts)) if parts else []
        scenarios = chosen(seed)[::every] if LIVE in names else []
        lived = _progressing(console, live(directory.resolve() / LIVE, scenarios))
    rows = _rows(stored)
    if rows:
        print_table(console, _table(rows))
    if lived:
        print_table(console, _live_table(lived))
    bad = [outcome for outcome in [*stored, *lived] if not outcome.good]
    for outcome in bad[:SHOWN_MAX]:
        console.print(f"{outcome.scenario}, {outcome.fault}: {outcome.what}", markup=False, highlight=False)
    never = (NOT_INJECTED if parts else {}) | (NEVER_SENT if lived else {})
    for name, why in never.items():
        console.print(f"not injected: {name} ({why})", markup=False, highlight=False)
    if json_path is not None:
        report = {
            "machine": machine,
            "every": dict(parts),
            "scenarios": rows,
            "live": {"seed": seed, "every": every, "scenarios": [outcome.to_plain() for outcome in lived]},
            "not_survived": [outcome.to_plain() for outcome in bad if outcome.injected],
            "not_injected": [outcome.to_plain() for outcome in bad if not outcome.injected],
            "never_injected": never,
        }
        _write(json_path, report)
        console.print(f"figures: {json_path}")
    lost = [outcome for outcome in bad if outcome.injected]
    if lost:
        raise CPSRError(
            f"{len(lost)} of {len(stored) + len(lived)} faults were not survived; the table above says which"
        )


def _progressing(console: Console, outcomes: Iterator[Outcome]) -> list[Outcome]:
    """All of them, with a progress bar while they come."""
    found = []
    with progress_bar(console) as bar:
        task = bar.add_task("faults", total=None)
        for outcome in outcomes:
            found.append(outcome)
            bar.update(task, advance=1, description=outcome.scenario)
    return found


def parts_asked_for(only: str) -> list[str]:
    """Names of parts, in the order in which they run; ConfigError where there is none of a name."""
    known = [*PARTS, LIVE]
    asked = only.split(",") if only else known
    unknown = sorted(set(asked) - {*known, SPARSE})
    if unknown:
        raise ConfigError(f"no part of the campaign is called {unknown[0]!r}; there are {', '.join([*known, SPARSE])}")
    return [name for name in known if name in asked or (SPARSE in asked and SPARSE in name)]


def _stride(name: str) -> int:
    return READS_EVERY if "restart: " in name or name.endswith("of a read") else 1


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


def _live_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="Live jobs of two ranks, from the last signal to the first new step", title_justify="left")
    table.add_column("scenario", no_wrap=True)
    for heading in ("injected", "survived", "equal", "resumed s", ""):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        said = [("yes" if yes else "no") for yes in (outcome.injected, outcome.survived, outcome.state_equal)]
        table.add_row(outcome.scenario, *said, f"{outcome.seconds:.1f}", verdict(outcome.good))
    return table


def _write(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
