"""`cpsr bench prior`: measure recoveries on runs of its own, fit the predictor's prior table, and judge it."""

from dataclasses import asdict
from pathlib import Path

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.prior.collect import collect, collect_directions
from cpsr.benchmarks.prior.fit import Recoveries, fit, leave_one_run_out, read, read_pairs
from cpsr.benchmarks.prior.report import draw, show
from cpsr.benchmarks.prior.runs import RUNS

__all__ = ["CACHE", "DATA", "main"]

CACHE = Path("runs/bench-prior")
DATA = Path("benchmarks/results/2026-11-21-prior")
FAILURES, SETTINGS, DIRECTIONS = 10, 8, 8


def main(
    data: Path = DATA,
    cache: Path = CACHE,
    failures: int = FAILURES,
    settings: int = SETTINGS,
    directions: int = DIRECTIONS,
    table_path: Path | None = None,
    json_path: Path | None = None,
) -> None:
    """Measure what is missing in the data, fit, print, and write the table where one is asked for.

    Args:
        data: directory of `recoveries.jsonl` and `directions.jsonl`, one failure a line; what is there is kept.
        cache: of the fault-free runs.
        failures: of each run, with settings drawn at random.
        settings: drawn at each of them.
        directions: failures of each run at which the two directions are compared.
        table_path: where the table goes; None: it is only shown.
        json_path: where the figures go; the plot is put beside it.
    """
    data.mkdir(parents=True, exist_ok=True)
    paths = data / "recoveries.jsonl", data / "directions.jsonl"
    with measuring("prior", json_path, place=data, timed=False) as call:
        step = call.bar("recoveries", (failures + directions) * len(RUNS))
        collect(paths[0], cache, failures, settings, step)
        collect_directions(paths[1], cache, directions, step)
        recoveries, pairs = read(paths[0]), read_pairs(paths[1])
        table = fit(recoveries, _source(recoveries, pairs), pairs)
        left = leave_one_run_out(recoveries)
        show(call.console, table, left)
        if table_path is not None:
            table_path.write_text(table.to_json(), encoding="utf-8")
            call.console.print(f"table: {table_path}")
        call.leave({"left_out": [asdict(one) for one in left], "table": dict(table.source)}, draw(recoveries))


def _source(recoveries: Recoveries, pairs: Recoveries) -> dict[str, object]:
    return {
        "made_by": "cpsr bench prior",
        "runs": sorted(set(recoveries.runs)),
        "failures": len(set(recoveries.failures)),
        "recoveries": len(recoveries.lags),
        "pairs_of_directions": len(pairs.lags) // 2,
    }
