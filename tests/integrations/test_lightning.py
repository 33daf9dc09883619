"""The Trainer of Lightning under CPSR: what comes back after a failure, bit for bit, and what is refused."""

import hashlib
import importlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr.errors import ConfigError, UnsupportedEngineError
from cpsr.journal import JournalReader
from tests.committed import wait_until_committed
from tests.integrations.lives import Stopped, killed_and_back

pytest.importorskip("lightning")
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

CPSRCallback: Any = importlib.import_module("cpsr.integrations.lightning").CPSRCallback

INTERVAL, PASSES = 4, 5


class Net(LightningModule):  # type: ignore[misc]  # untyped here
    """Notes every step's loss and rate, those of earlier lives excluded."""

    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.automatic_optimization = automatic
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((self.trainer.global_step, self.trainer.current_epoch, batch_idx, loss.item(), rate))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7), "interval": "epoch"},
        }


class FailAt(Callback):  # type: ignore[misc]  # untyped here
    """Fails after a step; waits for each checkpoint, or a busy disk would decide how many there are."""

    def __init__(self, step: int | None, run_dir: Path, sigterm: bool) -> None:
        self.step, self.run_dir, self.sigterm = step, run_dir, sigterm

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        step = trainer.global_step
        if self.step is not None and not self.sigterm and step % INTERVAL == 1 and step > INTERVAL:
            wait_until_committed(self.run_dir, step - 1)
        if step == self.step and self.sigterm:
            self.step = None
            os.kill(os.getpid(), signal.SIGTERM)
        elif step == self.step:
            raise Stopped


class Life:
    """One life; `end` is its final state.

    Args:
        tmp_path: of the run.
        fail_at: the step after which it fails.
        followed: by CPSR.
        arguments: of the Trainer.
    """

    def __init__(
        self,
        tmp_path: Path,
        fail_at: int | None = None,
        *,
        followed: bool = True,
        sigterm: bool = False,
        callbacks: tuple[Any, ...] = (),
        **arguments: Any,
    ) -> None:
        seed_everything(3)
        x = torch.randn(22, 4)
        self.data = TensorDataset(x, x.sum(1, keepdim=True))  # 11 batches, 6 steps in a pass
        config = {
            "run_dir": str(tmp_path / "cpsr"),
            "checkpoint": {"interval_iterations": INTERVAL, "shared_memory": False},
        }
        self.events: list[Any] = []
        self.cpsr = CPSRCallback(config, on_event=(self.events.append,))
        own = [self.cpsr, FailAt(fail_at, tmp_path / "cpsr", sigterm)] if followed else []
        settings: dict[str, Any] = {
            "max_epochs": PASSES,
            "accumulate_grad_batches": 2,
            "accelerator": "auto" if torch.cuda.is_available() else "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": tmp_path,
        }
        self.module = Net()
        self.trainer = Trainer(callbacks=[*own, *callbacks], **{**settings, **arguments})

    def run(self, **fit: Any) -> "Life":
        train, check = DataLoader(self.data, 2, shuffle=True), DataLoader(self.data, 10)
        self.trainer.fit(self.module, train, check, **fit)
        return self

    @property
    def end(self) -> tuple[Any, ...]:
        moments = [one["exp_avg"] for one in self.trainer.optimizers[0].state_dict()["state"].values()]
        values = [*self.module.state_dict().values(), *moments]
        digest = hashlib.sha256(b"".join(one.cpu().numpy().tobytes() for one in values)).hexdigest()
        loop = self.trainer.fit_loop
        return digest, self.trainer.global_step, self.trainer.current_epoch, loop.epoch_loop.total_batch_idx


def fail(tmp_path: Path, at: int, **arguments: Any) -> None:
    with pytest.raises(Stopped):
        Life(tmp_path, at, **arguments).run()


def test_losses_are_recorded(tmp_path: Path) -> None:
    life = Life(tmp_path).run()
    with JournalReader(tmp_path / "cpsr" / "journal.db") as journal:
        losses = {row.iteration: row.loss for row in journal.losses()}
    assert len(losses) == life.trainer.global_step
    first = [loss for step, _, _, loss, _ in life.module.seen if step == 0]
    assert losses[1] == pytest.approx(sum(first) / len(first))


@pytest.mark.parametrize("ended", [10, 12])  # in the middle of a pass, and with it
def test_a_finished_run_goes_on_with_more_steps(tmp_path: Path, ended: int) -> None:
    whole = Life(tmp_path / "whole", max_epochs=-1, max_steps=20).run()
    Life(tmp_path, max_epochs=-1, max_steps=ended).run()
    more = Life(tmp_path, max_epochs=-1, max_steps=20).run()
    assert more.end == whole.end
    assert more.module.seen == [one for one in whole.module.seen if one[0] >= ended]


def test_callbacks_with_a_state_come_back(tmp_path: Path) -> None:
    """Training ends after as many checks as without the failure, and Lightning's own checkpoints are the same."""

    def kept(path: Path) -> tuple[Any, ...]:
        stopping = EarlyStopping("val_loss", min_delta=10.0, patience=7)
        return stopping, ModelCheckpoint(path / "own", monitor="val_loss", save_top_k=2)

    arguments: dict[str, Any] = {"max_epochs": 20, "val_check_interval": 5}
    whole = Life(tmp_path / "whole", callbacks=kept(tmp_path / "whole"), **arguments).run()
    assert 13 < whole.trainer.global_step < 100
    fail(tmp_path, 13, callbacks=kept(tmp_path), **arguments)
    again = Life(tmp_path, callbacks=kept(tmp_path), **arguments).run()
    assert again.end == whole.end
    best = [Path(life.trainer.checkpoint_callback.best_model_path) for life in (whole, again)]
    assert best[0].name == best[1].name
    weights = [torch.load(path, weights_only=True)["state_dict"] for path in best]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_after_sigterm(tmp_path: Path) -> None:
    whole = Life(tmp_path / "whole").run()
    with pytest.raises(SystemExit):
        Life(tmp_path, 9, sigterm=True).run()
    again = Life(tmp_path).run()
    assert again.events[0].lost_iterations == 0
    assert again.end == whole.end


def test_what_is_refused(tmp_path: Path) -> None:
    manual = Life(tmp_path, accumulate_grad_batches=1)
    manual.module.automatic_optimization = False
    with pytest.raises(UnsupportedEngineError, match="automatic_optimization=False"):
        manual.run()
    with pytest.raises(UnsupportedEngineError, match="all of it"):
        Life(tmp_path, limit_train_batches=3).run()
    own = Life(tmp_path / "own", followed=False).run()
    own.trainer.save_checkpoint(tmp_path / "own.ckpt")
    with pytest.raises(ConfigError, match=r"fit\(ckpt_path='.*own.ckpt'\) would replace"):
        Life(tmp_path).run(ckpt_path=str(tmp_path / "own.ckpt"))
    with JournalReader(tmp_path / "cpsr" / "journal.db") as journal:
        assert {life.ending for life in journal.lives()} == {"error"}


def test_the_example_is_killed_and_comes_back(tmp_path: Path) -> None:
    killed_and_back("lightning_trainer.py", tmp_path)
    ends = [torch.load(tmp_path / life / "final.pt") for life in ("whole", "killed")]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
