"""CPSR in the `Trainer` of transformers: plain, with DeepSpeed, and sharded through Accelerate.

The Trainer fixes where it begins before it has an engine to restore, so two of its methods are replaced on the instance
while CPSR follows it: `_run_epoch`, which skips what was trained, and `get_batch_samples`, called before each step.
"""

import logging
import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields
from inspect import isgeneratorfunction, signature
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from cpsr.config import CPSRConfig
from cpsr.engines import TorchAdapter, adapt
from cpsr.errors import ConfigError, UnsupportedEngineError
from cpsr.integrations.accelerate import Passes, order_of_the_pass
from cpsr.integrations.own_attributes import OwnAttributes
from cpsr.life.events import Event, EventCallback, RolledBack
from cpsr.life.hyperparameters import script_sentence
from cpsr.recovery import CPSRRecovery
from cpsr.state import codec

__all__ = ["CPSRCallback", "TrainerProgress"]

logger = logging.getLogger(__name__)

# Of `TrainerState`: settings of this life, and callbacks, whose states are taken as they are now.
NOT_RESTORED = (
    "max_steps",
    "num_train_epochs",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "train_batch_size",
    "is_local_process_zero",
    "is_world_process_zero",
    "is_hyper_param_search",
    "trial_name",
    "trial_params",
    "stateful_callbacks",
)
# Of the Trainer: sums between two log lines, and of the whole run.
SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_initial_num_input_tokens_seen")
# Of `TrainingArguments`: what decides the order of the data; on another number of ranks the global batch does.
ORDER = ("seed", "data_seed", "dataloader_drop_last")
OF_A_RANK = ("per_device_train_batch_size", "gradient_accumulation_steps")
OF_ALL_RANKS = ("global_batch_size", "steps_of_a_pass")


