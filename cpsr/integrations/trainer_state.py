"""The own state of a `Trainer` of transformers, as an object that `recovery.register` takes."""

import logging
import math
from collections.abc import Mapping
from copy import copy
from dataclasses import fields
from typing import Any, Literal

import torch
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from cpsr.errors import ConfigError, UnsupportedEngineError
from cpsr.life.hyperparameters import script_sentence
from cpsr.state import codec

__all__ = ["TrainerProgress"]

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
    """What `trainer_state.json` holds, sums of the losses, and the callbacks that have a state.

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
        self._load_callbacks(state["callbacks"])
        if state.get("max_steps", math.inf) <= trainer.state.global_step < trainer.state.max_steps:
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
        resized = then.get("ranks", now["ranks"]) != now["ranks"]  # an earlier version did not save it
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
