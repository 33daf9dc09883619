from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from cpsr import CPSRRecovery
from cpsr.checkpoint.tiers import Source
from cpsr.engines.torch import TorchAdapter
from cpsr.errors import CheckpointError
from cpsr.planner.live.job_planner import JobPlanner
from cpsr.restart.restore import Restored
from cpsr.restart.sources import MemorySources
from cpsr.state.shard import Shard
from tests.committed import wait_until_committed

INTERVAL = 5
Mode = Literal["auto", "predict", "exact"]


class Regression(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.linear(batch) - 2.0 * batch).square().mean()
        return loss


def job(seed: int = 0) -> tuple[Regression, TorchAdapter]:
    torch.manual_seed(seed)
    model = Regression()
    return model, TorchAdapter(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def settings(run_dir: Path, mode: Mode = "predict") -> dict[str, Any]:
    # What a life leaves in memory is exact, and would spare the next one its prediction.
    checkpoint = {"interval_iterations": INTERVAL, "shared_memory": False}
    return {"run_dir": str(run_dir), "mode": mode, "checkpoint": checkpoint, "restart": {"loss_tolerance_nats": 10.0}}


def fail_at(iterations: int, run_dir: Path, mode: Mode = "predict") -> Restored:
    """A life that ends in its training loop; how it began."""
    model, adapter = job()

    def life() -> None:
        for batch in recovery.resume(torch.randn(100, 8, 4)):
            adapter.optimizer.zero_grad()
            model(batch).backward()
            adapter.optimizer.step()
            since = recovery.iteration - 1 - recovery.restored.restored_iteration
            if since > 0 and since % INTERVAL == 0:  # the snapshot of the step before is complete
                wait_until_committed(run_dir, recovery.iteration - 1)
            if recovery.iteration == iterations:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), CPSRRecovery(adapter, settings(run_dir, mode)) as recovery:
        life()
    return recovery.restored


def test_a_state_in_memory_that_cannot_be_read_leaves_the_checkpoint_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, "exact")
    config["checkpoint"]["shared_memory"] = True
    config["memory"] = {"interval_iterations": 2}
    model, adapter = job()
    kept: dict[int, torch.Tensor] = {}

    def life() -> None:
        for batch in recovery.resume(torch.randn(100, 8, 4)):
            kept[recovery.iteration] = model.linear.weight.detach().clone()
            if recovery.iteration == 2 * INTERVAL + 3:
                wait_until_committed(tmp_path, 2 * INTERVAL)
                raise ZeroDivisionError
            adapter.optimizer.zero_grad()
            model(batch).backward()
            adapter.optimizer.step()

    with pytest.raises(ZeroDivisionError), CPSRRecovery(adapter, config) as recovery:
        life()

    def torn(memory: MemorySources, source: Source, into: Shard) -> Any:
        assert source.iteration > 2 * INTERVAL
        for _, values in into.tensors():
            values.fill_(7)
        raise CheckpointError("torn")

    monkeypatch.setattr(MemorySources, "load", torn)
    model, adapter = job(seed=1)
    with CPSRRecovery(adapter, config) as recovery:
        assert recovery.restored.restored_iteration == 2 * INTERVAL
        assert torch.equal(model.linear.weight, kept[2 * INTERVAL])


@pytest.mark.parametrize(("mode", "asked"), [("auto", False), ("predict", True)])
def test_a_plan_that_recomputes_is_followed_where_the_choice_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode, asked: bool
) -> None:
    state_dict = JobPlanner.state_dict
    monkeypatch.setattr(JobPlanner, "state_dict", lambda *given: {**state_dict(*given), "mode": "recompute"})
    fail_at(23, tmp_path, mode)
    restored = fail_at(24, tmp_path, mode)
    assert (restored.forecast is not None) is asked
    assert ("plan finds recomputing cheaper" in restored.reason) is not asked
    assert (restored.method, restored.restored_iteration) == (("line", 23) if asked else ("exact", 20))