class TrainerProgress:
    """What `trainer_state.json` holds, sums of the losses, what a subclass keeps, and the callbacks that have a state.

    Args:
        trainer: inside `train()`, from `on_train_begin` on.
        choice: `restart.hyperparameters`: whose arguments callbacks have where the script sets others than the run did.

    Raises:
        UnsupportedEngineError: a callback that cannot be made of its own state, by name.
    """

    def __init__(self, trainer: Any, choice: Literal["checkpoint", "script"]) -> None:
        self._trainer, self._choice = trainer, choice
        for one in self._exportable():
            _made_of(one, one.state())
        self._script = [one.state()["args"] for one in self._exportable()]  # what the script gave to callbacks
        self._given = self._script  # what they were given in the run
        self._reported = False
        self._own = OwnAttributes(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Plain data and the tensor of the running sum of losses; the entries of the log are not copied."""
        trainer = self._trainer
        return {
            "state": {
                one.name: copy(getattr(trainer.state, one.name))
                for one in fields(trainer.state)
                if one.name not in NOT_RESTORED
            },
            "sums": {name: getattr(trainer, name) for name in (*SUMS, "current_flos")},
            "loss": trainer._tr_loss.detach().clone(),
            "own": self._own.state_dict(),
            "callbacks": [
                [type(one).__name__, one.state(), given]
                for one, given in zip(self._exportable(), self._given, strict=True)
            ],
            "order": self._order(),
            "max_steps": trainer.state.max_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it back; callbacks of the same class are matched in their order.

        Raises:
            ConfigError: arguments have changed that decide the order of the data. On another number of ranks those of
                a rank may change, if the global batch and the steps of a pass stay.
        """
        trainer = self._trainer
        self._require_order(state["order"])
        for name, value in state["state"].items():
            setattr(trainer.state, name, copy(value))
        for name, value in state["sums"].items():
            setattr(trainer, name, value)
        trainer._tr_loss = torch.as_tensor(state["loss"]).clone().to(trainer.args.device)
        self._own.load_state_dict(state["own"])
        self._load_callbacks(state["callbacks"])
        if state["max_steps"] <= trainer.state.global_step < trainer.state.max_steps:
            trainer.control.should_training_stop = False  # the run had ended, and is to go on

    def _load_callbacks(self, states: list[list[Any]]) -> None:
        callbacks, given, different = self._exportable(), list(self._script), list[str]()
        remaining = list(range(len(callbacks)))
        for name, saved, then in states:
            number = next((number for number in remaining if type(callbacks[number]).__name__ == name), None)
            if number is None:
                continue
            remaining.remove(number)
            one, script = callbacks[number], self._script[number]
            changed = [key for key in script if key in then and not codec.same(script[key], then[key])]
            different += [f"{key} {script[key]} of {name} (the run: {then[key]})" for key in changed]
            if self._choice == "script":
                saved = {**saved, "args": saved["args"] | {key: script[key] for key in changed}}
            else:
                given[number] = then
            now = _made_of(one, one.state())
            for attribute, value in _made_of(one, saved).items():
                if attribute not in now or not codec.same(now[attribute], value):
                    setattr(one, attribute, value)
        self._given = given
        if different and not self._reported:
            logger.warning("%s", script_sentence(different, self._choice))
            self._reported = True

    def _order(self) -> dict[str, Any]:
        trainer, args, loader = self._trainer, self._trainer.args, self._trainer.callback_handler.train_dataloader
        steps = math.ceil(len(loader) / args.gradient_accumulation_steps) if has_length(loader) else None
        found = {name: getattr(args, name) for name in (*ORDER, *OF_A_RANK)}
        whole = {"global_batch_size": trainer.get_total_train_batch_size(args), "steps_of_a_pass": steps}
        return {**found, **whole, "ranks": args.world_size}

    def _require_order(self, then: dict[str, Any]) -> None:
        now = self._order()
        resized = then["ranks"] != now["ranks"]
        names = (*ORDER, *(OF_ALL_RANKS if resized else OF_A_RANK))
        changed = [name for name in names if then[name] != now[name]]
        if not changed:
            return
        named = ", ".join(f"{name}: {then[name]}, now {now[name]}" for name in changed)
        way_out = "start with those, or in a new run_dir"
        if resized:
            way_out = (
                f"the run had {then['ranks']} ranks, now {now['ranks']}: per_device_train_batch_size x "
                f"gradient_accumulation_steps x ranks has to be {then['global_batch_size']}, and a pass has to have as "
                "many steps (without dataloader_drop_last it has); or go on with as many ranks as the run had"
            )
        raise ConfigError(
            f"the run was trained with other arguments ({named}), which decide the order of its data: some would "
            f"be repeated and other left out. Nothing was trained; {way_out}"
        )

    def _exportable(self) -> list[Any]:
        found = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [one for one in found if isinstance(one, ExportableState)]


def _made_of(callback: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """The plain attributes of the callback that transformers would make of this state.

    Raises:
        UnsupportedEngineError: its class cannot be made of it.
    """
    try:
        made = vars(type(callback).from_state(state))
    except Exception as error:
        raise UnsupportedEngineError(
            f"{type(callback).__name__} cannot be made of what its state() returns ({error}): give its __init__ the "
            "names under 'args'. Nothing was trained"
        ) from error
    return {name: value for name, value in made.items() if codec.is_plain(value)}


REPLACED = ("_run_epoch", "get_batch_samples")


class _Moved(Exception):  # noqa: N818 - no error: the way out of a pass whose state was rolled back
    pass


class TrainerPasses:
    """Runs the Trainer's passes from the step that CPSR has restored.

    Args:
        trainer: inside `train()`, from `on_train_begin` on.
        recovery: its open run.
        progress: the Trainer's own state.
        batches: of one step, as the engine counts them.
        end: called when the last pass has ended, or with the error that ended training.
    """

    def __init__(
        self,
        trainer: Any,
        recovery: CPSRRecovery,
        progress: TrainerProgress,
        batches: int,
        end: Callable[[BaseException | None], None],
    ) -> None:
        self._trainer, self._recovery, self._progress = trainer, recovery, progress
        self._batches, self._end = batches, end
        self._restored = progress.state_dict() if recovery.iteration else None
        self._stream: Any = None
        self._rolled_back = self._drawn = self._continued = False
        self._run_epoch, self._fetch = trainer._run_epoch, trainer.get_batch_samples
        trainer._run_epoch, trainer.get_batch_samples = self.run_epoch, self.get_batch_samples

    def detach(self) -> None:
        """Put the Trainer's own methods back."""
        self._trainer._run_epoch, self._trainer.get_batch_samples = self._run_epoch, self._fetch

    def on_event(self, event: Event) -> None:
        """Of the run: a roll-back ends the pass."""
        self._rolled_back |= isinstance(event, RolledBack)

    def run_epoch(self, *, epoch: int, **given: Any) -> None:
        """In place of the Trainer's: what is left of all passes up to this one; nothing of those trained before."""
        trainer = self._trainer
        try:
            self._run_passes(epoch, given)
        except BaseException as error:
            self._end(error)
            raise
        if trainer.control.should_training_stop or epoch + 1 >= trainer.state.num_train_epochs:
            self._end(None)  # before the Trainer loads its best model

    def _run_passes(self, epoch: int, given: dict[str, Any]) -> None:
        trainer, recovery, updates = self._trainer, self._recovery, given["num_update_steps_per_epoch"]
        while (current := recovery.iteration // updates) <= epoch:
            if recovery.iteration >= trainer.state.max_steps:
                trainer.control.should_training_stop = True
                return
            if self._restored is not None:  # once more: callbacks have heard of passes that were trained before
                self._progress.load_state_dict(self._restored)
                self._restored = None
            if current < epoch:
                trainer.control = trainer.callback_handler.on_epoch_begin(trainer.args, trainer.state, trainer.control)
            done = recovery.iteration % updates * trainer.args.gradient_accumulation_steps
            self._continued = done > 0
            if not self._drawn and (self._stream is None or not done):
                self._stream = self._resumed(given["train_dataloader"], updates)
            given |= {"epochs_trained": current, "steps_trained_in_current_epoch": done}
            given["resume_from_checkpoint"] = str(recovery.config.run_dir) if done else None  # nothing to load there
            try:
                self._run_epoch(epoch=current, **given)
            except _Moved:
                continue
            if trainer.state.global_step != recovery.iteration:
                trainer.control.should_training_stop = False  # the last step was rolled back
            elif trainer.control.should_training_stop:
                return
            elif trainer.control.should_epoch_stop:
                raise UnsupportedEngineError(
                    f"a callback ended pass {current} early, after which a restart would go on at the wrong batch: "
                    "end the training instead (should_training_stop)"
                )

    def _resumed(self, loader: Any, updates: int) -> Any:
        if not isgeneratorfunction(type(loader).__iter__):
            raise UnsupportedEngineError(
                f"the training loader is a {type(loader).__name__} that Accelerate has not prepared, whose order "
                "cannot be drawn again: return trainer.accelerator.prepare(loader) from get_train_dataloader"
            )
        accumulated = self._trainer.args.gradient_accumulation_steps
        passes = Passes(updates * self._batches, loader, accumulated // self._batches)
        return self._recovery.resume(passes)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """In place of the Trainer's: the batches of one step. CPSR hears before that the last step is over."""
        if not self._drawn:
            for _ in range(self._batches):
                next(self._stream)
        self._drawn = self._rolled_back
        if self._rolled_back:
            self._rolled_back = False
            raise _Moved
        continued, self._continued = self._continued, False
        with order_of_the_pass(self._stream, continued=continued):
            fetched = self._fetch(epoch_iterator, num_batches, device)
        if not fetched[0]:
            raise UnsupportedEngineError(
                f"the training data ended before step {self._recovery.iteration + 1}, and the dataset has no length: "
                "CPSR cannot place a second pass over it. Repeat the data in the dataset itself"
            )
        return fetched


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
