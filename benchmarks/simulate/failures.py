"""When failures come: Poisson, Weibull, or as a trace of machines that came and went recorded them.

Traces have one of two forms: events, `milliseconds,add|remove,node`, and samples, `index,unix seconds,alive` under the
header `,Time,GPUs`. Removals of the same instant are one incident. Such traces are of preempted spot machines: they
come in bursts, and show little of how often hardware fails.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

import numpy
from numpy.typing import NDArray

from cpsr.errors import ConfigError
from cpsr.planner.inputs import Array

__all__ = ["Arrivals", "Stream", "Trace", "TraceReplay", "Weibull", "poisson", "read_trace"]

Counts = NDArray[numpy.int64]
# A row as seconds and the change of the nodes alive: (added, removed), or how many there are.
_Row = tuple[float, int, int]

MILLISECONDS = 1000.0
EVENTS = re.compile(r"(\d+(?:\.\d+)?),(add|remove),([^,\s]+)")
SAMPLES = re.compile(r"\d+,(\d+(?:\.\d+)?),(\d+)")
SAMPLES_HEADER = ",Time,GPUs"


@dataclass(frozen=True)
class Trace:
    """What happened to a group of machines.

    Attributes:
        source: the file.
        span_seconds: from its first row to its last.
        incident_seconds: of each instant at which nodes went, after the first row; ascending.
        removed: nodes that went then.
        alive_before: nodes alive just before.
        alive_seconds: instants at which the number alive is known; ascending, the first is 0.
        alive: nodes from that instant on.
        malformed: what is wrong with which line; those lines were left out.
    """

    source: str
    span_seconds: float
    incident_seconds: Array
    removed: Counts
    alive_before: Counts
    alive_seconds: Array
    alive: Counts
    malformed: tuple[str, ...] = ()


class Stream(Protocol):
    """The failures of many runs, one after the other."""

    def after(self, seconds: Array) -> Array:
        """Time of each run's next failure, later than `seconds`; infinite where there is none."""

    def capacity_at(self, seconds: Array) -> Array:
        """Earliest time, not before `seconds`, at which each run has the nodes it needs."""


class Arrivals(Protocol):
    """A source of failures."""

    def stream(self, runs: int, generator: numpy.random.Generator) -> Stream:
        """Failures of that many independent runs."""


@dataclass(frozen=True)
class Weibull:
    """Independent gaps; below 1 the `shape` makes them come in bursts, 1 is Poisson."""

    mtbf_seconds: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not (self.mtbf_seconds > 0 and 0 < self.shape < math.inf):
            raise ValueError(f"mtbf_seconds and shape must be positive, not {self.mtbf_seconds} and {self.shape}")

    def stream(self, runs: int, generator: numpy.random.Generator) -> Stream:
        """Failures from a job that starts new."""
        scale = self.mtbf_seconds / math.gamma(1 + 1 / self.shape)
        return _Renewal(scale, self.shape, runs, generator)


def poisson(mtbf_seconds: float) -> Weibull:
    """Failures without memory."""
    return Weibull(mtbf_seconds)


@dataclass
class _Renewal:
    scale_seconds: float
    shape: float
    runs: int
    generator: numpy.random.Generator

    def after(self, seconds: Array) -> Array:
        # One draw for every run at each call, so that systems compared under one seed meet the same failures.
        if math.isinf(self.scale_seconds):
            return numpy.full(self.runs, math.inf)
        return seconds + self.scale_seconds * self.generator.weibull(self.shape, self.runs)

    def capacity_at(self, seconds: Array) -> Array:
        return seconds


