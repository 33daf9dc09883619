"""`cpsr bench faults`: the whole campaign, one table row a scenario: first the checkpoint store, then live jobs."""

from collections.abc import Iterator
from pathlib import Path

from cpsr.benchmarks.faults.environments import NOT_INJECTED
from cpsr.benchmarks.faults.live import live
from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.benchmarks.faults.report import live_table, rows_of, store_table
from cpsr.benchmarks.faults.scenarios import NEVER_SENT
from cpsr.benchmarks.faults.selection import LIVE, Selection
from cpsr.benchmarks.faults.tracing import require_strace
from cpsr.benchmarks.faults.worker import campaign
from cpsr.benchmarks.harness.measurement import Measurement, measuring
from cpsr.errors import CPSRError
from cpsr.tables import print_table

__all__ = ["main"]

SHOWN_MAX = 20  # faults that were not survived; the JSON file has all


def main(selection: Selection, json_path: Path | None = None, workdir: Path | None = None) -> None:
    """Inject everything, print the tables, and write the JSON file.

    Args:
        selection: what is injected.
        json_path: where the figures go.
        workdir: where the runs lie; by default the temporary directory.

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
        rows = rows_of(stored)
        tables = [*([store_table(rows)] if rows else []), *([live_table(lived)] if lived else [])]
        print_table(call.console, *tables)
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
            "live": [outcome.to_plain() for outcome in lived],
            "not_survived": [outcome.to_plain() for outcome in bad if outcome.injected],
            "not_injected": [outcome.to_plain() for outcome in bad if not outcome.injected],
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
