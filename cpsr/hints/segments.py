"""Parts of a schedule: one checkpoint, or all those of a loop, with what they cost on their own."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["ROUNDING", "Failures", "Segment", "Use", "joined", "periods", "repeated", "thinned"]

ROUNDING = 1e-12  # relative; of sums of floats
EXPONENT_MAX = 700.0  # a float holds no larger power of e; a block this long never ends


@dataclass(frozen=True)
class Failures:
    """A constant rate of failures, which come from outside the program."""

    per_second: float

    def recovery_seconds(self, block_seconds: float) -> float:
        """Expected time to repeat work in a block between two checkpoints: `t/2 * p(b)/(1 - p(b))` (section 2.1).

        The paper's probability p of a failure in one unit of time is `1 - exp(-rate)`, so `p(b)/(1 - p(b))` is
        `exp(rate * t) - 1`. The paper calls the loss of one failure exactly t/2. It is less: earlier failures are
        likelier than later ones, as the first one ends the attempt. Exact would be `(exp(rate * t) - 1)/rate - t`. The
        paper's figure is too high by some `rate * t / 6` of itself: 1.7% at a tenth of the mean time between
        failures, 20% at all of it. Both are convex, and lead to nearly the same places.
        """
        exponent = min(self.per_second * block_seconds, EXPONENT_MAX)
        return 0.5 * block_seconds * math.expm1(exponent)

    def ends(self, block_seconds: float) -> bool:
        """Whether a block is short enough for its cost to be a number."""
        return self.per_second * block_seconds < EXPONENT_MAX


@dataclass(frozen=True)
class Use:
    """One hint as checkpoint: `hint` counts the hints in the order of the program, each loop body once."""

    hint: int
    every: int
    count: int


@dataclass(frozen=True, slots=True)
class Segment:
    """From a first checkpoint to a last one, in seconds from where its tasks begin.

    `recovery_seconds` is of the blocks between the two, `longest_seconds` the longest of them, and `cost_seconds` of
    all the checkpoints.
    """

    begin_seconds: float
    end_seconds: float
    cost_seconds: float
    uses: tuple[Use, ...]
    recovery_seconds: float = 0.0
    longest_seconds: float = 0.0

    def moved(self, seconds: float) -> "Segment":
        """The same after other tasks that take so long."""
        return Segment(
            self.begin_seconds + seconds,
            self.end_seconds + seconds,
            self.cost_seconds,
            self.uses,
            self.recovery_seconds,
            self.longest_seconds,
        )


def periods(repetitions: int) -> Iterator[int]:
    """How often a hint in a loop may be a checkpoint: every k-th repetition, for k of two digits and zeros, or all.

    Neighbours differ by at most a tenth, and the expected cost is flat around its least. So a million repetitions have
    460 choices.
    """
    step, k = 1, 1
    while k < repetitions:
        yield k
        k += step
        if k == 100 * step:
            step *= 10
    yield repetitions


def thinned(hint: Segment, every: int, repetitions: int, body_seconds: float, failures: Failures) -> Segment:
    """A hint of a loop's body as checkpoint in every k-th repetition; `hint` is its place in the first one."""
    count, block = repetitions // every, every * body_seconds
    (use,) = hint.uses
    return Segment(
        hint.begin_seconds + (every - 1) * body_seconds,
        hint.begin_seconds + (count * every - 1) * body_seconds,
        count * hint.cost_seconds,
        (Use(use.hint, every, count),),
        (count - 1) * failures.recovery_seconds(block) if count > 1 else 0.0,
        block if count > 1 else 0.0,
    )


def repeated(segment: Segment, repetitions: int, body_seconds: float, failures: Failures) -> Segment:
    """The checkpoints of one repetition of a loop, in each of them."""
    between = body_seconds - segment.end_seconds + segment.begin_seconds
    return Segment(
        segment.begin_seconds,
        segment.end_seconds + (repetitions - 1) * body_seconds,
        repetitions * segment.cost_seconds,
        tuple(Use(use.hint, use.every, repetitions * use.count) for use in segment.uses),
        repetitions * segment.recovery_seconds + (repetitions - 1) * failures.recovery_seconds(between),
        max(segment.longest_seconds, between),
    )


def joined(segments: Sequence[Segment], failures: Failures) -> Segment:
    """Segments one after the other, as one."""
    gaps = [after.begin_seconds - before.end_seconds for before, after in pairwise(segments)]
    return Segment(
        segments[0].begin_seconds,
        segments[-1].end_seconds,
        math.fsum(one.cost_seconds for one in segments),
        tuple(_uses(segments)),
        math.fsum([*(one.recovery_seconds for one in segments), *map(failures.recovery_seconds, gaps)]),
        max([*(one.longest_seconds for one in segments), *gaps]),
    )


def _uses(segments: Iterable[Segment]) -> Iterator[Use]:
    for segment in segments:
        yield from segment.uses
