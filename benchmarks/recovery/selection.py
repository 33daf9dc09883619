"""The grid of one call of the benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cpsr.benchmarks.recovery.grid import FRACTIONS, INTERVALS
from cpsr.benchmarks.recovery.lost import PART_NAMES, PartName
from cpsr.benchmarks.recovery.methods import find_methods
from cpsr.benchmarks.recovery.workload import WORKLOADS, find_workloads
from cpsr.demo.device import CPU
from cpsr.errors import ConfigError

__all__ = ["FULL", "QUICK", "Selection", "selection"]


@dataclass(frozen=True)
class Selection:
    """What a call measures.

    Attributes:
        name: `quick` or `full`, and whether options changed it.
        workloads: names from `WORKLOADS`.
        points: failure points in each cell and seed.
        seeds: 0, 1, ... of the training runs.
        methods: names.
        lost: parts of the state that a failure takes.
        device: `cpu` or `cuda`, which the runs train on; the prediction is the CPU's.
    """

    name: str
    workloads: tuple[str, ...]
    intervals: tuple[int, ...]
    fractions: tuple[float, ...]
    points: int
    seeds: int
    methods: tuple[str, ...]
    lost: tuple[PartName, ...] = ("all",)
    device: str = CPU


SHOWN = ("auto", "recompute", "stale", "predicted", "moved", "oracle", "twin", "doubled", "placebo")
QUICK = Selection("quick", ("gpt-0.4M-cosine10",), (50,), FRACTIONS, 1, 3, SHOWN)
FULL = Selection("full", tuple(WORKLOADS), INTERVALS, FRACTIONS, 2, 5, find_methods(None))


def selection(
    full: bool = False,
    points: int | None = None,
    seeds: int | None = None,
    workloads: str | None = None,
    methods: str | None = None,
    intervals: str | None = None,
    lost: str | None = None,
    device: str = CPU,
) -> Selection:
    """The quick or the full selection, with what an option says in place of its own; names are comma-separated.

    Raises:
        ConfigError: a name is unknown, or a workload's weights are not kept at some interval.
    """
    base = replace(FULL if full else QUICK, device=device)
    chosen = replace(
        base,
        workloads=base.workloads if workloads is None else find_workloads(workloads),
        methods=base.methods if methods is None else find_methods(methods.split(",")),
        points=points or base.points,
        seeds=seeds or base.seeds,
        intervals=base.intervals if intervals is None else _intervals(intervals),
        lost=base.lost if lost is None else _parts(lost.split(",")),
    )
    for name in chosen.workloads:
        kept = WORKLOADS[name].snapshot_iterations
        if wrong := [interval for interval in chosen.intervals if interval % kept]:
            raise ConfigError(
                f"'{name}' keeps its weights every {kept} iterations, which the interval {wrong[0]} is no multiple of: "
                "name others with --intervals"
            )
    return chosen if chosen == base else replace(chosen, name=f"{base.name}, changed")


def _parts(asked: Sequence[str]) -> tuple[PartName, ...]:
    if wrong := set(asked).difference(PART_NAMES):
        raise ConfigError(f"--lost: no part is called '{wrong.pop()}'; there are {', '.join(PART_NAMES)}")
    return tuple(part for part in PART_NAMES if part in asked)


def _intervals(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 1 for part in parts):
        raise ConfigError(f"--intervals {text}: expected iterations between checkpoints, 2 or more, comma-separated")
    return tuple(dict.fromkeys(map(int, parts)))
