"""Where failures strike: checkpoint intervals, stages of the training, and several points in each."""

from dataclasses import dataclass, replace

from cpsr.benchmarks.recovery.lost import PART_NAMES, PartName
from cpsr.benchmarks.recovery.methods import find_methods
from cpsr.benchmarks.recovery.workload import WORKLOADS, find_workloads
from cpsr.demo.device import CPU
from cpsr.errors import ConfigError

__all__ = [
    "FRACTIONS",
    "FULL",
    "HORIZON_SHARE",
    "INTERVALS",
    "QUICK",
    "Cell",
    "Point",
    "Selection",
    "points",
    "selection",
]

INTERVALS = (20, 50, 100)  # iterations between checkpoints: the feasible grid
FRACTIONS = (0.25, 0.5, 0.75)
# Iterations from checkpoint to failure, as a share of the interval: 0.84 +- 0.15, the dear half of all failures.
HORIZON_SHARE = 0.84
HORIZON_SPREAD = 0.15
# Failure points lie within this share of the training around the fraction's place.
PLACE_SPREAD = 0.06
# Steps of the golden ratio, and of the squared plastic number beside it: evenly spread however many points are taken,
# so that more points keep the ones before them.
PLACE_STRIDE = 0.6180339887498949
HORIZON_STRIDE = 0.5698402909980532


@dataclass(frozen=True)
class Cell:
    """One cell of the grid.

    Attributes:
        workload: its name.
        interval: iterations between checkpoints.
        fraction: of the training that was done.
        lost: part of the state that the failure takes.
    """

    workload: str
    interval: int
    fraction: float
    lost: PartName = "all"


@dataclass(frozen=True)
class Point:
    """One failure: the last checkpoint c, and the iteration f at which the part is lost."""

    interval: int
    fraction: float
    checkpoint: int
    failure: int
    lost: PartName = "all"

    @property
    def horizon(self) -> int:
        """`u = f - c`: what recomputing costs, in iterations."""
        return self.failure - self.checkpoint


@dataclass(frozen=True)
class Selection:
    """What a call measures.

    Attributes:
        name: `quick` or `full`, and whether options changed it.
        workloads: names from `WORKLOADS`.
        points: failure points in each cell and seed.
        seeds: 0, 1, ... of the training runs.
        methods: names, or None for all that there are.
        lost: parts of the state that a failure takes.
        device: `cpu` or `cuda`, which the runs train on; the prediction is the CPU's.
    """

    name: str
    workloads: tuple[str, ...]
    intervals: tuple[int, ...]
    fractions: tuple[float, ...]
    points: int
    seeds: int
    methods: tuple[str, ...] | None
    lost: tuple[PartName, ...] = ("all",)
    device: str = CPU


CONTROLS = ("twin", "doubled", "placebo", "line-base")
QUICK = Selection(
    "quick",
    ("gpt-0.4M-cosine10",),
    (50,),
    FRACTIONS,
    1,
    3,
    ("recompute", "recompute-moved", "stale", "line-x2", "line", "vitp", "oracle", *CONTROLS),
)
FULL = Selection("full", tuple(WORKLOADS), INTERVALS, FRACTIONS, 2, 5, None)


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
    """The quick or the full selection, with what an option says in place of its own.

    Args:
        full: start from the whole grid.
        points: failure points in each cell and seed.
        seeds: how many.
        workloads: names, comma-separated.
        methods: names, comma-separated.
        intervals: iterations between checkpoints, comma-separated.
        lost: parts of the state, comma-separated.
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: a workload or a method is unknown, or a workload's weights are not kept at some interval.
    """
    base = replace(FULL if full else QUICK, device=device)
    spaced = base.intervals if intervals is None else _intervals(intervals)
    chosen = replace(
        base,
        workloads=base.workloads if workloads is None else find_workloads(workloads),
        methods=base.methods if methods is None else find_methods(methods.split(",")),
        points=points or base.points,
        seeds=seeds or base.seeds,
        intervals=spaced,
        lost=base.lost if lost is None else _parts(lost),
    )
    _refuse_unkept(chosen)
    return chosen if chosen == base else replace(chosen, name=f"{base.name}, changed")


def _parts(text: str) -> tuple[PartName, ...]:
    asked = [part.strip() for part in text.split(",")]
    wrong = [part for part in asked if part not in PART_NAMES]
    if wrong:
        raise ConfigError(f"--lost {text}: no part is called '{wrong[0]}'; there are {', '.join(PART_NAMES)}")
    return tuple(part for part in PART_NAMES if part in asked)


def _intervals(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 1 for part in parts):
        raise ConfigError(f"--intervals {text}: expected iterations between checkpoints, 2 or more, comma-separated")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _refuse_unkept(chosen: Selection) -> None:
    for name in chosen.workloads:
        kept = WORKLOADS[name].snapshot_iterations
        wrong = [interval for interval in chosen.intervals if interval % kept]
        if wrong:
            raise ConfigError(
                f"'{name}' keeps its weights every {kept} iterations, which the interval {wrong[0]} is no multiple of: "
                "name others with --intervals"
            )


def points(iterations: int, interval: int, fraction: float, count: int, lost: PartName = "all") -> list[Point]:
    """The first `count` failure points of a cell; the first ones stay when more are taken.

    Args:
        iterations: of the whole training.
        interval: iterations between checkpoints.
        fraction: of the training done at the failure.
        count: how many.
        lost: the part of the state that they take.
    """
    found: list[Point] = []
    index = 0
    while len(found) < count:
        point = replace(_point(iterations, interval, fraction, index), lost=lost)
        index += 1
        if point not in found:
            found.append(point)
    return found


def _point(iterations: int, interval: int, fraction: float, index: int) -> Point:
    horizon = round(interval * (HORIZON_SHARE + HORIZON_SPREAD * _spread(index, HORIZON_STRIDE)))
    horizon = max(1, min(horizon, interval - 1))
    place = iterations * (fraction + PLACE_SPREAD * _spread(index, PLACE_STRIDE))
    checkpoint = max(1, round((place - horizon) / interval)) * interval
    return Point(interval, fraction, checkpoint, checkpoint + horizon)


def _spread(index: int, stride: float) -> float:
    """Between -1 and 1; 0 for the first."""
    return 2.0 * ((0.5 + index * stride) % 1.0) - 1.0
