"""Sparse snapshots in memory as a predictor's history, and as a state to go on from."""

import pytest
import torch

from cpsr.benchmarks.experts.saved import HISTORY_SPAN_ITERATIONS, Saved
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import HistoryEntry, Target
from cpsr.state import OperatorState, ParamSlice, Shard

RATE = 0.5
DENSE, EXPERT = "dense", "expert"


def entry(iteration: int) -> HistoryEntry:
    return HistoryEntry(iteration, RATE * iteration, RATE)


def shard(iteration: int) -> Shard:
    """Weights that move along a line: the iteration, times what each operator has of its own."""
    operators = {}
    for factor, name in enumerate((DENSE, EXPERT), 1):
        values = torch.arange(3.0) + factor * iteration
        moments = {"exp_avg": torch.full((3,), float(iteration))}
        operators[name] = OperatorState(name, ParamSlice(values, (3,)), moments, iteration)
    return Shard(operators)


def saved_until(last: int, interval: int = 10, expert_every: int = 40) -> Saved:
    saved = Saved(shard(0), entry(0), {"at": 0})
    for iteration in range(interval, last + 1, interval):
        names = (DENSE, EXPERT) if iteration % expert_every == 0 else (DENSE,)
        saved.save(shard(iteration), names, entry(iteration), {"at": iteration})
    return saved


def test_every_operator_is_as_old_as_its_newest_snapshot() -> None:
    saved = saved_until(150)
    assert [one.iteration for one in saved.entries] == list(range(0, 151, 10))
    assert (saved.newest(DENSE), saved.newest(EXPERT)) == (150, 120)
    assert [saved.taken_at(EXPERT, place) for place in (0, 3, 4, 11, 12, 15)] == [0, 0, 40, 80, 120, 120]
    assert torch.equal(saved.read(EXPERT, 15, 1, 3), shard(120).operators[EXPERT].parameter.values[1:3])
    assert saved.scalars == {"at": 150}


def test_the_history_has_a_limit_and_keeps_what_its_first_entry_refers_to() -> None:
    saved = saved_until(HISTORY_SPAN_ITERATIONS + 130, expert_every=90)
    first = saved.entries[0].iteration
    assert first == 130
    assert saved.taken_at(EXPERT, 0) == 90
    assert saved.taken_at(DENSE, 0) == first


def test_what_was_saved_is_a_copy() -> None:
    source = shard(0)
    saved = Saved(source, entry(0), {})
    source.operators[DENSE].parameter.values.fill_(-1)
    source.operators[DENSE].moments["exp_avg"].fill_(-1)
    target = shard(7)
    saved.put_back(target, {})
    assert torch.equal(target.operators[DENSE].parameter.values, shard(0).operators[DENSE].parameter.values)
    assert target.operators[DENSE].moments["exp_avg"].tolist() == [0, 0, 0]


def test_a_fork_goes_its_own_way() -> None:
    saved = saved_until(100)
    other = saved.fork()
    other.save(shard(110), (DENSE, EXPERT), entry(110), {"at": 110})
    assert (saved.newest(EXPERT), other.newest(EXPERT)) == (80, 110)
    assert len(other.entries) == len(saved.entries) + 1
    assert saved.scalars == {"at": 100}


def test_stale_operators_are_put_back_as_they_are_or_as_they_were_predicted() -> None:
    saved, target = saved_until(150), shard(157)
    saved.put_back(target, {})
    assert torch.equal(target.operators[DENSE].parameter.values, shard(150).operators[DENSE].parameter.values)
    assert torch.equal(target.operators[EXPERT].parameter.values, shard(120).operators[EXPERT].parameter.values)
    assert target.operators[EXPERT].moments["exp_avg"].tolist() == [120] * 3
    saved.put_back(target, {EXPERT: torch.full((3,), 9.0)})
    assert target.operators[EXPERT].parameter.values.tolist() == [9] * 3
    assert target.operators[EXPERT].moments["exp_avg"].tolist() == [120] * 3


def test_the_predictor_takes_a_stale_operator_up_to_the_checkpoint_by_its_own_snapshots() -> None:
    saved = saved_until(150)
    predictor = LinePredictor(window_iterations=200, gain=1.0, base="checkpoint")
    forecast = predictor.forecast(saved, Target(150, RATE * 150, RATE))
    found = {name: values for name, _, values in predictor.predict(saved, forecast)}
    for name in (DENSE, EXPERT):
        assert found[name].tolist() == pytest.approx(shard(150).operators[name].parameter.values.tolist())
    assert forecast.settings["held_operators"] == 0
