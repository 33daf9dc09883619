"""Moves, outer steps and averages in trainings of a net that trains in a moment."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from cpsr.benchmarks.boost.average import AVERAGES, Plain
from cpsr.benchmarks.boost.move import Move
from cpsr.benchmarks.boost.outer import Outer
from cpsr.benchmarks.boost.trial import Trial
from cpsr.benchmarks.boost.way import Way
from cpsr.benchmarks.recovery.ending import Training
from cpsr.benchmarks.recovery.trainer import State, Tensors
from cpsr.benchmarks.tests.recovery.tiny import TINY
from cpsr.errors import CPSRError
from cpsr.predictor.line import line_coefficients

SHORT = dataclasses.replace(TINY, iterations=600)


class Watched:
    """A training in some way, and its states before and after each look at it."""

    def __init__(self, way: Way, until: int, seed: int = 0) -> None:
        trainer = Training(SHORT, seed, Path(), "cpu").trainer()
        course = way.begin(trainer, SHORT, seed)
        self.before: dict[int, State] = {0: trainer.state()}
        self.after: dict[int, State] = {0: trainer.state()}
        while trainer.iteration < until:
            trainer.step()
            self.before[trainer.iteration] = trainer.state()
            course.after_step(trainer)
            self.after[trainer.iteration] = trainer.state()

    def displacement(self, iteration: int) -> Tensors:
        before, after = self.before[iteration].weights, self.after[iteration].weights
        return {name: after[name] - before[name] for name in before}

    def moved_at(self) -> list[int]:
        return [at for at in self.before if any(bool(part.any()) for part in self.displacement(at).values())]


def line(paths: dict[int, torch.Tensor], at: int, reach: int) -> torch.Tensor:
    """How far the line over the snapshots leads from the newest."""
    target = SHORT.times[at + reach]
    row = line_coefficients([SHORT.times[taken] for taken in paths], target, gain=1.0, base=0.0)
    return sum((value * weights for value, weights in zip(row, paths.values(), strict=True)), -paths[at])


def test_a_move_follows_the_line_and_keeps_the_moments() -> None:
    found = Watched(Move(100, 50), 300)
    assert found.moved_at() == [300]
    for name, displacement in found.displacement(300).items():
        snapshots = {at: found.before[at].weights[name] for at in range(25, 301, 25)}
        assert torch.allclose(displacement, line(snapshots, 300, 50), atol=1e-6)
    before, after = found.before[300], found.after[300]
    for moment, values in before.moments.items():
        assert all(torch.equal(values[name], after.moments[moment][name]) for name in values)
    assert after.iteration == 300


@pytest.mark.parametrize("path", ["own", "moved"])
def test_the_line_is_fitted_to_the_path_without_the_moves_or_with_them(path: str) -> None:
    found = Watched(Move(50, 100, path="own" if path == "own" else "moved"), 400)
    assert found.moved_at() == [300, 350, 400]
    for name, displacement in found.displacement(400).items():
        snapshots = {}
        for at in range(100, 401, 25):
            weights = found.before[at].weights[name]
            if path == "own":
                weights = weights - sum(found.displacement(move)[name] for move in (300, 350) if move < at)
            snapshots[at] = weights
        assert torch.allclose(displacement, line(snapshots, 400, 100), atol=1e-5)


def test_moves_begin_with_a_whole_window_and_end_before_the_training() -> None:
    assert Watched(Move(100, 50), 600).moved_at() == [300, 400, 500]
    assert Watched(Move(50, 50, first=400), 600).moved_at() == [400, 450, 500]


def test_a_reach_beyond_the_end_goes_on_at_the_last_rate() -> None:
    way = Move(200, 200, first=500)
    assert Watched(way, 500).moved_at() == [500]


def test_a_random_move_is_as_long_in_another_direction() -> None:
    line_move, random = Watched(Move(100, 50), 300), Watched(Move(100, 50, direction="random"), 300)
    other_seed = Watched(Move(100, 50, direction="random"), 300, seed=1)
    assert Watched(Move(100, 50, direction="random"), 300).after[300].digest() == random.after[300].digest()
    for name, displacement in line_move.displacement(300).items():
        if displacement.numel() == 1:
            continue  # a single weight has two directions
        turned = random.displacement(300)[name]
        assert turned.norm() == pytest.approx(float(displacement.norm()), rel=1e-3)
        assert not torch.allclose(turned, displacement, rtol=0.1)
        assert not torch.allclose(turned, other_seed.displacement(300)[name], rtol=0.1)


def test_a_move_that_the_predictor_refuses_is_an_error() -> None:
    with pytest.raises(CPSRError, match=r"no move at iteration 300: .* 10 intervals"):
        Watched(Move(100, 290), 300)


def test_an_outer_optimizer_adds_nesterovs_momentum() -> None:
    found = Watched(Outer(50, 0.5, 0.8), 100)
    for name, start in found.before[0].weights.items():
        first = found.before[50].weights[name] - start
        middle = start + 0.8 * (first + 0.5 * first)
        assert torch.allclose(found.after[50].weights[name], middle, atol=1e-6)
        second = found.before[100].weights[name] - middle
        end = middle + 0.8 * (second + 0.5 * (0.5 * first + second))
        assert torch.allclose(found.after[100].weights[name], end, atol=1e-6)
    moments = found.before[50].moments["exp_avg"], found.after[50].moments["exp_avg"]
    assert torch.equal(*(moment[name] for moment in moments))


def test_an_outer_rate_of_1_without_momentum_changes_nothing() -> None:
    found = Watched(Outer(50, 0.0, 1.0), 200)
    assert all(part.abs().max() < 1e-6 for part in found.displacement(200).values())


def test_averages_leave_the_training_as_it_is(tmp_path: Path) -> None:
    training = Training(SHORT, 0, tmp_path, "cpu")
    outcome = Trial(training, Plain()).outcome()
    assert outcome.ended.loss == training.ended().loss
    assert set(outcome.averages) == set(AVERAGES)
    assert len(set(outcome.averages.values())) == len(AVERAGES)


def test_averages_are_those_of_the_weights() -> None:
    trainer = Training(SHORT, 0, Path(), "cpu").trainer()
    course = Plain().begin(trainer, SHORT, 0)
    seen = {0: trainer.weights()}
    while trainer.iteration < 200:
        trainer.step()
        course.after_step(trainer)
        seen[trainer.iteration] = trainer.weights()
    averages = course.averages()
    for name, newest in seen[200].items():
        assert torch.allclose(averages["LAWA 2"][name], (newest + seen[175][name]) / 2, atol=1e-6)
        share, expected = 0.98**5, seen[0][name]
        for at in range(5, 201, 5):
            expected = share * expected + (1 - share) * seen[at][name]
        assert torch.allclose(averages["EMA 0.98"][name], expected, atol=1e-5)


@pytest.mark.parametrize("way", [Plain(), Move(50, 50), Outer(20, 0.9, 1.0)])
def test_a_trial_is_kept(tmp_path: Path, way: Way) -> None:
    trial = Trial(Training(SHORT, 0, tmp_path, "cpu"), way)
    first = trial.outcome()
    assert first.ended.loss is not None
    (kept,) = tmp_path.iterdir()
    time = kept.stat().st_mtime_ns
    assert trial.outcome() == first
    assert kept.stat().st_mtime_ns == time


def test_a_trial_that_diverges_says_so(tmp_path: Path) -> None:
    wild = dataclasses.replace(SHORT, peak_learning_rate=1e30)
    outcome = Trial(Training(wild, 0, tmp_path, "cpu"), Move(50, 50)).outcome()
    assert outcome.ended.loss is None
    assert math.isfinite(outcome.ended.seconds)
    assert outcome.averages == {}


def test_names_tell_settings_apart() -> None:
    ways: list[Way] = [
        Move(50, 50),
        Move(50, 100),
        Move(100, 50),
        Move(50, 50, first=600),
        Move(50, 50, path="moved"),
        Move(50, 50, direction="random"),
        Outer(20, 0.5, 0.8),
        Outer(20, 0.5, 1.0),
        Plain(),
    ]
    assert len({way.name for way in ways}) == len(ways)


def test_before_the_first_move_a_training_is_the_plain_one() -> None:
    assert Watched(Move(100, 50), 299).after[299].digest() == Watched(Plain(), 299).after[299].digest()
