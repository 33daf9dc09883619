"""A tiny model trained with the Trainer of Lightning, that comes back after a kill.

    python examples/lightning_trainer.py --folder runs/lightning --kill-at 17   # killed after step 17
    python examples/lightning_trainer.py --folder runs/lightning                # goes on, and ends after 8 passes

The launcher starts it again by itself: `cpsr run examples/lightning_trainer.py --folder runs/lightning --kill-at 17`.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr.integrations.lightning import CPSRCallback


class Net(LightningModule):
    """A regression with dropout, so that random states matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.layers(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=64)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class KillAt(Callback):
    """Ends the first life as a crash would, once there is a checkpoint to come back to."""

    def __init__(self, step: int, cpsr: CPSRCallback, run_dir: Path) -> None:
        self.step, self.cpsr, self.run_dir = step, cpsr, run_dir

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step and self.cpsr.recovery.restored.restored_iteration == 0:
            while not any(self.run_dir.glob("checkpoints/step-*/COMMIT")):
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kill-at", type=int)
    options = parser.parse_args()

    seed_everything(7)
    x = torch.randn(60, 8)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    run_dir = options.folder / "cpsr"
    config = {"run_dir": str(run_dir), "checkpoint": {"interval_iterations": 5}}
    cpsr = CPSRCallback(config)
    killing = [] if options.kill_at is None else [KillAt(options.kill_at, cpsr, run_dir)]
    trainer = Trainer(
        max_epochs=8,
        accumulate_grad_batches=2,
        val_check_interval=5,
        callbacks=[cpsr, *killing],
        default_root_dir=options.folder,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Net()
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=20))

    torch.save(module.state_dict(), options.folder / "final.pt")
    print(f"{trainer.global_step} steps, val_loss {trainer.callback_metrics['val_loss'].item()!r}")


if __name__ == "__main__":
    main()
