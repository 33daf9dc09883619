"""Which ranks are slow: rank 0 compares the own times that the heartbeats of all ranks carry.

A rank's own time is that of its steps without its waits for other ranks: see `cpsr.engines.own_time`. Ranks that wait
for each other all have steps of one length; their own times differ. `docs/slow_ranks.md` has the rule.
"""

import json
import logging
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # else who reads the paces would load torch
    from cpsr.ranks.heartbeat import Heartbeat

__all__ = ["Comparisons", "Pace", "Place", "SlowRanks", "device_name", "read_paces"]

logger = logging.getLogger(__name__)

SLOW_RATIO = 1.15  # of the median
COMPARED_SECONDS = 10.0  # between two comparisons
COMPARISONS = 6  # in a row that a rank is slow, or is not, before that is reported: a minute
MICROSECONDS = 1e6
ADVICE = {
    "compute": "It computes longer: look there for other processes, too few cores and lowered clocks, or replace it",
    "data": "Its data comes late: look at its storage, and at the number of its loader's workers and their cores",
}


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        host: name of its machine.
        device: see `device_name`.
        stage: of a pipeline; 0 without one.
    """

    host: str
    device: str
    stage: int = 0


def device_name(device: str, visible: str | None = None) -> str:
    """A device by the number that its machine gives it.

    Args:
        device: torch's name, which numbers those that the process sees.
        visible: CUDA_VISIBLE_DEVICES, by default that of the environment; empty: all are.
    """
    if visible is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    kind, _, number = device.partition(":")
    seen = dict(enumerate(visible.split(","))) if visible and kind == "cuda" else {}
    return f"{kind}:{seen.get(int(number), number)}" if number else device


@dataclass(frozen=True)
class Pace:
    """A rank's own time for a step, as last compared; seconds.

    Attributes:
        rank: which.
        host: its machine.
        device: of that machine.
        own_seconds: without its waits for other ranks.
        data_seconds: of these in the loader that `resume` returned; the rest is compute.
        expected_own_seconds, expected_data_seconds: the medians of these.
        slow: whether it is reported as slow.
    """

    rank: int
    host: str
    device: str
    own_seconds: float
    data_seconds: float
    expected_own_seconds: float
    expected_data_seconds: float
    slow: bool = False

    @property
    def compute_seconds(self) -> float:
        """Own seconds without data."""
        return self.own_seconds - self.data_seconds

    @property
    def cause(self) -> str:
        """`data` or `compute`: which exceeds the median by more."""
        data_seconds = self.data_seconds - self.expected_data_seconds
        return "data" if data_seconds > (self.own_seconds - self.expected_own_seconds) / 2 else "compute"

    @property
    def message(self) -> str:
        """What was found, what it costs and what to do."""
        who = f"rank {self.rank} (host {self.host}, {self.device})"
        takes = f"takes {_text(self.own_seconds)} a step of its own, the median is {_text(self.expected_own_seconds)}"
        if not self.slow:
            return f"{who} is no longer slow: it {takes}"
        expected = _text(self.expected_own_seconds - self.expected_data_seconds), _text(self.expected_data_seconds)
        parts = f"compute {_text(self.compute_seconds)} (median {expected[0]}), waiting for data "
        parts += f"{_text(self.data_seconds)} (median {expected[1]})"
        longer = _text(self.own_seconds - self.expected_own_seconds)
        return f"{who} {takes}: {parts}. All ranks wait for it, about {longer} at each step. {ADVICE[self.cause]}"


def _text(seconds: float) -> str:
    return f"{seconds:.3g} s"


class Comparisons:
    """The rule, without clock or messages: who is slow, by the running sums of all ranks.

    A comparison is over the time since the last one, in which each rank has ended a step. A rank is compared with the
    median of its stage; of an even number, with the lower one of the two in the middle. Where some stage has one rank,
    each is compared with its own first comparisons, in proportion to what the others take of theirs: stages differ.

    Args:
        places: of all ranks.
        count: of comparisons in a row that turn a rank slow, or no longer slow.

    Attributes:
        paces: of all ranks; empty before the first comparison.
    """

    def __init__(self, places: Sequence[Place], count: int = COMPARISONS) -> None:
        self._places, self._count = places, count
        self._stages = [place.stage for place in places]
        self._alone = any(self._stages.count(stage) == 1 for stage in set(self._stages))
        self._first: list[list[tuple[float, float]]] = []  # own and data seconds of all ranks, by comparison
        self._runs = [0] * len(places)  # comparisons in a row that contradict `_slow`
        self._slow = [False] * len(places)
        self._before: Mapping[int, Heartbeat] | None = None
        self.paces: list[Pace] = []

    def compare(self, said: "Mapping[int, Heartbeat]") -> list[Pace] | None:
        """Compare what all ranks have done since the last comparison.

        Args:
            said: the newest heartbeat of each rank.

        Returns:
            Ranks that have become slow, or are no longer; None: some rank has ended no step, or said nothing.
        """
        ranks, before = range(len(self._places)), self._before
        if len(said) < len(ranks) or (before and any(said[one].steps <= before[one].steps for one in ranks)):
            return None
        self._before = dict(said)
        if before is None:
            return []
        taken = [_seconds_of_step(before[one], said[one]) for one in ranks]
        expected = self._expected(taken)
        turned = [one for one in ranks if self._turns(one, taken[one][0] > SLOW_RATIO * expected[one][0])]
        self.paces = [
            Pace(rank, place.host, place.device, *taken[rank], *expected[rank], self._slow[rank])
            for rank, place in enumerate(self._places)
        ]
        return [self.paces[one] for one in turned]

    def _expected(self, taken: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """What each rank would take as the median does: own and data seconds of a step."""
        if not self._alone:
            of_stage = {}
            for stage in set(self._stages):
                peers = [one for one, other in zip(taken, self._stages, strict=True) if other == stage]
                own, data = zip(*peers, strict=True)
                of_stage[stage] = statistics.median_low(own), statistics.median_low(data)
            return [of_stage[stage] for stage in self._stages]
        if len(self._first) < self._count:
            self._first.append(taken)
        usual = [
            tuple(map(statistics.median, zip(*of_rank, strict=True))) for of_rank in zip(*self._first, strict=True)
        ]
        pace = statistics.median_low(own / max(first, 1e-9) for (own, _), (first, _) in zip(taken, usual, strict=True))
        return [(pace * own, pace * data) for own, data in usual]

    def _turns(self, rank: int, is_slow: bool) -> bool:
        """Whether what was reported of a rank is no longer so."""
        self._runs[rank] = 0 if is_slow == self._slow[rank] else self._runs[rank] + 1
        if self._runs[rank] < self._count:
            return False
        self._runs[rank], self._slow[rank] = 0, is_slow
        return True


def _seconds_of_step(before: "Heartbeat", now: "Heartbeat") -> tuple[float, float]:
    """Own seconds of a step between two heartbeats, and those of them that went to data."""
    steps = (now.steps - before.steps) * MICROSECONDS
    data = (now.data_microseconds - before.data_microseconds) / steps
    return (now.compute_microseconds - before.compute_microseconds) / steps + data, data


class SlowRanks:
    """Compares from time to time, reports who turns slow, and leaves the newest paces for the service (rank 0).

    Args:
        run_dir: of the run.
        life: of the run.
        places: of all ranks.
        report: records an event: its kind, one message, the iteration and the logging level.
        every_seconds: between two comparisons.
        count: as for `Comparisons`.
    """

    def __init__(
        self,
        run_dir: Path,
        life: int,
        places: Sequence[Place],
        report: Callable[[str, str, int | None, int], None],
        every_seconds: float = COMPARED_SECONDS,
        count: int = COMPARISONS,
    ) -> None:
        self._path, self._life, self._report = _path(run_dir), life, report
        self._every_seconds = every_seconds
        self._comparisons = Comparisons(places, count)
        self._compared = -math.inf

    def look(self, now: float, said: "Mapping[int, Heartbeat]") -> None:
        """Compare, if it is time.

        Args:
            now: seconds of a monotonic clock.
            said: the newest heartbeat of each rank that trains.
        """
        if now - self._compared < self._every_seconds:
            return
        turned = self._comparisons.compare(said)
        if turned is None:
            return
        self._compared = now
        self._write()
        for pace in turned:
            kind, level = ("slow rank", logging.WARNING) if pace.slow else ("slow rank recovered", logging.INFO)
            self._report(kind, pace.message, said[pace.rank].iteration, level)

    def _write(self) -> None:
        content = json.dumps({"life": self._life, "paces": [asdict(one) for one in self._comparisons.paces]})
        part = self._path.with_suffix(".tmp")
        try:
            part.write_text(content, encoding="ascii")
            part.replace(self._path)
        except OSError as error:
            logger.debug("the service does not see the newest own times of the ranks: %s", error)


def read_paces(run_dir: Path, life: int) -> list[Pace]:
    """The newest paces of all ranks; empty where this life has none."""
    try:
        found = json.loads(_path(run_dir).read_text(encoding="ascii"))
        return [Pace(**one) for one in found["paces"]] if found["life"] == life else []
    except (OSError, ValueError, KeyError, TypeError):  # none yet, or of another version
        return []


def _path(run_dir: Path) -> Path:
    return run_dir / "progress" / "own_times.json"
