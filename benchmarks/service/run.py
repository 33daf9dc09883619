"""`cpsr bench service`: how fast `GET /plan` is over a long run's journal, and what memory the service takes."""

from pathlib import Path

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.service.clients import Answers
from cpsr.benchmarks.service.long_journal import copied, journal_of, thin_out
from cpsr.benchmarks.service.plot import draw
from cpsr.benchmarks.service.processes import measure
from cpsr.benchmarks.service.report import show
from cpsr.benchmarks.service.result import AIM_BYTES, AIM_SECONDS, Result
from cpsr.config import JournalConfig

__all__ = ["CACHE", "main"]

CACHE = Path("runs/bench-service")


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
    full_steps = JournalConfig().full_steps
    assert full_steps is not None
    results: list[Result] = []
    answers: dict[str, Answers] = {}
    with measuring("service", json_path, workdir) as call:
        building = call.progress.add_task("rows of the journal", total=steps)
        whole = journal_of(cache, steps, checkpoints, lambda rows: call.progress.update(building, completed=rows))
        for name, kept in (("every step kept", None), ("old steps thinned out", full_steps)):
            run_dir = call.directory / name.replace(" ", "-") / "run"
            path = copied(whole, run_dir)
            rows = steps if kept is None else thin_out(path, kept, call.bar("slices thinned out"))
            answers[name], result = measure(name, run_dir, rows, kept, clients, seconds)
            results.append(result)
            path.unlink()
        show(call.console, results, clients)
        figures = {
            "steps": steps,
            "checkpoints": checkpoints,
            "clients": clients,
            "seconds": seconds,
            "aim_seconds": AIM_SECONDS,
            "aim_bytes": AIM_BYTES,
            "results": [result.to_json() for result in results],
        }
        call.leave(figures, draw({name: one.seconds for name, one in answers.items()}, call.machine))
