"""`cpsr bench service`: how fast `GET /plan` is over a long run's journal, and what memory the service takes."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.machine import busy_warning, describe_machine
from cpsr.benchmarks.output import progress_bar, save, verdict, warnings_only, work_directory
from cpsr.benchmarks.own_process import in_own_process
from cpsr.benchmarks.service.clients import Answers, poll
from cpsr.benchmarks.service.long_journal import copied, journal_of, thin_out
from cpsr.benchmarks.service.plot import draw
from cpsr.benchmarks.service.processes import (
    newest_iteration,
    peak_resident_bytes,
    processor_seconds,
    serving,
    training,
)
from cpsr.benchmarks.service.result import (
    AIM_BYTES,
    AIM_SECONDS,
    MEGABYTE,
    MILLISECONDS,
    Result,
    summarise,
)
from cpsr.config import JournalConfig
from cpsr.errors import CPSRError
from cpsr.tables import print_table

__all__ = ["CACHE", "main"]

CACHE = Path("runs/bench-service")
WARM_UP_SECONDS = 5.0  # the first answers of a process import and connect


def main(
    json_path: Path | None = None,
    steps: int = 10_000_000,
    checkpoints: int = 100_000,
    clients: int = 50,
    seconds: float = 60.0,
    workdir: Path | None = None,
    cache: Path = CACHE,
) -> None:
    """Measure, print the table, and write the JSON file with its plot.

    Args:
        json_path: where the figures go; the plot is put beside it.
        steps: rows of the journal.
        checkpoints: rows of the journal.
        clients: each asks once a second.
        seconds: for which they do, over each journal.
        workdir: on the file system to be measured; by default the one for temporary files.
        cache: keeps the journal that was built.

    Raises:
        CPSRError: the job or the service ended, or no request was answered.
    """
    console, full_steps = Console(), JournalConfig().full_steps
    assert full_steps is not None
    results: list[Result] = []
    answers: dict[str, Answers] = {}
    with work_directory(workdir) as directory, warnings_only(console), progress_bar(console) as progress:
        machine = describe_machine(directory)
        if warning := busy_warning(machine):
            console.print(f"[yellow]{warning}[/yellow]")
        building = progress.add_task("rows of the journal", total=steps)
        whole = journal_of(cache, steps, checkpoints, lambda rows: progress.update(building, completed=rows))
        for name, kept in (("every step kept", None), ("old steps thinned out", full_steps)):
            run_dir = directory / name.replace(" ", "-")
            path = copied(whole, run_dir)
            rows = steps
            if kept is not None:
                slices = progress.add_task("slices thinned out", total=None)
                rows = thin_out(path, kept, lambda task=slices: progress.advance(task))  # type: ignore[misc]
            asking = progress.add_task(f"requests: {name}", total=None)
            answers[name], result = _measure(name, run_dir, rows, kept, clients, seconds)
            progress.remove_task(asking)
            results.append(result)
            path.unlink()
    _show(console, results, clients)
    if json_path is not None:
        report: dict[str, Any] = {
            "benchmark": "service",
            "machine": machine,
            "steps": steps,
            "checkpoints": checkpoints,
            "clients": clients,
            "seconds": seconds,
            "aim_seconds": AIM_SECONDS,
            "aim_bytes": AIM_BYTES,
            "results": [result.to_json() for result in results],
        }
        plot = save(json_path, report, draw({name: one.seconds for name, one in answers.items()}, machine))
        console.print(f"figures: {json_path}   plot: {plot}")


def _measure(
    name: str, run_dir: Path, step_rows: int, full_steps: int | None, clients: int, seconds: float
) -> tuple[Answers, Result]:
    journal_bytes = (run_dir / "journal.db").stat().st_size
    with training(run_dir, full_steps), serving(run_dir) as (url, pid):
        in_own_process(poll, url, clients, WARM_UP_SECONDS)
        began, used = newest_iteration(run_dir), processor_seconds(pid)
        answers = in_own_process(poll, url, clients, seconds)
        trained, used = newest_iteration(run_dir) - began, processor_seconds(pid) - used
        service_bytes = peak_resident_bytes(pid)
    if not answers.seconds:
        raise CPSRError(f"none of {answers.refused} requests to {url} was answered with 200")
    return answers, summarise(
        name,
        answers,
        step_rows=step_rows,
        journal_bytes=journal_bytes,
        processor_seconds=used,
        service_bytes=service_bytes,
        trained_iterations=trained,
    )


def _show(console: Console, results: list[Result], clients: int) -> None:
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
