"""Traces of machines that came and went, in the three forms that are in use.

- events: `milliseconds,add|remove,node`
- instances: `YYYY-MM-DD, HH:MM:SS, alive`, in any order
- samples: `index,unix seconds,alive`, with the header `,Time,GPUs`

Removals of the same instant are one incident. Such traces are of preempted spot machines: they come in bursts, and show
little of how often hardware fails.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

import numpy
from numpy.typing import NDArray

from cpsr.errors import ConfigError
from cpsr.planner.inputs import Array

__all__ = ["Trace", "read_trace"]

Counts = NDArray[numpy.int64]
# A row as seconds and the change of the nodes alive: (added, removed), or how many there are.
_Row = tuple[float, int, int]

MILLISECONDS = 1000.0
EVENTS = re.compile(r"(\d+(?:\.\d+)?),(add|remove),([^,\s]+)")
INSTANCES = re.compile(r"(\d{4}-\d{2}-\d{2}), ?(\d{2}:\d{2}:\d{2}), ?(\d+)")
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


def read_trace(path: Path) -> Trace:
    """A trace from a file in one of the three forms; lines that cannot be read are named in `malformed`.

    Raises:
        ConfigError: the file cannot be read, has none of the forms, or spans no time.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the trace {path}: {error}; name a text file of one of the three forms"
        ) from error
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
    for pattern, reader in ((EVENTS, _read_events), (INSTANCES, _read_instances), (SAMPLES, _read_samples)):
        if any(pattern.fullmatch(line) for line in lines):
            return reader
    raise ConfigError(
        f"{path} has none of the known forms: 'milliseconds,add|remove,node', 'YYYY-MM-DD, HH:MM:SS, alive', or "
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


def _read_instances(lines: list[tuple[int, str]], malformed: list[str]) -> Iterator[_Row]:
    rows: list[tuple[float, int]] = []
    for number, line in lines:
        match = INSTANCES.fullmatch(line)
        try:
            if match is None:
                raise ValueError("it is not 'YYYY-MM-DD, HH:MM:SS, alive'")
            moment = datetime.fromisoformat(f"{match[1]}T{match[2]}").replace(tzinfo=UTC)
        except ValueError as error:
            malformed.append(f"line {number}: {line!r}: {error}")
        else:
            rows.append((moment.timestamp(), int(match[3])))
    return _levels(rows)


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
