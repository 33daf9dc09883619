"""A loop over what `accelerator.prepare` returns, that comes back after a kill.

    python examples/accelerate_loop.py --folder runs/accelerate --kill-at 17   # killed after step 17
    python examples/accelerate_loop.py --folder runs/accelerate                # goes on, and ends after 8 passes

The launcher starts it again by itself: `cpsr run examples/accelerate_loop.py --folder runs/accelerate --kill-at 17`.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery
from cpsr.integrations.accelerate import engine_of, resume

PASSES = 8


class Net(nn.Module):
    """Returns its loss, as models of transformers do; the dropout makes random states matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kill-at", type=int)
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    set_seed(7)
    x = torch.randn(60, 8)
    dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=64)
    loader = DataLoader(dataset, batch_size=4, shuffle=True)  # 15 batches: 8 steps in a pass
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    run_dir = options.folder / "cpsr"
    config = {"run_dir": str(run_dir), "mode": "exact", "checkpoint": {"interval_iterations": 5}}
    losses: dict[str, float] = {}
    with CPSRRecovery(engine_of(accelerator, model, optimizer, scheduler), config) as recovery:
        recovery.register("losses", losses)
        for _ in range(recovery.epoch, PASSES):
            for batch in resume(recovery, loader):
                with accelerator.accumulate(model):
                    loss = model(*batch)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses[str(recovery.iteration)] = loss.item()
                if recovery.iteration == options.kill_at and recovery.restored.restored_iteration == 0:
                    while not any(run_dir.glob("checkpoints/step-*/COMMIT")):  # else it would begin anew
                        time.sleep(0.02)
                    os.kill(os.getpid(), signal.SIGKILL)

    torch.save({"model": accelerator.unwrap_model(model).state_dict(), "losses": losses}, options.folder / "final.pt")
    print(f"{recovery.iteration} steps, loss {losses[str(recovery.iteration)]!r}")


if __name__ == "__main__":
    main()
