"""When which failure happens: drawn once from a seed, and then the same for every way to come back."""

import random
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Failure", "Kind", "draw_schedule"]

KINDS_A_SCHEDULE = 2  # the next schedule begins so many kinds later, so that three schedules have all of them


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


def draw_schedule(number: int, ranks: int, mtbf_seconds: float, seconds: float) -> list[Failure]:
    """Failures of one run.

    The times are a Poisson process. The kinds come in one order that is drawn for all schedules together.

    Args:
        number: of the schedule, from 0; it is the seed.
        ranks: of the job.
        mtbf_seconds: mean time between two failures.
        seconds: how long failures go on; longer than any run.
    """
    kinds = list(Kind)
    random.Random(0).shuffle(kinds)
    place = number * KINDS_A_SCHEDULE
    drawn = random.Random(f"schedule {number}")
    failures: list[Failure] = []
    at = drawn.expovariate(1 / mtbf_seconds)
    while at < seconds:
        failures.append(Failure(at, kinds[(place + len(failures)) % len(kinds)], drawn.randrange(ranks)))
        at += drawn.expovariate(1 / mtbf_seconds)
    return failures
