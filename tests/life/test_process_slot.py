"""One open run in a process, and what a second model in it can do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.errors import ConfigError


def engine_of(width: int = 3) -> TorchAdapter:
    module = nn.Linear(width, 1)
    return TorchAdapter(module, torch.optim.AdamW(module.parameters(), lr=0.1))


def weight_of(engine: TorchAdapter) -> nn.Parameter:
    (weight,) = (one for name, one in engine.module.named_parameters() if name == "weight")
    return weight


def settings(folder: Path) -> dict[str, Any]:
    return {"run_dir": str(folder), "mode": "exact", "checkpoint": {"interval_iterations": 2}}


def train(engine: TorchAdapter, width: int = 3) -> None:
    engine.optimizer.zero_grad()
    engine.module(torch.ones(2, width)).sum().backward()
    engine.optimizer.step()


def test_a_second_run_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    first, second = engine_of(), engine_of()
    before = weight_of(second).detach().clone()
    # In mode exact the first step of an optimizer that nobody saves is refused.
    with CPSRRecovery(first, settings(tmp_path / "first") | {"mode": "auto"}) as recovery:
        train(first)
        other = CPSRRecovery(second, settings(tmp_path / "second"))
        with pytest.raises(ConfigError, match=r"open in this process already .*first.*takes several optimizers"):
            other.__enter__()
        train(second)
        assert not (tmp_path / "second").exists()
        assert second.iteration == 0
        assert not torch.equal(weight_of(second), before)
        train(first)
        assert recovery.iteration == 2
    with CPSRRecovery(engine_of(), settings(tmp_path / "second")) as recovery:
        assert recovery.restored.restored_iteration == 0
    with CPSRRecovery(engine_of(), settings(tmp_path / "first")) as recovery:
        assert recovery.restored.restored_iteration == 2


SECOND: dict[str, Callable[[TorchAdapter], Any]] = {
    "engine": lambda engine: engine,
    "pair": lambda engine: (engine.module, engine.optimizer),
    "list": lambda engine: [engine.module, engine.optimizer],
    "run": lambda engine: CPSRRecovery(engine, {"run_dir": "elsewhere"}),
}


@pytest.mark.parametrize("kind", SECOND)
def test_a_second_engine_is_not_registered(kind: str, tmp_path: Path) -> None:
    recovery = CPSRRecovery(engine_of(), settings(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"has no state_dict.*second engine, register each: register\('x\.model', "):
        recovery.register("x", SECOND[kind](engine_of()))
