"""`cpsr bench faults`: the whole campaign, one table row a scenario: first the checkpoint store, then live jobs."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cpsr.benchmarks.faults.campaign import campaign
from cpsr.benchmarks.faults.environments import NOT_INJECTED
from cpsr.benchmarks.faults.live import live
from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.benchmarks.faults.scenarios import NEVER_SENT
from cpsr.benchmarks.faults.selection import LIVE, Selection
from cpsr.benchmarks.faults.tracing import require_strace
from cpsr.benchmarks.harness.measurement import Measurement, measuring, verdict
from cpsr.errors import CPSRError

__all__ = ["main"]

SHOWN_MAX = 20  # faults that were not survived; the JSON file has all


def main(selection: Selection, json_path: Path | None = None, workdir: Path | None = None) -> None:
    """Inject everything, print the tables, and write the JSON file.

    Raises:
        CPSRError: strace is absent; a fault was not survived, or there were fewer than there have to be (after
            everything is printed and written).
    """
    if selection.parts:
        require_strace()
    with measuring("faults", json_path, workdir, timed=False) as call:
        parts = list(selection.parts.items())
        stored = _followed(call, campaign(call.directory, parts)) if parts else []
        lived = _followed(call, live(call.directory / LIVE, selection.scenarios))
        rows = _rows_of(stored)
        _show(call, rows, lived)
        bad = [outcome for outcome in [*stored, *lived] if not outcome.good]
        never = (NOT_INJECTED if parts else {}) | (NEVER_SENT if lived else {})
        lines = [f"{outcome.scenario}, {outcome.fault}: {outcome.what}" for outcome in bad[:SHOWN_MAX]]
        lines += [f"not injected: {name} ({why})" for name, why in never.items()]
        lines += (missing := selection.missing(stored))
        for line in lines:
            call.console.print(line, markup=False, highlight=False)
        figures = {
            "every": selection.parts,
            "scenarios": rows,
            "live": [asdict(outcome) for outcome in lived],
            "not_survived": [asdict(outcome) for outcome in bad if outcome.injected],
            "not_injected": [asdict(outcome) for outcome in bad if not outcome.injected],
            "never_injected": never,
        }
        call.leave(figures)
    lost = sum(outcome.injected for outcome in bad)
    if lost or missing:
        of = f"{lost} of {len(stored) + len(lived)} faults were not survived"
        raise CPSRError(f"{of}, {len(missing)} scenarios met too few; the tables above say which")


def _followed(call: Measurement, outcomes: Iterator[Outcome]) -> list[Outcome]:
    """All of them, with a progress bar while they come."""
    found = []
    task = call.progress.add_task("faults", total=None)
    for outcome in outcomes:
        found.append(outcome)
        call.progress.update(task, advance=1, description=outcome.scenario)
    return found


def _rows_of(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
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


def _show(call: Measurement, rows: Sequence[dict[str, Any]], lived: Sequence[Outcome]) -> None:
    stored = []
    for row in rows:
        good = row["tried"] == row["injected"] == row["survived"] == row["state_equal"]
        seconds = "-" if row["median_seconds"] is None else f"{row['median_seconds']:.2f}"
        counts = f"{row['injected']}/{row['tried']}", str(row["survived"]), str(row["state_equal"])
        stored.append((row["scenario"], *counts, seconds, verdict(good)))
    if stored:
        headings = ("scenario", "injected", "survived", "equal", "time s", "")
        call.table("Faults of the checkpoint store, each followed by a restart", headings, stored)
    jobs = []
    for one in lived:
        answers = [("yes" if yes else "no") for yes in (one.injected, one.survived, one.state_equal)]
        jobs.append((one.scenario, *answers, f"{one.seconds:.1f}", verdict(one.good)))
    if jobs:
        headings = ("scenario", "injected", "survived", "equal", "resumed s", "")
        call.table("Live jobs of two ranks, from the last signal to the first new step", headings, jobs)
