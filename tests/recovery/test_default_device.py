"""A user's default device for new tensors is not where CPSR makes its own.

The default device `meta` has no values: whatever takes one from a tensor that was made without a device fails, or is
wrong. On a machine without a GPU it stands for `cuda`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cpsr import CPSRRecovery, TorchAdapter
from tests.committed import keep_pace, wait_until_committed
from tests.situations.lives import Life, backward, digest, live

ITEMS, BATCH, FEATURES = 40, 4, 5
INTERVAL, CHECKPOINT, FAILURE, ITERATIONS = 4, 20, 23, 30


def training(life: Life) -> list[Any]:
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
    # Fused: without that torch makes the optimizer's own counters on the default device.
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-2, fused=True)
    batches = [(x, x.sum(1, keepdim=True)) for x in torch.randn(ITEMS, FEATURES).view(-1, BATCH, FEATURES)]
    batches = batches[life.rank :: life.ranks]

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(module(batch[0]), batch[1])

    torch.set_default_device(life.options["default_device"])
    checkpoint = {"interval_iterations": INTERVAL, "shared_memory": life.options["shared_memory"]}
    config = life.config(mode=life.options["mode"], checkpoint=checkpoint)
    with CPSRRecovery(TorchAdapter(module, optimizer), config, loss_fn=loss_of) as recovery:
        for batch in recovery.resume(batches, repeat=True):
            if recovery.iteration == life.at > 0:
                wait_until_committed(life.directory / "run", CHECKPOINT)
                life.step(recovery.iteration)
            backward(loss_of(batch))
            for parameter in module.parameters():
                torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            keep_pace(recovery)
            if recovery.iteration >= ITERATIONS:
                break
    torch.set_default_device("cpu")
    torch.distributed.destroy_process_group()
    return [recovery.restored.method, recovery.restored.restored_iteration, digest(module)]


@pytest.mark.parametrize(("mode", "shared_memory"), [("exact", True), ("predict", False)])
def test_a_job_recovers_as_without_it(tmp_path: Path, mode: str, shared_memory: bool) -> None:
    """Rank 1 is killed after the last checkpoint."""
    ends = []
    for device in ("meta", "cpu"):
        options = {"default_device": device, "mode": mode, "shared_memory": shared_memory}
        live(training, Life(tmp_path / device, FAILURE, on_rank=1, ranks=2, options=options))
        ends.append(live(training, Life(tmp_path / device, ranks=2, number=1, options=options)).results)
    assert ends[0] == ends[1]
    assert ends[0][0][1] >= CHECKPOINT
