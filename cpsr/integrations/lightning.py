"""CPSR in the `Trainer` of Lightning: one optimizer, automatic optimization, on one device or with DDP."""

import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from cpsr.config import CPSRConfig
from cpsr.engines import TorchAdapter
from cpsr.errors import UnsupportedEngineError
from cpsr.integrations.lightning_loop import LoopProgress, RestOfPass, require_supported, run_closure_first
from cpsr.life.events import EventCallback
from cpsr.recovery import CPSRRecovery

__all__ = ["CPSRCallback"]


class CPSRCallback(Callback):  # type: ignore[misc]  # untyped here
    """Restores a run when `trainer.fit` begins, and follows it to its end: `Trainer(callbacks=[CPSRCallback(...)])`.

    The loops with their counters, callbacks that have a state, schedules, random states and the place in the data come
    back; see docs/integrations.md. The mode is `exact`.

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

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the run and restore it: the strategy has set up the model and the optimizer.

        Raises:
            UnsupportedEngineError: a strategy or a loop that CPSR cannot follow, by name.
            ConfigError: `ckpt_path` would replace what CPSR restores.
            CPSRError: see `CPSRRecovery`.
        """
        require_supported(trainer, pl_module)
        (optimizer,) = trainer.optimizers
        self._loss_is_seen = trainer.strategy.model is not pl_module  # by the hooks on the module that is called
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        engine = TorchAdapter(
            trainer.strategy.model, optimizer, None, scaler, micro_batches_per_iteration=trainer.accumulate_grad_batches
        )
        run_closure_first(optimizer)
        recovery = CPSRRecovery(engine, self._config, mode="exact")
        for index, schedule in enumerate(trainer.lr_scheduler_configs):
            recovery.register(f"schedule {index}", schedule.scheduler)
        self._progress = LoopProgress(trainer, self)
        recovery.register("lightning", self._progress)
        for callback in self._on_event:
            recovery.on_event(callback)
        before = signal.getsignal(signal.SIGTERM)
        self.recovery, self._open = recovery.__enter__(), True
        self._sigterm = signal.getsignal(signal.SIGTERM)
        _handle_sigterm(before)  # Lightning puts back at its end what it finds now

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the place in the data under CPSR, and SIGTERM: Lightning has set up its loader and its handlers."""
        assert self.recovery is not None
        _handle_sigterm(self._sigterm)
        loop, loader = trainer.fit_loop, trainer.train_dataloader
        if not isinstance(loader, torch.utils.data.DataLoader) or trainer.num_training_batches != len(loader):
            raise UnsupportedEngineError(
                f"the training data is a {type(loader).__name__} of which {trainer.num_training_batches} batches are "
                "taken: CPSR follows one DataLoader with a length, and all of it (no limit_train_batches)"
            )
        stream: Any = self.recovery.resume(loader, repeat=True)
        self._progress.place(stream.position.advanced(0).batch, len(loader))
        loop._combined_loader.flattened = [RestOfPass(stream, len(loader))]
        iter(loop._data_fetcher)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The first after a restart: Lightning has counted a validation that it does not repeat as a step."""
        self._progress.settle()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """The loss goes to the journal, where the module itself was not called."""
        if self.recovery is not None and self._open and not self._loss_is_seen:
            self.recovery.life.on_loss(loss.detach() * trainer.accumulate_grad_batches)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The run ends here, and its last state is saved."""
        self._close(None)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run that was finished before has trained nothing."""
        self._close(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The run ends with this error, also with the exit after SIGTERM."""
        self._close(exception)

    def _close(self, error: BaseException | None) -> None:
        if self._open and self.recovery is not None:
            self._open = False
            self.recovery.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def _handle_sigterm(handler: Any) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
