"""A loop over what `accelerator.prepare` returned: the example that is killed, and what is refused."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from cpsr import CPSRRecovery
from cpsr.errors import UnsupportedEngineError
from tests.integrations.lives import killed_and_back

pytest.importorskip("accelerate")
from accelerate import Accelerator, DataLoaderConfiguration

integration: Any = importlib.import_module("cpsr.integrations.accelerate")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def test_what_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters())

    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([])

    with pytest.raises(UnsupportedEngineError, match="this AdamW was not prepared"):
        integration.engine_of(accelerator, module, optimizer)
    prepared = accelerator.prepare(optimizer)
    endless = accelerator.prepare(DataLoader(Endless()))
    with CPSRRecovery(integration.engine_of(accelerator, module, prepared), {"run_dir": str(tmp_path)}) as recovery:
        with pytest.raises(UnsupportedEngineError, match="was not prepared by accelerate"):
            integration.resume(recovery, DataLoader(TensorDataset(torch.zeros(1))))
        with pytest.raises(UnsupportedEngineError, match="the dataset Endless has no length"):
            integration.resume(recovery, endless)
        with pytest.raises(UnsupportedEngineError, match=r"cpsr\.integrations\.accelerate"):
            recovery.resume(endless)


@pytest.mark.parametrize("split", [False, True])
def test_a_scheduler_that_steps_for_each_rank_keeps_their_number(split: bool) -> None:
    dataloader_config = DataLoaderConfiguration(split_batches=split)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=dataloader_config)
    module = Net()
    adam = torch.optim.AdamW(module.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(adam, 8)
    model, optimizer = accelerator.prepare(module, adam)
    alone = integration.engine_of(accelerator, model, optimizer, schedule)
    scalars = alone.scalars()
    assert alone.resharded(scalars)["iteration"] == 0
    prepared = integration.engine_of(accelerator, model, optimizer, accelerator.prepare(schedule))
    if split:
        assert prepared.resharded(scalars)["iteration"] == 0
        return
    with pytest.raises(UnsupportedEngineError, match=r"step of a prepared scheduler for each rank.*sync_gradients"):
        prepared.resharded(scalars)


def test_the_example_is_killed_and_comes_back(tmp_path: Path) -> None:
    killed_and_back("accelerate_loop.py", tmp_path)
    ends = [torch.load(tmp_path / life / "final.pt") for life in ("whole", "killed")]
    assert ends[0]["losses"] == ends[1]["losses"]
    assert all(torch.equal(value, ends[1]["model"][name]) for name, value in ends[0]["model"].items())
