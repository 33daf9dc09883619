"""`cpsr bench service`: how fast `GET /plan` is over a long run's journal, and what memory the service takes."""

from pathlib import Path

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.service.long_journal import copied, journal_of, thin_out
from cpsr.benchmarks.service.plot import draw
from cpsr.benchmarks.service.processes import measure
from cpsr.benchmarks.service.report import show
from cpsr.benchmarks.service.result import AIM_BYTES, AIM_SECONDS
from cpsr.journal.writer import FULL_STEPS

__all__ = ["CACHE", "main"]

CACHE = Path("runs/bench-service")
NAME = "old steps thinned out"


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
    with measuring("service", json_path, workdir) as call:
        building = call.progress.add_task("rows of the journal", total=steps)
        whole = journal_of(cache, steps, checkpoints, lambda rows: call.progress.update(building, completed=rows))
        run_dir = call.directory / "run"
        rows = thin_out(copied(whole, run_dir), FULL_STEPS, call.bar("slices thinned out"))
        answers, result = measure(NAME, run_dir, rows, clients, seconds)
        show(call.console, [result], clients)
        figures = {
            "steps": steps,
            "checkpoints": checkpoints,
            "clients": clients,
            "seconds": seconds,
            "aim_seconds": AIM_SECONDS,
            "aim_bytes": AIM_BYTES,
            "results": [result.to_json()],
        }
        call.leave(figures, draw({NAME: answers.seconds}, call.machine))
