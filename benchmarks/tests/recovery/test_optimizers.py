"""Every optimizer: a loaded state continues bit by bit, and the cache restores all that it keeps."""

from dataclasses import replace
from pathlib import Path

import pytest

from cpsr.benchmarks.recovery.gpt import GPTTask
from cpsr.benchmarks.recovery.optimizers import OPTIMIZERS, OptimizerName, Updates
from cpsr.benchmarks.recovery.trainer import Trainer
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.benchmarks.recovery.workload import Workload
from cpsr.benchmarks.tests.recovery.tiny import TINY, one_thread
from cpsr.demo.model import GPTConfig
from cpsr.errors import ConfigError

SMALL = Workload("small", lambda: GPTTask(GPTConfig(layers=2, heads=1, width=8, context=16)), "cosine", 1e-2, 100)


def small(optimizer: OptimizerName) -> Workload:
    return replace(SMALL, name=f"small-{optimizer}", optimizer=optimizer)


@pytest.mark.parametrize("begin", [0, 7])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loaded_state_continues_bit_by_bit(optimizer: OptimizerName, begin: int) -> None:
    workload = small(optimizer)
    task = workload.task()
    trainer, other = Trainer(workload, task, 0), Trainer(workload, task, 0)
    trainer.train_to(begin)
    other.train_to(3)  # elsewhere, with moments of its own
    other.load(trainer.state())
    assert other.state().digest() == trainer.state().digest()
    trainer.train_to(begin + 10)
    other.train_to(begin + 10)
    assert other.state().digest() == trainer.state().digest()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_cache_restores_the_moments(optimizer: OptimizerName, tmp_path: Path) -> None:
    workload = small(optimizer)
    trainer = Trainer(workload, workload.task(), 0)
    trainer.train_to(65)
    with one_thread():
        trajectory = Trajectory(workload, workload.task(), 0, tmp_path)
        trajectory.extend(100)
        assert trajectory.at(65).state().digest() == trainer.state().digest()


def test_each_keeps_its_moments() -> None:
    states = {}
    for optimizer in OPTIMIZERS:
        trainer = Trainer(small(optimizer), SMALL.task(), 0)
        trainer.train_to(2)
        states[optimizer] = trainer.state()
    names = set(states["adamw"].weights)
    kept = {
        optimizer: {moment: set(tensors) for moment, tensors in state.moments.items()}
        for optimizer, state in states.items()
    }
    hidden = {name for name in names if name.startswith("blocks.") and states["adamw"].weights[name].numel() > 32}
    assert "blocks.0.qkv.weight" in hidden
    assert kept == {
        "adamw": {"exp_avg": names, "exp_avg_sq": names},
        "sgd": {"momentum_buffer": names},
        "muon": {"momentum_buffer": hidden, "exp_avg": names - hidden, "exp_avg_sq": names - hidden},
    }
    for state in states.values():
        assert all(values.any() for tensors in state.moments.values() for values in tensors.values())


def test_muon_is_for_transformers() -> None:
    with pytest.raises(ConfigError, match="transformer blocks"):
        Updates("muon", TINY.task().model())
