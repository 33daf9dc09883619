"""`cpsr bench scale`: what grows with the number of ranks, and how fast."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.harness.ranks import run_ranks
from cpsr.benchmarks.scale.files import CHECKPOINTS, Cost, file_costs

__all__ = ["main"]

RANKS = (256, 1024, 4096)
PROCESSES = (2, 4, 8, 16, 32)
AIM_RANKS, AIM_SECONDS = 1024, 1.0


def main(
    json_path: Path | None = None,
    workdir: Path | None = None,
    ranks: Sequence[int] = RANKS,
    processes: Sequence[int] = PROCESSES,
) -> None:
    """Measure, print the tables, and write the JSON file.

    Args:
        json_path: where the figures go.
        workdir: on the disk to be measured.
        ranks: numbers of simulated ranks, ascending.
        processes: numbers of real ones, likewise.
    """
    with measuring("scale", json_path, workdir) as call:
        step = call.bar("checkpoints", CHECKPOINTS * len(ranks))
        files: dict[int, dict[str, Cost]] = {}
        for number in ranks:
            place = call.directory / str(number)
            place.mkdir()
            files[number] = file_costs(place, number, step)
        groups: dict[int, dict[str, float]] = {}
        for number in processes:
            place = call.directory / f"group-{number}"
            place.mkdir()
            (groups[number],) = run_ranks("scale.group_job", place, number)
        title = "Simulated ranks: milliseconds (of the processor)"
        call.table(title, ("", *map(str, ranks), "grows as"), _seconds_rows(files))
        call.table(
            "Simulated ranks: calls on files of the run, by rank 0 + each other rank",
            ("", *map(str, ranks), "all ranks, as"),
            _calls_rows(files),
        )
        call.table(
            "Simulated ranks: seconds on rank 0, with 0.5 ms more for each call on files (delay injected by strace)",
            ("", *map(str, ranks)),
            _delayed_rows(files),
        )
        rows = [(name, *(f"{1e3 * groups[number][name]:.1f}" for number in processes)) for name in groups[processes[0]]]
        call.table("Real processes: milliseconds", ("", *map(str, processes)), rows)
        aims = _aims(files)
        call.judge(aims)
        plain = {number: {name: asdict(cost) for name, cost in costs.items()} for number, costs in files.items()}
        call.leave({"simulated_ranks": plain, "processes_seconds": groups, "aims": aims})


def _seconds_rows(files: Mapping[int, Mapping[str, Cost]]) -> list[tuple[str, ...]]:
    rows = []
    for name in next(iter(files.values())):
        found = {number: costs[name] for number, costs in files.items()}
        shown = (f"{1e3 * one.seconds:.1f} ({1e3 * one.processor_seconds:.1f})" for one in found.values())
        rows.append((name, *shown, _growth({number: one.processor_seconds for number, one in found.items()})))
    return rows


def _calls_rows(files: Mapping[int, Mapping[str, Cost]]) -> list[tuple[str, ...]]:
    rows = []
    for name, counted in next(iter(files.values())).items():
        if counted.calls is None and counted.calls_of_others is None:
            continue
        found = {number: (costs[name].calls or 0, costs[name].calls_of_others or 0) for number, costs in files.items()}
        total = {number: first + (number - 1) * other for number, (first, other) in found.items()}
        rows.append((name, *(f"{first} + {other:g}" for first, other in found.values()), _growth(total)))
    return rows


def _delayed_rows(files: Mapping[int, Mapping[str, Cost]]) -> list[tuple[str, ...]]:
    names = [name for name, cost in next(iter(files.values())).items() if cost.delayed_seconds is not None]
    return [(name, *(f"{costs[name].delayed_seconds:.2f}" for costs in files.values())) for name in names]


def _growth(values: Mapping[int, float]) -> str:
    """The power of the number of ranks with which it grows, between the largest two numbers."""
    *_, low, high = values
    if low == high or not values[low] or not values[high]:
        return ""
    return f"n^{math.log(values[high] / values[low]) / math.log(high / low):.1f}"


def _aims(files: Mapping[int, Mapping[str, Cost]]) -> dict[str, bool]:
    if (costs := files.get(AIM_RANKS)) is None:
        return {}

    def within(names: str) -> bool:
        return sum(cost.seconds for name, cost in costs.items() if name.startswith(names)) <= AIM_SECONDS

    return {
        f"{AIM_RANKS} ranks: rank 0 commits, and removes what is old, in {AIM_SECONDS:g} s": within("save: rank 0"),
        f"{AIM_RANKS} ranks: the choice at a restart takes {AIM_SECONDS:g} s": within("restart"),
    }
