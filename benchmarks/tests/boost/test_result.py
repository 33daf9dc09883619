"""Iterations saved and the declared rule, by final losses that are made up."""

import math

import pytest

from cpsr.benchmarks.boost.move import Move
from cpsr.benchmarks.boost.outer import Outer
from cpsr.benchmarks.boost.result import MOVE, OUTER, RANDOM, CorpusResult, corpus_result, is_worth_an_option
from cpsr.benchmarks.boost.selection import Candidate, Chosen
from cpsr.benchmarks.recovery.ending import Ended
from cpsr.benchmarks.tune.space import Setting
from cpsr.benchmarks.tune.sweep import Rate, Sweep
from cpsr.errors import CPSRError
from cpsr.fitter.end_cost import Ending

SWEEP = Sweep(Setting("tiny", "cosine10", 1000), (Rate(2, 2e-3, (Ended(2.0, 0.01, 1.0),)),))
CHOSEN = Chosen(Candidate(Move(100, 50)), Candidate(Outer(20, 0.5, 0.8), lower=1), "EMA 0.98", "LAWA 2", {})
BASELINE = (2.0, 2.1, 1.9, 2.05, 1.95)
WORTH = 3e-4  # nats an iteration
SCATTER = (0.5, -0.5, 0.25, -0.25, 0.0)


def result(
    move: float, outer: float, scatter: float = 1.0, baseline: tuple[float | None, ...] = BASELINE
) -> CorpusResult:
    """Ways that save so many percent, with a scatter over seeds in percent."""

    def losses(percent: float) -> tuple[float | None, ...]:
        return tuple(
            level - 10 * (percent + scatter * noise) * WORTH for level, noise in zip(BASELINE, SCATTER, strict=True)
        )

    others = [
        Ending(seed, length, level - WORTH * 1000 * math.log(length / 1000) + 1e-4 * (-1) ** (seed + place))
        for seed, level in enumerate(BASELINE)
        for place, length in enumerate((900, 950, 1050, 1100))
    ]
    return corpus_result(SWEEP, CHOSEN, baseline, others, {MOVE: losses(move), OUTER: losses(outer), RANDOM: losses(0)})


def test_a_gain_is_counted_in_iterations_of_the_baseline() -> None:
    found = result(move=6.0, outer=2.0)
    assert found.worth.nats == pytest.approx(WORTH, rel=0.02)
    move = found.saved[MOVE].mean
    assert move is not None
    assert move.value == pytest.approx(6.0, rel=0.02)
    assert move.low is not None
    assert 5.0 < move.low < 6.0
    assert found.saved[MOVE].percent[0] == pytest.approx(6.5, rel=0.02)
    assert found.beside_outer is not None
    assert found.beside_outer.value == pytest.approx(4.0, rel=0.02)
    assert found.saved[OUTER].setting.endswith("peak 1 lower")
    assert "random" in found.saved[RANDOM].setting


@pytest.mark.parametrize(
    ("move", "outer", "scatter", "enough"),
    [
        (6.0, 2.0, 1.0, True),
        (4.0, 2.0, 1.0, False),  # too little
        (6.0, 9.0, 1.0, False),  # behind the outer optimizer
        (6.0, 6.0, 1.0, True),
        (6.0, 2.0, 40.0, False),  # may be chance
    ],
)
def test_the_rule(move: float, outer: float, scatter: float, enough: bool) -> None:
    assert result(move, outer, scatter).is_enough is enough


def test_the_rule_holds_on_every_corpus_or_not() -> None:
    good, bad = result(6.0, 2.0), result(4.0, 2.0)
    assert is_worth_an_option([good, good])
    assert not is_worth_an_option([good, bad])


def test_a_move_that_diverges_once_is_not_enough() -> None:
    losses: tuple[float | None, ...] = (1.9, None, 1.8, 1.95, 1.85)
    others = [Ending(seed, length, 2.0 - 1e-3 * (length - 1000)) for seed in range(5) for length in (900, 1100)]
    found = corpus_result(SWEEP, CHOSEN, (2.0,) * 5, others, {MOVE: losses, OUTER: (2.0,) * 5})
    assert found.saved[MOVE].mean is None
    assert found.saved[MOVE].percent[1] is None
    assert not found.is_enough


def test_a_baseline_that_diverges_is_an_error() -> None:
    with pytest.raises(CPSRError, match="a baseline diverged"):
        result(6.0, 2.0, baseline=(None, *BASELINE[1:]))