@dataclass(frozen=True)
class TraceReplay:
    """The incidents of a trace, again and again; run 0 from its beginning, the others from a random point in it.

    Attributes:
        trace: what was recorded.
        nodes: how many the job uses. It waits while fewer are alive, and a removal meets it only where it takes one of
            those nodes: each of the alive is taken alike. None: every incident is a failure, and nobody waits.
    """

    trace: Trace
    nodes: int | None = None

    def __post_init__(self) -> None:
        if self.nodes is not None and not 1 <= self.nodes <= self.trace.alive.max(initial=0):
            raise ValueError(
                f"{self.trace.source} never has {self.nodes} nodes alive, {self.trace.alive.max(initial=0)} at most; "
                "the job could never run"
            )

    @property
    def mtbf_seconds(self) -> float:
        """Time in which the job has its nodes, over the failures that are expected to meet it then."""
        trace, nodes = self.trace, self.nodes or 0
        spans = numpy.diff(trace.alive_seconds, append=trace.span_seconds)
        able = float(spans[trace.alive >= nodes].sum())
        met = float(_hit_probability(trace, self.nodes)[trace.alive_before >= nodes].sum())
        return able / met if met else math.inf

    def stream(self, runs: int, generator: numpy.random.Generator) -> Stream:
        """Incidents of each run."""
        offsets = generator.uniform(0.0, self.trace.span_seconds, runs)
        offsets[0] = 0.0
        return _Replayed(self.trace, self.nodes, offsets, generator)


