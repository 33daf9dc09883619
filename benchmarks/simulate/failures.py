"""When failures come: Poisson, Weibull, or as a trace of machines that came and went recorded them.

Traces have one of two forms: events, `milliseconds,add|remove,node`, and samples, `index,unix seconds,alive` under the
header `,Time,GPUs`. Removals of the same instant are one failure. Such traces are of preempted spot machines: they come
in bursts, and show little of how often hardware fails.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy

from cpsr.errors import ConfigError
from cpsr.planner.inputs import Array

__all__ = ["Arrivals", "Trace", "Weibull", "poisson", "read_trace"]

MILLISECONDS = 1000.0
EVENT = re.compile(r"(\d+(?:\.\d+)?),(?:add|(remove)),[^,\s]+")
SAMPLE = re.compile(r"\d+,(\d+(?:\.\d+)?),(\d+)")
SAMPLES_HEADER = ",Time,GPUs"

After = Callable[[Array], Array]
"""Time of each run's next failure, later than the given one of each run; infinite where there is none."""


class Arrivals(Protocol):
    """A source of failures."""

    def stream(self, runs: int, generator: numpy.random.Generator) -> After:
        """Failures of that many independent runs, one after the other."""


@dataclass(frozen=True)
class Weibull:
    """Independent gaps; below 1 the `shape` makes them come in bursts, 1 is Poisson."""

    mtbf_seconds: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not (self.mtbf_seconds > 0 and 0 < self.shape < math.inf):
            raise ValueError(f"mtbf_seconds and shape must be positive, not {self.mtbf_seconds} and {self.shape}")

    def stream(self, runs: int, generator: numpy.random.Generator) -> After:
        """Failures from a job that starts new."""
        scale = self.mtbf_seconds / math.gamma(1 + 1 / self.shape)
        # One draw for every run at each call, so that systems compared under one seed meet the same failures.
        return lambda seconds: seconds + (scale if math.isinf(scale) else scale * generator.weibull(self.shape, runs))


def poisson(mtbf_seconds: float) -> Weibull:
    """Failures without memory."""
    return Weibull(mtbf_seconds)


@dataclass(frozen=True)
class Trace:
    """Recorded failures, again and again; run 0 from the beginning, the others from a random point in it.

    Attributes:
        span_seconds: from the first row to the last.
        failure_seconds: of each instant at which machines went, after the first row; ascending.
    """

    span_seconds: float
    failure_seconds: tuple[float, ...]

    @property
    def mtbf_seconds(self) -> float:
        """Mean time between failures."""
        return self.span_seconds / len(self.failure_seconds)

    def stream(self, runs: int, generator: numpy.random.Generator) -> After:
        """Failures of each run."""
        offsets = generator.uniform(0.0, self.span_seconds, runs)
        offsets[0] = 0.0
        moments, count = numpy.array(self.failure_seconds), len(self.failure_seconds)
        # Number of the next failure, counted through all repetitions: by times alone one could be met twice.
        following = numpy.zeros(runs, dtype=numpy.int64)

        def after(seconds: Array) -> Array:
            nonlocal following
            rounds = numpy.floor((seconds + offsets) / self.span_seconds)
            within = numpy.searchsorted(moments, seconds + offsets - rounds * self.span_seconds, side="right")
            number = numpy.maximum(following, (rounds * count + within).astype(numpy.int64))
            following = number + 1
            moment: Array = moments[number % count] + (number // count) * self.span_seconds - offsets
            return moment

        return after


def read_trace(path: Path) -> Trace:
    """A trace from a file in one of the two forms.

    Raises:
        ConfigError: the file cannot be read, a line has none of the forms, or nothing fails in it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}; name a text file of one of the two forms") from error
    at: list[float] = []
    failures: set[float] = set()
    alive = 0
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or (number == 1 and line == SAMPLES_HEADER):
            continue
        if (event := EVENT.fullmatch(line)) is not None:
            at.append(float(event[1]) / MILLISECONDS)
            fails = event[2] is not None
        elif (sample := SAMPLE.fullmatch(line)) is not None:
            at.append(float(sample[1]))
            fails, alive = int(sample[2]) < alive, int(sample[2])
        else:
            raise ConfigError(
                f"{path}, line {number}: {line!r} is neither 'milliseconds,add|remove,node' nor 'index,unix "
                f"seconds,alive' under the header '{SAMPLES_HEADER}'"
            )
        if fails:
            failures.add(at[-1])
    first = min(at, default=0.0)
    moments = tuple(sorted(moment - first for moment in failures if moment > first))
    if not moments:
        raise ConfigError(f"the trace {path} has no failure after its first row: there is nothing to simulate")
    return Trace(max(at) - first, moments)
