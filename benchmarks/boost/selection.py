"""Which settings are reported on: chosen on seeds that nothing is reported on."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cpsr.benchmarks.boost.average import AVERAGES, Plain
from cpsr.benchmarks.boost.move import Move
from cpsr.benchmarks.boost.outer import Outer
from cpsr.benchmarks.boost.trial import Outcome
from cpsr.benchmarks.boost.way import Way
from cpsr.errors import CPSRError

__all__ = ["FINALISTS", "SELECTION_SEEDS", "Candidate", "Chosen", "Wanted", "selected"]

SELECTION_SEEDS = (10, 11)
FINALISTS = 2  # of the first seed that are trained on the second

SIZES = (50, 100, 200)  # of both settings of a move
LATE_FIRST = 600
MOMENTUM_BETWEEN = 0.7
RATES = (0.6, 1.0)  # beside 0.8


@dataclass(frozen=True)
class Candidate:
    """A way at a peak learning rate.

    Attributes:
        way: with its settings.
        lower: steps of 1.4 below the baseline's peak rate.
    """

    way: Way
    lower: int = 0

    @property
    def name(self) -> str:
        """As in tables."""
        return self.way.name + (f", peak {self.lower} lower" if self.lower else "")


# What is tried first. What moves further may need a lower peak rate.
MOVES = (
    *(Candidate(Move(every, reach)) for every, reach in ((50, 50), (100, 50), (100, 100), (200, 100))),
    *(Candidate(Move(100, reach), lower=1) for reach in (50, 100)),
)
OUTERS = tuple(Candidate(Outer(every, momentum, 0.8)) for every in (20, 50) for momentum in (0.5, 0.9))

Wanted = Sequence[tuple[Candidate, int]]
"""Candidates and seeds that are to be trained."""


@dataclass(frozen=True)
class Chosen:
    """The best of each kind, and all trials that led to it: (name, seed) -> final loss, None where it diverged."""

    move: Candidate
    outer: Candidate
    ema: str
    lawa: str
    trials: dict[tuple[str, int], float | None] = field(compare=False)

    @property
    def random(self) -> Candidate:
        """The control of the move."""
        assert isinstance(self.move.way, Move)
        return replace(self.move, way=replace(self.move.way, direction="random"))


def selected(train: Callable[[Wanted], Sequence[Outcome]]) -> Chosen:
    """Choose settings in three rounds: coarse, around the best on one seed, and the best two on a second seed.

    Args:
        train: returns the outcomes of candidates in their order.

    Raises:
        CPSRError: every setting of a kind diverged.
    """
    first, second = SELECTION_SEEDS
    found: dict[tuple[Candidate, int], Outcome] = {}

    def learn(wanted: Wanted) -> None:
        missing = [one for one in dict.fromkeys(wanted) if one not in found]
        found.update(zip(missing, train(missing), strict=True))

    plain = Candidate(Plain())
    kinds = (MOVES, OUTERS)
    learn([(plain, seed) for seed in SELECTION_SEEDS] + [(one, first) for kind in kinds for one in kind])
    around = [dict.fromkeys([*kind, *_around(_best(kind, [first], found))]) for kind in kinds]
    learn([(one, first) for kind in around for one in kind])
    finals = [sorted(kind, key=lambda one: _loss(found[one, first]))[:FINALISTS] for kind in around]
    learn([(one, second) for kind in finals for one in kind])
    move, outer = (_best(kind, SELECTION_SEEDS, found) for kind in finals)
    averages = _averages([found[plain, seed] for seed in SELECTION_SEEDS])
    ema, lawa = (
        min((name for name in AVERAGES if name.startswith(kind)), key=averages.__getitem__) for kind in ("EMA", "LAWA")
    )
    trials = {(one.name, seed): outcome.ended.loss for (one, seed), outcome in found.items()}
    return Chosen(move, outer, ema, lawa, trials)


def _around(best: Candidate) -> list[Candidate]:
    """Settings beside the best, and the best at the other peak rate."""
    way = best.way
    if isinstance(way, Move):
        ways: list[Way] = [
            replace(way, every=every, reach=reach)
            for every in SIZES
            for reach in SIZES
            if abs(SIZES.index(every) - SIZES.index(way.every)) + abs(SIZES.index(reach) - SIZES.index(way.reach)) == 1
        ]
        ways += [replace(way, first=LATE_FIRST), replace(way, path="moved")]
    else:
        assert isinstance(way, Outer)
        ways = [replace(way, momentum=MOMENTUM_BETWEEN), *(replace(way, rate=rate) for rate in RATES)]
    return [*(Candidate(way, best.lower) for way in ways), replace(best, lower=1 - best.lower)]


def _loss(outcome: Outcome) -> float:
    return math.inf if outcome.ended.loss is None else outcome.ended.loss


def _best(kind: Sequence[Candidate], seeds: Sequence[int], found: Mapping[tuple[Candidate, int], Outcome]) -> Candidate:
    losses = {one: statistics.fmean(_loss(found[one, seed]) for seed in seeds) for one in kind}
    best = min(losses, key=losses.__getitem__)
    if not math.isfinite(losses[best]):
        raise CPSRError(f"{', '.join(one.name for one in kind)}: every training diverged; nothing to choose from")
    return best


def _averages(plain: Sequence[Outcome]) -> dict[str, float]:
    """Mean final loss of each average over seeds; infinite where one is missing."""
    return {
        name: statistics.fmean(math.inf if (loss := one.averages.get(name)) is None else loss for one in plain)
        for name in AVERAGES
    }
