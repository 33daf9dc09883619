"""The service benchmark on the terminal."""

from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.harness.measurement import verdict
from cpsr.benchmarks.service.result import MEGABYTE, MILLISECONDS, Result
from cpsr.tables import print_table

__all__ = ["show"]


def show(console: Console, results: list[Result], clients: int) -> None:
    """Print what was measured, and the aims."""
    table = Table("", *(result.name for result in results), title=f"GET /plan, {clients} clients, beside training")
    rows: dict[str, list[str]] = {
        "step rows": [f"{result.step_rows:,}" for result in results],
        "journal, MB": [f"{result.journal_bytes / MEGABYTE:.0f}" for result in results],
        "answers (refused)": [f"{result.requests} ({result.refused})" for result in results],
        "p50, ms": [f"{MILLISECONDS * result.p50_seconds:.1f}" for result in results],
        "p99, ms": [f"{MILLISECONDS * result.p99_seconds:.1f}" for result in results],
        "longest, ms": [f"{MILLISECONDS * result.longest_seconds:.0f}" for result in results],
        "of p99 the clients' own delay, ms": [f"{MILLISECONDS * result.late_p99_seconds:.1f}" for result in results],
        "processor time of one answer, ms": [
            f"{MILLISECONDS * result.answer_processor_seconds:.1f}" for result in results
        ],
        "one answer, bytes": [f"{result.answer_bytes:,}" for result in results],
        "memory of the service, MB": [f"{result.service_bytes / MEGABYTE:.0f}" for result in results],
        "iterations trained meanwhile": [str(result.trained_iterations) for result in results],
    }
    for name, values in rows.items():
        table.add_row(name, *values)
    print_table(console, table)
    for result in results:
        for aim, met in result.aims().items():
            console.print(f"{verdict(met)}  {aim}")
