"""The choice of settings, by final losses that are made up."""

from collections.abc import Callable

import pytest

from cpsr.benchmarks.boost.average import AVERAGES, Plain
from cpsr.benchmarks.boost.move import Move
from cpsr.benchmarks.boost.outer import Outer
from cpsr.benchmarks.boost.selection import SELECTION_SEEDS, Candidate, Chosen, Wanted, selected
from cpsr.benchmarks.boost.trial import Outcome
from cpsr.benchmarks.recovery.ending import Ended
from cpsr.errors import CPSRError

Loss = Callable[[Candidate, int], float | None]
AVERAGED: dict[str, float | None] = {name: 2.0 - 0.1 * place for place, name in enumerate(AVERAGES)}


def choose(loss: Loss) -> tuple[Chosen, list[tuple[Candidate, int]]]:
    trained: list[tuple[Candidate, int]] = []

    def train(wanted: Wanted) -> list[Outcome]:
        trained.extend(wanted)
        return [Outcome(Ended(loss(one, seed), None, 1.0), AVERAGED) for one, seed in wanted]

    return selected(train), trained


def hilly(candidate: Candidate, seed: int) -> float:
    way = candidate.way
    if isinstance(way, Move):
        return 2.0 + abs(way.every - 200) / 1000 + abs(way.reach - 50) / 1000 + 0.1 * (way.first > 300)
    if isinstance(way, Outer):
        return 2.0 + abs(way.momentum - 0.7) + abs(way.rate - 0.8) + abs(way.every - 20) / 100
    return 2.0


def test_the_best_setting_is_found_beside_those_that_are_tried_first() -> None:
    chosen, _ = choose(hilly)
    assert isinstance(chosen.move.way, Move)
    assert (chosen.move.way.every, chosen.move.way.reach) == (200, 50)
    assert chosen.outer.way == Outer(20, 0.7, 0.8)
    assert (chosen.ema, chosen.lawa) == ("EMA 0.99", "LAWA 8")
    assert isinstance(chosen.random.way, Move)
    assert chosen.random.way.direction == "random"
    assert chosen.random.lower == chosen.move.lower


def test_a_choice_takes_25_trainings_at_most_on_its_own_seeds() -> None:
    for lower in (0, 1):
        for every in (50, 100, 200):
            for reach in (50, 100, 200):

                def loss(one: Candidate, seed: int, at: tuple[int, int, int] = (every, reach, lower)) -> float:
                    way = one.way
                    if not isinstance(way, Move):
                        return 2.0
                    return 2.0 + abs(way.every - at[0]) + abs(way.reach - at[1]) + abs(one.lower - at[2])

                _, trained = choose(loss)
                assert len(trained) == len(set(trained)) <= 25
                assert {seed for _, seed in trained} == set(SELECTION_SEEDS)


def test_the_second_seed_decides_between_the_best_two() -> None:
    def loss(one: Candidate, seed: int) -> float:
        if one == Candidate(Move(50, 50)):
            return 1.8 if seed == SELECTION_SEEDS[0] else 2.5
        return 1.9 if one == Candidate(Move(100, 50)) else 2.0

    chosen, _ = choose(loss)
    assert chosen.move == Candidate(Move(100, 50))
    assert chosen.trials[Candidate(Move(50, 50)).name, SELECTION_SEEDS[1]] == 2.5


def test_a_lower_peak_rate_can_win() -> None:
    chosen, trained = choose(lambda one, seed: 2.0 - one.lower)
    assert chosen.move.lower == chosen.outer.lower == 1
    assert all(one.lower == 0 for one, _ in trained if isinstance(one.way, Plain))


def test_a_setting_that_diverges_is_not_chosen() -> None:
    chosen, _ = choose(lambda one, seed: None if one.way == Move(50, 50) else 2.0)
    assert chosen.move.way != Move(50, 50)
    assert chosen.trials[Candidate(Move(50, 50)).name, SELECTION_SEEDS[0]] is None


def test_where_everything_diverges_nothing_is_chosen() -> None:
    with pytest.raises(CPSRError, match="every training diverged"):
        choose(lambda one, seed: None if isinstance(one.way, Outer) else 2.0)
