"""When which failure happens: drawn once from a seed, and then the same for every way to come back."""

import random
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

__all__ = ["Failure", "Kind", "draw_schedule"]

FAILURES = 20  # more than a run has
KINDS_A_SCHEDULE = 2  # the next schedule begins so many kinds later, so that three schedules have all of them
WARM_SECONDS, EARLY_SECONDS, EARLY = 20.0, 130.0, 2  # what a schedule must have to be taken


class Kind(StrEnum):
    """What fails."""

    RANK_KILLED = "a rank is killed"
    ALL_KILLED = "all ranks are killed"
    MEMORY_LOST = "a machine loses its memory"
    HUNG = "a rank hangs"
    SIGTERM = "SIGTERM"


@dataclass(frozen=True)
class Failure:
    """One failure.

    Attributes:
        seconds: after the job's first step.
        kind: what fails.
        rank: which rank, where one fails.
    """

    seconds: float
    kind: Kind
    rank: int


def draw_schedule(number: int, ranks: int, mtbf_seconds: float) -> list[Failure]:
    """Failures of one run.

    The times are a Poisson process, drawn again until there is no failure in the first 20 s, when jobs are not warm
    yet, and exactly two in the first 130 s. The kinds come in one order that is drawn for all schedules together.

    Args:
        number: of the schedule, from 0; it is the seed.
        ranks: of the job.
        mtbf_seconds: mean time between two failures.
    """
    kinds = list(Kind)
    random.Random(0).shuffle(kinds)  # noqa: S311 - nothing secret is drawn
    place = number * KINDS_A_SCHEDULE
    drawn = random.Random(f"schedule {number}")  # noqa: S311 - nothing secret is drawn
    times: list[float] = []
    while sum(at < EARLY_SECONDS for at in times) != EARLY or times[0] < WARM_SECONDS:
        times = list(accumulate(drawn.expovariate(1 / mtbf_seconds) for _ in range(FAILURES)))
    return [Failure(at, kinds[(place + index) % len(kinds)], drawn.randrange(ranks)) for index, at in enumerate(times)]
