"""A loop over what Lightning Fabric has set up: what comes back after a failure, and what is refused."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery
from cpsr.errors import UnsupportedEngineError
from tests.committed import wait_until_committed
from tests.integrations.lives import Stopped

pytest.importorskip("lightning")
from lightning.fabric import Fabric

integration: Any = importlib.import_module("cpsr.integrations.fabric")

PASSES, INTERVAL = 3, 4


def trained(folder: Path, compiled: bool = False, fail_at: int | None = None, **precision: str) -> dict[str, Any]:
    """A life: three passes of 7 batches, the first of which is also looked at before the loop, as a sanity check."""
    fabric: Any = Fabric(accelerator="cpu", devices=1, **precision)
    fabric.seed_everything(3)
    net: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
    x = torch.randn(14, 4)
    model = fabric.setup(torch.compile(net, backend="eager") if compiled else net)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), 1e-2))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), 2, shuffle=True))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "losses": [], "rates": []}
    config = {"run_dir": str(folder), "mode": "exact", "checkpoint": {"interval_iterations": INTERVAL}}
    with CPSRRecovery(integration.engine_of(model, optimizer, state=state), config) as recovery:
        next(iter(loader))
        passes = integration.Passes(recovery, loader)
        assert len(passes) == 7
        for _ in range(recovery.epoch, PASSES):
            for inputs, targets in passes:
                for group in optimizer.param_groups:  # as LitGPT's loop does
                    state["rates"] = [*state["rates"], group["lr"]]
                loss = nn.functional.mse_loss(model(inputs).float(), targets)
                fabric.backward(loss)
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                state["losses"] = [*state["losses"], loss.item()]
                if recovery.iteration == fail_at:
                    wait_until_committed(folder, fail_at // INTERVAL * INTERVAL)
                    raise Stopped
    return {"losses": state["losses"], "rates": state["rates"], "weights": [one.tolist() for one in net.parameters()]}


@pytest.mark.parametrize(
    "options", [{}, {"compiled": True}, {"precision": "bf16-mixed"}, {"precision": "bf16-true"}], ids=str
)
def test_the_run_continues_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(Stopped):
        trained(tmp_path / "failed", fail_at=10, **options)
    assert trained(tmp_path / "failed", **options) == trained(tmp_path / "whole", **options)


def test_what_fabric_has_not_set_up_is_refused(tmp_path: Path) -> None:
    fabric: Any = Fabric(accelerator="cpu", devices=1)
    net = nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(torch.zeros(4, 4)))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    with pytest.raises(UnsupportedEngineError, match="this Linear is not set up by Fabric"):
        integration.engine_of(net, optimizer)
    with CPSRRecovery(integration.engine_of(model, optimizer), {"run_dir": str(tmp_path)}) as recovery:
        with pytest.raises(UnsupportedEngineError, match=r"cpsr\.integrations\.fabric"):
            recovery.resume(fabric.setup_dataloaders(loader))
        with pytest.raises(UnsupportedEngineError, match="this DataLoader is not set up by Fabric"):
            integration.Passes(recovery, loader)
