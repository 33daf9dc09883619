"""`cpsr bench prior`: measure recoveries on runs of its own, fit the predictor's prior table, and judge it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.prior.collect import collect, read_rows
from cpsr.benchmarks.prior.fit import Recoveries, fit, leave_one_group_out, leave_one_run_out, recoveries_of
from cpsr.benchmarks.prior.report import draw, show
from cpsr.benchmarks.prior.runs import RUNS
from cpsr.benchmarks.recovery.jobs import train, worths_of
from cpsr.fitter.end_cost import IterationWorth

__all__ = ["CACHE", "DATA", "main", "read"]

CACHE = Path("runs/bench-prior")
DATA = Path("benchmarks/results/2026-11-24-prior")


def main(
    data: Path = DATA,
    cache: Path = CACHE,
    failures: int = 0,
    settings: int = 4,
    workers: int = 1,
    table_path: Path | None = None,
    json_path: Path | None = None,
) -> None:
    """Measure, fit, print, and write the table where one is asked for.

    Args:
        data: directory of `recoveries.jsonl`, one failure a line, and `worths.json`; written anew if something is
            measured.
        cache: keeps the fault-free runs and every measured failure; an interrupted call goes on from there.
        failures: of each run; 0 only fits what is in `data`.
        settings: of the line, drawn at random at each failure.
        workers: processes, of one thread each.
        table_path: where the table goes; None: it is only shown.
        json_path: where the figures go; the plot is put beside it.

    Raises:
        CPSRError: the trainings of a run do not show what an iteration is worth.
    """
    data.mkdir(parents=True, exist_ok=True)
    with measuring("prior", json_path, place=data, timed=False) as call:
        if failures:
            bar = call.progress.add_task("failures", total=failures * len(RUNS))
            with Workers(workers) as pool:
                whole = [run.in_cache(cache) for run in RUNS]
                train(whole, pool, call.progress)
                worths = worths_of(whole, pool, call.progress)
                rows = collect(
                    RUNS, failures, settings, cache, pool, lambda done: call.progress.update(bar, completed=done)
                )
            _write(data, rows, worths)
        recoveries = read(data)
        table = fit(recoveries, _source(recoveries))
        left = leave_one_run_out(recoveries)
        grouped = leave_one_group_out(recoveries, {run.workload.name: run.group for run in RUNS})
        show(call.console, recoveries, table, left, grouped)
        if table_path is not None:
            table_path.write_text(table.to_json(), encoding="utf-8")
            call.console.print(f"table: {table_path}")
        judged = {"left_out": [asdict(one) for one in left], "group_left_out": [asdict(one) for one in grouped]}
        call.leave(judged | {"table": dict(table.source)}, draw(recoveries))


def read(data: Path) -> Recoveries:
    """What a call has left in its directory."""
    worths = json.loads((data / "worths.json").read_text(encoding="utf-8"))
    return recoveries_of(
        read_rows(data / "recoveries.jsonl"), {name: IterationWorth(**worth) for name, worth in worths.items()}
    )


def _write(data: Path, rows: Sequence[Mapping[str, Any]], worths: Mapping[str, IterationWorth]) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (data / "recoveries.jsonl").write_text(lines, encoding="utf-8")
    plain = {name: asdict(worth) for name, worth in worths.items()}
    (data / "worths.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


def _source(recoveries: Recoveries) -> dict[str, object]:
    return {
        "made_by": "cpsr bench prior",
        "score": "end cost",
        "runs": sorted(set(recoveries.runs)),
        "failures": len(set(recoveries.failures)),
        "recoveries": len(recoveries.costs),
    }