class _Replayed:
    def __init__(self, trace: Trace, nodes: int | None, offsets: Array, generator: numpy.random.Generator) -> None:
        self._trace, self._nodes, self._offsets, self._generator = trace, nodes, offsets, generator
        self._hit = _hit_probability(trace, nodes)
        # Number of the next incident, counted through all repetitions: by times alone one could be met twice.
        self._next = numpy.zeros(offsets.shape, dtype=numpy.int64)

    def after(self, seconds: Array) -> Array:
        count = len(self._hit)
        if not self._hit.any():
            return numpy.full(seconds.shape, math.inf)
        number = numpy.maximum(self._next, self._first_after(seconds))
        spared = numpy.ones(number.shape, dtype=bool)
        while spared.any():
            spared &= self._generator.random(number.shape) >= self._hit[number % count]
            number = number + spared
        self._next = number + 1
        moment: Array = self._trace.incident_seconds[number % count]
        return moment + (number // count) * self._trace.span_seconds - self._offsets

    def capacity_at(self, seconds: Array) -> Array:
        if self._nodes is None:
            return seconds
        _, moment = self._in_trace(seconds)
        enough = self._trace.alive >= self._nodes
        row = numpy.searchsorted(self._trace.alive_seconds, moment, side="right") - 1
        # Rows with enough nodes, and the first of them again in the next repetition.
        starts = self._trace.alive_seconds[enough]
        starts = numpy.append(starts, starts[0] + self._trace.span_seconds)
        later = starts[numpy.searchsorted(starts, moment, side="left")]
        return numpy.where(enough[row], seconds, seconds + (later - moment))

    def _first_after(self, seconds: Array) -> NDArray[numpy.int64]:
        rounds, moment = self._in_trace(seconds)
        within = numpy.searchsorted(self._trace.incident_seconds, moment, side="right")
        return (rounds * len(self._hit) + within).astype(numpy.int64)

    def _in_trace(self, seconds: Array) -> tuple[Array, Array]:
        """Repetitions before each time, and the time within the trace."""
        rounds = numpy.floor((seconds + self._offsets) / self._trace.span_seconds)
        return rounds, seconds + self._offsets - rounds * self._trace.span_seconds


def _hit_probability(trace: Trace, nodes: int | None) -> Array:
    """Of each incident, that it takes a node of the job: 1 - C(a-n, r) / C(a, r) for r of the a nodes alive."""
    if nodes is None:
        return numpy.ones(len(trace.incident_seconds))
    pairs = zip(trace.alive_before, trace.removed, strict=True)
    spared = [math.comb(max(int(a) - nodes, 0), int(r)) / math.comb(int(a), int(r)) for a, r in pairs]
    return 1.0 - numpy.asarray(spared, dtype=numpy.float64)


def read_trace(path: Path) -> Trace:
    """A trace from a file in one of the two forms; lines that cannot be read are named in `malformed`.

    Raises:
        ConfigError: the file cannot be read, has none of the forms, or spans no time.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}; name a text file of one of the two forms") from error
    numbered = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    read = _form(path, [line for _, line in numbered])
    malformed: list[str] = []
    instants = list(read(numbered, malformed))
    if not instants or instants[-1][0] <= instants[0][0]:
        raise ConfigError(f"the trace {path} spans no time: it has {len(instants)} instants; take a longer one")
    return _trace(str(path), instants, malformed)


_Reader = Callable[[list[tuple[int, str]], list[str]], Iterator[_Row]]


def _form(path: Path, lines: list[str]) -> _Reader:
    if lines and lines[0] == SAMPLES_HEADER:
        return _read_samples
    for pattern, reader in ((EVENTS, _read_events), (SAMPLES, _read_samples)):
        if any(pattern.fullmatch(line) for line in lines):
            return reader
    raise ConfigError(
        f"{path} has neither of the known forms: 'milliseconds,add|remove,node' or "
        f"'index,unix seconds,alive' under the header '{SAMPLES_HEADER}'"
    )


def _trace(source: str, instants: list[_Row], malformed: list[str]) -> Trace:
    seconds = numpy.array([row[0] for row in instants]) - instants[0][0]
    alive = numpy.array([row[1] for row in instants], dtype=numpy.int64)
    removed = numpy.array([row[2] for row in instants], dtype=numpy.int64)
    incident = removed > 0
    # What went at the first instant was not part of the trace.
    incident[0] = False
    before = numpy.concatenate([alive[:1], alive[:-1]])
    return Trace(
        source=source,
        span_seconds=float(seconds[-1]),
        incident_seconds=seconds[incident],
        removed=removed[incident],
        alive_before=before[incident],
        alive_seconds=seconds,
        alive=alive,
        malformed=tuple(malformed),
    )


def _read_events(lines: list[tuple[int, str]], malformed: list[str]) -> Iterator[_Row]:
    """Instants of an event trace: seconds, alive after it, removed at it."""
    rows: list[tuple[float, str, str, int]] = []
    for number, line in lines:
        match = EVENTS.fullmatch(line)
        if match is None:
            malformed.append(f"line {number}: {line!r} is not 'milliseconds,add|remove,node'")
        else:
            rows.append((float(match[1]) / MILLISECONDS, match[2], match[3], number))
    alive: set[str] = set()
    for seconds, group in groupby(sorted(rows, key=lambda row: row[0]), key=lambda row: row[0]):
        removed = 0
        for _, what, node, number in group:
            if (what == "add") == (node in alive):
                malformed.append(f"line {number}: {node} is {'already' if what == 'add' else 'not'} there")
            elif what == "add":
                alive.add(node)
            else:
                alive.remove(node)
                removed += 1
        yield seconds, len(alive), removed


def _read_samples(lines: list[tuple[int, str]], malformed: list[str]) -> Iterator[_Row]:
    rows: list[tuple[float, int]] = []
    for number, line in lines:
        match = SAMPLES.fullmatch(line)
        if match is not None:
            rows.append((float(match[1]), int(match[2])))
        elif line != SAMPLES_HEADER:
            malformed.append(f"line {number}: {line!r} is not 'index,unix seconds,alive'")
    return _levels(rows)


def _levels(rows: list[tuple[float, int]]) -> Iterator[_Row]:
    """Instants of a trace of levels: what is missing since the instant before was removed."""
    before = 0
    for seconds, group in groupby(sorted(rows, key=lambda row: row[0]), key=lambda row: row[0]):
        alive = [level for _, level in group][-1]
        yield seconds, alive, max(before - alive, 0)
        before = alive
