"""`cpsr bench reshard`: loading on another number of ranks, beside as many as before and torch's DCP."""

from dataclasses import asdict
from pathlib import Path
from shutil import rmtree
from typing import Any

from cpsr.benchmarks.harness.intervals import Estimate, median_interval, median_ratio_interval
from cpsr.benchmarks.harness.measurement import interval_text, measuring
from cpsr.benchmarks.harness.ranks import run_ranks

__all__ = ["main"]

JOB = "reshard.job"
WIDTH, LAYERS = 1024, 24  # GPT-2 medium: 355 million parameters
CASES = ((2, 3), (4, 2), (1, 4))  # ranks that saved, and ranks that load
ROUNDS = 5
AIM = 1.2  # times the load on as many ranks as saved
OTHER, SAME, DCP = "cpsr", "as many ranks", "torch DCP"
COLUMNS = {
    **{way: way for way in (OTHER, SAME, DCP)},
    "over_same": "over as many",
    "over_dcp": "over DCP",
    "read_over_held": "read over held",
}


def main(
    json_path: Path | None = None,
    rounds: int = ROUNDS,
    workdir: Path | None = None,
    layers: int = LAYERS,
    width: int = WIDTH,
) -> None:
    """Measure, print the table, and write the JSON file.

    Raises:
        CPSRError: a rank has loaded other values than were saved.
    """
    with measuring("reshard", json_path, workdir) as call:
        advance = call.bar("loads", len(CASES) * rounds * 3)
        found = {}
        for saved_by, ranks in CASES:
            found[saved_by, ranks] = _case(call.directory, saved_by, ranks, rounds, (width, layers), advance)
        rows: list[dict[str, Any]] = []
        table = []
        for (saved_by, ranks), loads in found.items():
            row = _row(loads)
            rows.append({"saved_by": saved_by, "ranks": ranks, **{name: asdict(one) for name, one in row.items()}})
            texts = [interval_text(row[name]) for name in COLUMNS]
            table.append((f"{saved_by} to {ranks}", *texts, interval_text(row["peak_bytes"], 1e-6, 0)))
        title = f"seconds of the slowest rank, from a cold page cache; medians of {rounds} with 95% intervals"
        call.table(title, ("ranks", *COLUMNS.values(), "memory, MB"), table)
        aims = {
            f"at most {AIM} times a load on as many ranks as saved": all(
                row["over_same"]["value"] <= AIM for row in rows
            ),
            "faster than torch's DCP": all(row["over_dcp"]["value"] < 1 for row in rows),
        }
        call.judge(aims)
        call.leave({"width": width, "layers": layers, "rounds": rounds, "cases": rows, "aims": aims})


Loads = dict[str, list[list[dict[str, Any]]]]  # by kind: for each round, what each rank has found


def _case(directory: Path, saved_by: int, ranks: int, rounds: int, size: tuple[int, int], advance: Any) -> Loads:
    """Save once, and load in turn in each way."""
    width, layers = size
    folder = directory / f"{saved_by}-{ranks}"
    place = folder / "place"

    def run(name: str, count: int, work: str) -> list[dict[str, Any]]:
        there = folder / name
        there.mkdir(parents=True)
        return run_ranks(JOB, there, count, place=str(place), work=work, width=width, layers=layers)

    run("save", saved_by, "save")
    ways = ((OTHER, ranks, "cpsr"), (SAME, saved_by, "cpsr"), (DCP, ranks, "dcp"))
    loads: Loads = {name: [] for name, *_ in ways}
    for number in range(rounds):
        for name, count, work in ways if number % 2 == 0 else reversed(ways):
            loads[name].append(run(f"{number}-{name}".replace(" ", "-"), count, work))
            advance()
    rmtree(place)
    return loads


def _row(loads: Loads) -> dict[str, Estimate]:
    slowest = {name: [max(rank["seconds"] for rank in found) for found in rounds] for name, rounds in loads.items()}
    read = [
        sum(rank["disk_bytes"] for rank in found) / sum(rank["part_bytes"] for rank in found) for found in loads[OTHER]
    ]
    peak = [float(max(rank["peak_bytes"] for rank in found)) for found in loads[OTHER]]
    return {
        **{name: median_interval(seconds) for name, seconds in slowest.items()},
        "over_same": median_ratio_interval(slowest[OTHER], slowest[SAME]),
        "over_dcp": median_ratio_interval(slowest[OTHER], slowest[DCP]),
        "read_over_held": median_interval(read),
        "peak_bytes": median_interval(peak),
        "dcp_peak_bytes": median_interval([float(max(one["peak_bytes"] for one in found)) for found in loads[DCP]]),
    }
