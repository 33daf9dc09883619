"""Sparse snapshots in memory as a state to go on from."""

import torch

from cpsr.benchmarks.experts.saved import Saved
from cpsr.state.shard import OperatorState, ParamSlice, Shard

DENSE, EXPERT = "dense", "expert"


def shard(iteration: int) -> Shard:
    """Weights that show the iteration, by what each operator has of its own."""
    operators = {}
    for factor, name in enumerate((DENSE, EXPERT), 1):
        values = torch.arange(3.0) + factor * iteration
        moments = {"exp_avg": torch.full((3,), float(iteration))}
        operators[name] = OperatorState(name, ParamSlice(values, (3,)), moments, iteration)
    return Shard(operators)


def saved_until(last: int, interval: int = 10, expert_every: int = 40) -> Saved:
    saved = Saved(shard(0), 0, {"at": 0})
    for iteration in range(interval, last + 1, interval):
        names = (DENSE, EXPERT) if iteration % expert_every == 0 else (DENSE,)
        saved.save(shard(iteration), names, iteration, {"at": iteration})
    return saved


def test_every_operator_is_put_back_as_old_as_its_newest_snapshot() -> None:
    saved, target = saved_until(150), shard(157)
    assert (saved.iteration, saved.newest(DENSE), saved.newest(EXPERT)) == (150, 150, 120)
    assert saved.scalars == {"at": 150}
    saved.put_back(target)
    assert torch.equal(target.operators[DENSE].parameter.values, shard(150).operators[DENSE].parameter.values)
    assert torch.equal(target.operators[EXPERT].parameter.values, shard(120).operators[EXPERT].parameter.values)
    assert target.operators[EXPERT].moments["exp_avg"].tolist() == [120] * 3


def test_what_was_saved_is_a_copy() -> None:
    source = shard(0)
    saved = Saved(source, 0, {})
    source.operators[DENSE].parameter.values.fill_(-1)
    source.operators[DENSE].moments["exp_avg"].fill_(-1)
    target = shard(7)
    saved.put_back(target)
    assert torch.equal(target.operators[DENSE].parameter.values, shard(0).operators[DENSE].parameter.values)
    assert target.operators[DENSE].moments["exp_avg"].tolist() == [0, 0, 0]


def test_a_fork_goes_its_own_way() -> None:
    saved = saved_until(100)
    other = saved.fork()
    other.save(shard(110), (DENSE, EXPERT), 110, {"at": 110})
    assert (saved.newest(EXPERT), other.newest(EXPERT)) == (80, 110)
    assert (saved.iteration, saved.scalars) == (100, {"at": 100})
