"""The own state of a `Trainer` of transformers, as an object that `recovery.register` takes."""

from typing import Any

import torch
from transformers.trainer_callback import ExportableState

from cpsr.errors import ConfigError

__all__ = ["TrainerProgress"]

# Of `TrainerState`; the rest are settings of this life.
PROGRESS = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
# Of the Trainer: sums between two log lines, and of the whole run.
SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_initial_num_input_tokens_seen")
# Of `TrainingArguments`: what decides the order of the data.
ORDER = ("seed", "data_seed", "per_device_train_batch_size", "gradient_accumulation_steps", "dataloader_drop_last")


class TrainerProgress:
    """Step, epoch, log history, best metric, sums of the losses, and the callbacks that have a state.

    Args:
        trainer: inside `train()`, from `on_train_begin` on.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Plain data and the tensor of the running sum of losses; the log's entries are not copied."""
        trainer = self._trainer
        return {
            "state": {name: getattr(trainer.state, name) for name in PROGRESS},
            "log_history": list(trainer.state.log_history),
            "sums": {name: getattr(trainer, name) for name in (*SUMS, "current_flos")},
            "loss": trainer._tr_loss.detach().clone(),
            "callbacks": [[type(one).__name__, one.state()] for one in self._exportable()],
            "order": {name: getattr(trainer.args, name) for name in ORDER},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it back; callbacks of the same class are matched in their order.

        Raises:
            ConfigError: arguments have changed that decide the order of the data.
        """
        trainer = self._trainer
        changed = [name for name in ORDER if state["order"][name] != getattr(trainer.args, name)]
        if changed:
            named = ", ".join(f"{name}: {state['order'][name]}, now {getattr(trainer.args, name)}" for name in changed)
            raise ConfigError(
                f"the run was trained with other arguments ({named}), which decide the order of its data: some would "
                "be repeated and other left out. Nothing was trained; start with those, or in a new run_dir"
            )
        for name, value in state["state"].items():
            setattr(trainer.state, name, value)
        trainer.state.log_history = list(state["log_history"])
        for name, value in state["sums"].items():
            setattr(trainer, name, value)
        trainer._tr_loss = torch.as_tensor(state["loss"]).clone().to(trainer.args.device)
        remaining = self._exportable()
        for name, saved in state["callbacks"]:
            one = next((one for one in remaining if type(one).__name__ == name), None)
            if one is None:
                continue
            remaining.remove(one)
            attributes = saved["args"] if one is trainer.control else saved["attributes"]
            for attribute, value in attributes.items():
                setattr(one, attribute, value)

    def _exportable(self) -> list[Any]:
        found = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [one for one in found if isinstance(one, ExportableState)]
