"""CPSR in the `Trainer` of Lightning: one optimizer, automatic optimization, on one device or with DDP."""

import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging

from cpsr.config import CPSRConfig
from cpsr.engines import TorchAdapter
from cpsr.integrations.lightning_loop import TrainingData, require_followed, require_supported, run_closure_first
from cpsr.integrations.lightning_state import TrainerCheckpoint
from cpsr.life.events import EventCallback
from cpsr.recovery import CPSRRecovery
from cpsr.state.scalars import capture_host_rng, restore_host_rng

__all__ = ["CPSRCallback"]


class CPSRCallback(Callback):  # type: ignore[misc]  # untyped here
    """Restores a run when `trainer.fit` begins, and follows it to its end: `Trainer(callbacks=[CPSRCallback(...)])`.

    What Lightning's own checkpoints contain comes back, with random states and the place in the data; see
    docs/integrations.md. The mode is `exact`.

    Args:
        config: as in `CPSRRecovery`.
        on_event: callbacks for `CPSRRecovery.on_event`.

    Attributes:
        recovery: the run, from `on_fit_start` on; None before.
    """

    def __init__(
        self, config: CPSRConfig | Mapping[str, Any] | str | Path, *, on_event: tuple[EventCallback, ...] = ()
    ) -> None:
        self.recovery: CPSRRecovery | None = None
        self._config, self._on_event = config, on_event
        self._open = False
        self._data: TrainingData | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before the strategy is set up: follow the training data, and come before all other callbacks.

        They find the run restored in their `on_fit_start`, as after a restart of Lightning itself.

        Raises:
            UnsupportedEngineError: a callback that CPSR cannot follow, by name.
        """
        if stage != "fit":
            return
        require_followed(trainer)
        trainer.callbacks = [self, *(one for one in trainer.callbacks if one is not self)]
        self._data = TrainingData(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the run and restore it: the strategy has set up the model and the optimizer.

        Raises:
            UnsupportedEngineError: a strategy or a loop that CPSR cannot follow, by name.
            ConfigError: `ckpt_path` would replace what CPSR restores.
            CPSRError: see `CPSRRecovery`.
        """
        assert self._data is not None
        require_supported(trainer, pl_module)
        (optimizer,) = trainer.optimizers
        self._loss_is_seen = trainer.strategy.model is not pl_module  # by the hooks on the module that is called
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        engine = TorchAdapter(
            trainer.strategy.model, optimizer, None, scaler, micro_batches_per_iteration=trainer.accumulate_grad_batches
        )
        run_closure_first(optimizer)
        recovery = CPSRRecovery(engine, self._config, mode="exact")
        self._checkpoint = TrainerCheckpoint(trainer)
        recovery.register("lightning", self._checkpoint)
        recovery.register("lightning data", self._data)
        for callback in self._on_event:
            recovery.on_event(callback)
        before = signal.getsignal(signal.SIGTERM)
        begun = capture_host_rng()
        self.recovery, self._open = recovery.__enter__(), True
        self._sigterm = signal.getsignal(signal.SIGTERM)
        _handle_sigterm(before)  # Lightning puts back at its end what it finds now
        trained = capture_host_rng()
        restore_host_rng(begun)  # what is set up before the first batch draws as it did in the first life
        self._data.open(self.recovery.resume, trained)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the loop to its place in the data, and SIGTERM under CPSR: Lightning has set up its handlers."""
        assert self._data is not None
        assert self._data.passes is not None
        _handle_sigterm(self._sigterm)
        self._checkpoint.place(self._data.passes.batch, len(self._data.passes))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The first after a restart: see `TrainerCheckpoint.settle`."""
        if self._checkpoint.restored:
            self._checkpoint.settle()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """The loss goes to the journal, where the module itself was not called."""
        if self.recovery is not None and self._open and not self._loss_is_seen:
            self.recovery.life.on_loss(loss.detach() * trainer.accumulate_grad_batches)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The run ends here, and its last state is saved."""
        self._close(None)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run that was finished before has trained nothing: its averages are put into the module here."""
        if self._open:
            self._close(None)
            for one in trainer.callbacks:
                if isinstance(one, WeightAveraging):
                    one.on_train_end(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The run ends with this error, also with the exit after SIGTERM."""
        self._close(exception)

    def _close(self, error: BaseException | None) -> None:
        if self._open and self.recovery is not None:
            self._open = False
            if self._data is not None:
                self._data.detach()
            self.recovery.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def _handle_sigterm(handler: Any) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
