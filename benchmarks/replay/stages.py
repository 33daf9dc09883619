"""`cpsr bench stages`: a lost pipeline stage replays alone, or all stages do; and what the logs for it cost."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from cpsr.benchmarks.harness.intervals import median_ratio_interval
from cpsr.benchmarks.harness.machine import machine_text
from cpsr.benchmarks.harness.measurement import Measurement, interval_text, measuring, verdict
from cpsr.benchmarks.harness.ranks import run_ranks
from cpsr.benchmarks.replay.stages_job import WINDOW
from cpsr.checkpoint.memory_removal import remove_memory_states
from cpsr.checkpoint.memory_states import memory_states
from cpsr.checkpoint.run_directory import run_id
from cpsr.errors import CPSRError
from cpsr.tables import print_table

__all__ = ["main"]

AIM = 1.03  # of a step without CPSR
HOST_MEMORY_AIM = 0.02
SETTLED = 0.4  # of a run's steps are left out at its begin
KILLED_AT = 3 * WINDOW + 2
WAYS = "alone", "windows", "windows and logs"


def main(
    json_path: Path | None = None,
    rounds: int = 5,
    steps: int = 30,
    stages: tuple[int, ...] = (2, 3),
    micro_batches: int = 4,
    workdir: Path | None = None,
) -> None:
    """Measure, print the tables, and write the JSON file.

    Args:
        json_path: where the figures go.
        rounds: in each, every variant runs once.
        steps: of a run whose steps are measured.
        stages: of the pipelines.
        micro_batches: of an iteration.
        workdir: holds the runs' directories.

    Raises:
        CPSRError: a job came back with another state than the run that nothing happened to.
    """
    with measuring("stages", json_path, workdir) as call:
        figures: dict[str, Any] = {"rounds": rounds, "steps": steps, "micro_batches": micro_batches, "window": WINDOW}
        for count in stages:
            given = {"stages": count, "micro_batches": micro_batches}
            figures[f"{count} stages"] = {
                "cost": _cost(call, given, rounds, steps),
                "recovery": _recovery(call, given, rounds),
            }
        call.console.print(machine_text(call.machine))
        call.leave(figures)


def _cost(call: Measurement, given: Mapping[str, Any], rounds: int, steps: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    logged = 0
    advance = call.bar(f"steps of {given['stages']} stages", rounds * len(WAYS))
    for number in range(rounds):
        for way in WAYS:
            place = _place(call, f"cost-{given['stages']}-{number}-{way.replace(' ', '-')}")
            found = run_ranks("replay.stages_job", place, given["stages"], until=steps, logs=way, **given)
            if way != "alone":
                remove_memory_states(run_id(place / "run"))
            seconds[way].append(median(found[0]["step_seconds"][int(SETTLED * steps) :]))
            logged = max(logged, int(found[0]["log_bytes"]))
            advance()
    table = Table(title=f"{given['stages']} stages: a step, over one without CPSR", title_justify="left")
    for heading in ("kept", "step, ms", "ratio"):
        table.add_column(heading)
    ratios = {way: median_ratio_interval(seconds[way], seconds["alone"]) for way in WAYS}
    for way, ratio in ratios.items():
        table.add_row(way, f"{1e3 * median(seconds[way]):.0f}", interval_text(ratio, digits=3))
    print_table(call.console, table)
    of_logs = median_ratio_interval(seconds["windows and logs"], seconds["windows"])
    memory = call.machine["memory_bytes"]
    text = f"logs over windows alone: {interval_text(of_logs, digits=3)}; {logged / 1e6:.1f} MB of all ranks together"
    call.console.print(f"{verdict(ratios['windows and logs'].value < AIM)}  {text}")
    found_ratios = {way: asdict(one) for way, one in ratios.items()}
    return {
        "step_seconds": seconds,
        "ratios": found_ratios,
        "logs_over_windows": asdict(of_logs),
        "log_bytes": logged,
        "log_share": logged / memory,
    }


def _recovery(call: Measurement, given: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Kill the last stage; it replays alone, or, where the others' states are removed, all stages do."""
    count = given["stages"]
    until, common = KILLED_AT + WINDOW, {"logs": "windows and logs", **given}
    exact = run_ranks("replay.stages_job", _place(call, f"exact-{count}"), count, until=until, **common)
    seconds: dict[str, list[float]] = {"alone": [], "all stages": []}
    began: dict[str, list[int]] = {"alone": [], "all stages": []}
    advance = call.bar(f"failures of {count} stages", rounds * len(seconds))
    for number in range(rounds):
        for way in seconds:
            place = _place(call, f"killed-{count}-{number}-{way.replace(' ', '-')}")
            with suppress(CPSRError):
                run_ranks(
                    "replay.stages_job", place, count, until=until, killed=count - 1, killed_at=KILLED_AT, **common
                )
            _forget_life(place, departures=way == "all stages")
            back = run_ranks("replay.stages_job", place, count, until=until, failed_at=KILLED_AT, **common)
            remove_memory_states(run_id(place / "run"))
            if [one["weights"] for one in back] != [one["weights"] for one in exact]:
                raise CPSRError(f"{place}: the run ended with other weights than the undisturbed run")
            seconds[way].append(max(one["repeated_seconds"] for one in back))
            began[way].append(back[0]["began_at"])
            advance()
    per_iteration = {
        way: [one / (KILLED_AT - at) for one, at in zip(seconds[way], began[way], strict=True)] for way in seconds
    }
    ratio = median_ratio_interval(per_iteration["alone"], per_iteration["all stages"])
    bubble = (count - 1) / (given["micro_batches"] + count - 1)
    table = Table(title=f"{count} stages: the last one was lost", title_justify="left")
    for heading in ("replayed by", "iterations", "seconds", "an iteration, ms"):
        table.add_column(heading)
    for way, each in per_iteration.items():
        iterations = median(KILLED_AT - at for at in began[way])
        table.add_row(way, f"{iterations:g}", f"{median(seconds[way]):.2f}", f"{1e3 * median(each):.0f}")
    print_table(call.console, table)
    call.console.print(
        f"an iteration alone over one of all stages: {interval_text(ratio)}; without bubbles alone it would be "
        f"{1 - bubble:.2f}"
    )
    return {"seconds": seconds, "began_at": began, "killed_at": KILLED_AT, "ratio": asdict(ratio), "bubble": bubble}


def _forget_life(place: Path, *, departures: bool) -> None:
    """The next life writes its own meeting and results; without the survivors' states all stages replay."""
    for path in (*place.glob("ranks*"), *place.glob("found.*")):
        path.unlink()
    for state in memory_states(run_id(place / "run")):
        if departures and state.kind == "departure":
            state.path.unlink()


def _place(call: Measurement, name: str) -> Path:
    place = call.directory / name
    place.mkdir()
    return place
