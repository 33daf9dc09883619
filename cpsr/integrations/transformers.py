"""CPSR in the `Trainer` of transformers: plain, with DeepSpeed, and sharded through Accelerate."""

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from transformers import Trainer, TrainerCallback

from cpsr.config import CPSRConfig
from cpsr.engines import TorchAdapter, adapt
from cpsr.errors import ConfigError, UnsupportedEngineError
from cpsr.integrations.trainer_passes import REPLACED, TrainerPasses
from cpsr.integrations.trainer_state import TrainerProgress
from cpsr.life.events import EventCallback
from cpsr.recovery import CPSRRecovery

__all__ = ["CPSRCallback"]


class CPSRCallback(TrainerCallback):  # type: ignore[misc]  # untyped here
    """Restores a run before the first step of `trainer.train()`, and follows it to the last one.

    Add it with `trainer.add_callback(CPSRCallback(trainer, "cpsr.yaml"))`. Step, epoch, log history, best metric,
    callbacks, schedule, random states and the place in the data come back; see docs/integrations.md.

    Args:
        trainer: the one that it is added to.
        config, mode: as in `CPSRRecovery`.
        on_event: callbacks for `CPSRRecovery.on_event`.

    Attributes:
        recovery: the run, from `on_train_begin` on; None before.

    Raises:
        UnsupportedEngineError: a Trainer without the methods that CPSR follows.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: CPSRConfig | Mapping[str, Any] | str | Path,
        *,
        mode: Literal["auto", "predict", "exact"] | None = None,
        on_event: tuple[EventCallback, ...] = (),
    ) -> None:
        missing = [name for name in REPLACED if not hasattr(trainer, name)]
        if missing:
            raise UnsupportedEngineError(
                f"this {type(trainer).__name__} has no {', '.join(missing)}: CPSR follows the Trainer of transformers "
                "5.24 and later"
            )
        self.recovery: CPSRRecovery | None = None
        self._trainer, self._config, self._mode, self._on_event = trainer, config, mode, on_event
        self._passes: TrainerPasses | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the run and restore it: the Trainer has prepared its model, optimizer and schedule.

        Raises:
            ConfigError: arguments with which the run could not go on exactly.
            CPSRError: see `CPSRRecovery`.
        """
        if args.ignore_data_skip:
            raise ConfigError("with ignore_data_skip=True a restart trains on other batches: leave it out with CPSR")
        if args.auto_find_batch_size:
            raise ConfigError(
                "auto_find_batch_size=True begins the run again with a smaller batch, and a restart would begin with "
                "the first size, where the run could not go on. Nothing was trained. Find the size before, without "
                "CPSR, and set per_device_train_batch_size"
            )
        begun = state.global_step
        engine, parts, mode = self._engine()
        recovery = CPSRRecovery(engine, self._config, mode=mode)
        progress = TrainerProgress(self._trainer, recovery.config.restart.hyperparameters)
        for name, part in {"trainer": progress, **parts}.items():
            recovery.register(name, part)
        for callback in self._on_event:
            recovery.on_event(callback)
        self.recovery = recovery.__enter__()
        try:
            if recovery.restored.restored_iteration == 0 < begun:
                raise ConfigError(
                    f"the Trainer resumes at step {begun} of its own checkpoint, and the run_dir of CPSR is empty: "
                    "CPSR follows a run from its first step. Start without resume_from_checkpoint"
                )
            state.global_step = recovery.iteration  # of a predicted state later than what was registered
            self._passes = TrainerPasses(
                self._trainer, recovery, progress, engine.micro_batches_per_iteration, self._end
            )
            recovery.on_event(self._passes.on_event)
        except BaseException as error:
            self._end(error)
            raise

    def _engine(self) -> tuple[Any, dict[str, Any], Any]:
        """The engine, what else to register, and the mode."""
        trainer = self._trainer
        if trainer.is_deepspeed_enabled:
            return adapt(trainer.model_wrapped), {}, self._mode
        scaler, schedule = trainer.accelerator.scaler, trainer.lr_scheduler
        model, optimizer = trainer.model_wrapped, trainer.optimizer.optimizer
        if scaler is None and "metrics" not in signature(schedule.step).parameters:
            return TorchAdapter(model, optimizer, schedule), {}, self._mode
        # The Trainer leaves out the schedule of a step that the scaler skipped, and that of a metric has no steps:
        # neither can be moved forward to a failure.
        return TorchAdapter(model, optimizer, grad_scaler=scaler), {"schedule": schedule}, "exact"

    def _end(self, error: BaseException | None) -> None:
        if self._passes is not None:
            self._passes.detach()
            self._passes = None
        assert self.recovery is not None
        self.recovery.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
