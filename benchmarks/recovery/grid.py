"""Where failures strike: checkpoint intervals, stages of the training, and several points in each."""

from dataclasses import dataclass, replace

from cpsr.benchmarks.recovery.lost import PartName

__all__ = ["FRACTIONS", "HORIZON_SHARE", "INTERVALS", "Cell", "Point", "points"]

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


def points(iterations: int, interval: int, fraction: float, count: int, lost: PartName = "all") -> list[Point]:
    """The first `count` failure points of a cell; the first ones stay when more are taken."""
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
