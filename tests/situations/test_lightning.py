"""Trainers of Lightning whose state is not only that of the model: it comes back bit for bit, or is refused by name."""

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from cpsr.errors import UnsupportedEngineError
from tests.situations.drawing import drawing_loader
from tests.situations.lives import Life, digest, forked, live

pytest.importorskip("lightning")
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from torchmetrics import MeanMetric

CPSRCallback: Any = importlib.import_module("cpsr.integrations.lightning").CPSRCallback


def data(items: int = 64) -> TensorDataset:
    x = torch.randn(items, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


class Net(LightningModule):  # type: ignore[misc]  # untyped here
    """A regression with dropout, that notes the losses of this life."""

    reduction = "mean"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.losses: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.losses.append([self.trainer.global_step, batch_idx, loss.item(), self.optimizers().param_groups[0]["lr"]])
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class AfterStep(Callback):  # type: ignore[misc]  # untyped here
    def __init__(self, life: Life) -> None:
        self.life = life

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.life.step(trainer.global_step)


class Reloaded(Net):
    """Every second pass a new loader of random items; its length decides the schedule before the run is open."""

    arguments: ClassVar[dict[str, Any]] = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 2}

    def train_dataloader(self) -> Any:
        items = data(64 + 8 * self.trainer.current_epoch)
        part, _ = random_split(items, [64, len(items) - 64])
        return DataLoader(part, batch_size=8, shuffle=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=2 * steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Averaged(Net):
    """Validated and left with the average of its weights."""

    callbacks = (lambda: EMAWeightAveraging(decay=0.9),)

    def train_dataloader(self) -> Any:
        return DataLoader(data(), batch_size=8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(data(16), batch_size=8)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]))


class Counting(Callback):  # type: ignore[misc]  # untyped here
    """Its state is in the checkpoint by `state_dict`, and by a hook."""

    counted, shown = 0, 0

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.counted += 1
        self.shown += 2

    def state_dict(self) -> dict[str, Any]:
        return {"counted": self.counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counted = state["counted"]

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["shown"] = torch.tensor(self.shown)

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.shown = int(checkpoint["shown"])


class CountingData(LightningDataModule):  # type: ignore[misc]  # untyped here
    used = 0

    def train_dataloader(self) -> Any:
        return DataLoader(data(), batch_size=8, shuffle=True)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.used += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.used = state["used"]


class Counted(Net):
    """The loss depends on counters of the module, a callback and the data module."""

    callbacks = (Counting,)
    datamodule: Any = CountingData
    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"reduction": torch.mean})  # no plain data; never restored

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += 1
        counting = next(one for one in self.trainer.callbacks if isinstance(one, Counting))
        counted = self.seen + counting.counted + counting.shown + self.trainer.datamodule.used
        loss: torch.Tensor = super().training_step(batch, batch_idx) / counted
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen
        checkpoint["state_dict"] = {name: one for name, one in checkpoint["state_dict"].items() if "bias" in name}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]
        assert all(one is not None for one in checkpoint["state_dict"].values())


class Accumulated(Net):
    """More batches for each step in later passes; an order from a generator; a hook that draws before the loop."""

    callbacks = (lambda: GradientAccumulationScheduler({0: 1, 1: 3}),)

    def on_train_start(self) -> None:
        self.shift = torch.randn(())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step([batch[0] + 0.1 * self.shift, batch[1]], batch_idx)

    def train_dataloader(self) -> Any:
        return DataLoader(data(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5))


class OnPlateau(Net):
    """The rate follows the mean over each pass, of a value and of a metric."""

    arguments: ClassVar[dict[str, Any]] = {"max_epochs": 5}

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss)
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        self.log("loss", loss, on_epoch=True)
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(data(), batch_size=8, shuffle=True)

    def on_train_epoch_end(self) -> None:
        means = [self.trainer.callback_metrics[name].item() for name in ("mean", "loss_epoch")]
        self.losses.append([self.trainer.global_step, *means])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5, factor=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss_epoch"}}


class PersistentReloaded(Net):
    """Its data draws in persistent workers, which every second pass are new ones."""

    arguments: ClassVar[dict[str, Any]] = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 2}

    def train_dataloader(self) -> Any:
        return drawing_loader(persistent=True)


MODULES = {kind.__name__: kind for kind in (Reloaded, Averaged, Counted, Accumulated, OnPlateau, PersistentReloaded)}


def trained(life: Life) -> Any:
    seed_everything(3)
    kind: Any = MODULES[life.options["kind"]]
    module = kind()
    own = [CPSRCallback(life.config())] if life.options.get("followed", True) else []
    trainer = Trainer(
        **{"max_epochs": 3, **getattr(kind, "arguments", {})},
        callbacks=[*(make() for make in getattr(kind, "callbacks", ())), AfterStep(life), *own],
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=life.directory,
    )
    trainer.fit(module, datamodule=getattr(kind, "datamodule", lambda: None)())
    restored = own[0].recovery.restored.restored_iteration if own else 0
    return [trainer.global_step, trainer.current_epoch, digest(module), module.losses, restored]


CASES = dict.fromkeys(MODULES, 13) | {"Reloaded": 27, "PersistentReloaded": 17}  # where each is killed


def all_lives(life: Life) -> dict[str, list[Any]]:
    """Of each case: without CPSR, killed, started again, and where it is averaged once more; then what is refused."""
    ends = {}
    for kind, at in CASES.items():
        cut, options = life.directory / kind, {"kind": kind}
        ends[kind] = forked(
            trained,
            [
                Life(life.directory / f"{kind}-without", options=options | {"followed": False}),
                Life(cut, at, options=options),
                *(Life(cut, number=number, options=options) for number in (1, 2)[: 1 + (kind == "Averaged")]),
            ],
        )
    for name in REFUSED:
        ends[name] = forked(refused, [Life(life.directory / name, options={"name": name})])
    return ends


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = live(all_lives, Life(tmp_path_factory.mktemp("lives")), seconds=500.0).result
    return found


@pytest.mark.parametrize("kind", CASES)
def test_a_trainer_comes_back_bit_for_bit(kind: str, ends: dict[str, list[Any]]) -> None:
    without, _, cut, *finished = ends[kind]
    assert cut[-1] > 0  # the restored iteration
    assert cut[:3] == without[:3]
    assert cut[3] == without[3][-len(cut[3]) :]
    assert all(again[:4] == [*without[:3], []] for again in finished)


def refused(life: Life) -> str:
    module = Averaged()
    module.batch_size, module.lr = 8, 1e-2
    callbacks = [REFUSED[life.options["name"]](), CPSRCallback(life.config())]
    try:
        Trainer(callbacks=callbacks, accelerator="cpu", logger=False, max_epochs=1).fit(module)
    except UnsupportedEngineError as error:
        return str(error)
    return "trained"


REFUSED: dict[str, Callable[[], Any]] = {
    "BatchSizeFinder": BatchSizeFinder,
    "LearningRateFinder": LearningRateFinder,
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(1e-2),
    "Finetuned": lambda: Finetuned(),
    "cannot save lightning.checkpoint.callbacks.Opaque.kept": lambda: Opaque(),
}


class Finetuned(BaseFinetuning):  # type: ignore[misc]  # untyped here
    def freeze_before_training(self, module: Any) -> None: ...


class Opaque(Callback):  # type: ignore[misc]  # untyped here
    def state_dict(self) -> dict[str, Any]:
        return {"kept": torch.nn.Identity()}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_continue_is_refused_by_name(name: str, ends: dict[str, list[Any]]) -> None:
    assert ends[name][0].startswith(name)
