"""The own state of a `Trainer` of Lightning, as an object that `recovery.register` takes."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, Timer
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torchmetrics import Metric

from cpsr.state import codec

__all__ = ["TrainerCheckpoint"]

# Lightning saves these and never restores them; they are often no plain data.
ARGUMENTS = ("hyper_parameters", "hparams_name", "hparams_type")


class TrainerCheckpoint:
    """What Lightning's own checkpoints contain, except weights and optimizer state; and the metrics of this pass.

    Lightning's functions dump and restore it. They call the hooks of the module, the datamodule, the callbacks and the
    precision plugin.

    Args:
        trainer: inside `fit`, once the strategy has set up the optimizers.

    Attributes:
        restored: whether a state was loaded in this life.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._steps = 0
        self._length: int | None = None
        self.restored = False

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors."""
        trainer, weights = self._trainer, self._weights()
        with _without_tensors_of_cpsr(trainer.strategy, weights):
            dumped = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        kept: dict[str, Any] = {}
        own: dict[str, list[str]] = {}  # names of weights, by the entry of the checkpoint that has them
        for entry, value in dumped.items():
            if entry.removeprefix("datamodule_") in ARGUMENTS and not codec.is_plain(value):
                continue
            if isinstance(value, dict):
                own[entry] = [name for name, item in value.items() if item is weights.get(name, value)]
                value = {name: item for name, item in value.items() if item is not weights.get(name, value)}
            kept[entry] = value
        return {
            "checkpoint": kept,
            "weights": {entry: names for entry, names in own.items() if names},
            "should_stop": trainer.should_stop,
            "batches_of_a_pass": trainer.num_training_batches,
            "metrics": self._metrics(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it back before the loop runs, which then goes on in the middle of its pass."""
        trainer, weights = self._trainer, self._weights()
        checkpoint = dict(state["checkpoint"])
        for entry, names in state["weights"].items():
            checkpoint[entry] = {name: weights[name] for name in names} | checkpoint[entry]
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint = checkpoint
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", checkpoint)
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_loops()
        self._reopen_pass(state["batches_of_a_pass"])
        connector.restore_lr_schedulers()
        connector._loaded_checkpoint = {}
        # A Timer decides by itself whether its time is up, which may be another time now.
        trainer.should_stop = state["should_stop"] and not any(isinstance(one, Timer) for one in trainer.callbacks)
        self._steps = trainer.fit_loop.epoch_loop._batches_that_stepped
        self._length = state["batches_of_a_pass"]
        self._load_metrics(state["metrics"])
        self.restored = True
        warnings.filterwarnings("ignore", ".*before the epoch ended and your dataloader is not resumable")  # it is

    def _reopen_pass(self, length: int) -> None:
        """Go on within a pass that `max_steps` or `max_time` had cut: Lightning has counted it as a whole one.

        With one pass too many, later passes would be shuffled as those after them.

        Args:
            length: batches of the pass.
        """
        loop = self._trainer.fit_loop
        passes, batches = loop.epoch_progress, loop.epoch_loop.batch_progress.current
        if 0 < batches.completed < length and passes.current.processed == passes.current.ready:
            for one in (passes.current, passes.total):
                one.processed, one.completed = one.processed - 1, one.completed - 1

    def place(self, batch: int, length: int) -> None:
        """Let the loop go on at this batch: another number of ranks counts other batches of the pass.

        Args:
            batch: of the pass, that comes next on this rank.
            length: batches of a pass on this rank.
        """
        if not self.restored:
            return
        loop = self._trainer.fit_loop
        passes, current = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current
        if batch == 0 and passes.completed == passes.ready:
            loop.epoch_loop.restarting = False  # the run had ended with a pass, and goes on with the next one
        elif self._length != length:
            further = batch - current.ready
            for name in ("ready", "started", "processed", "completed"):
                setattr(current, name, getattr(current, name) + further)

    def settle(self) -> None:
        """The first batch begins: put right what Lightning does only at the start of a pass, or does twice."""
        trainer, self.restored = self._trainer, False
        # Else no schedule would follow a metric at the end of this pass, for which Lightning lacks the earlier batches.
        trainer.fit_loop._restarting = False
        # Where a validation follows the restored step, Lightning has counted it twice.
        trainer.fit_loop.epoch_loop._batches_that_stepped = self._steps
        for one in trainer.callbacks:
            if isinstance(one, GradientAccumulationScheduler):
                one.on_train_epoch_start(trainer)

    def _weights(self) -> dict[str, Any]:
        weights: dict[str, Any] = self._trainer.strategy.lightning_module_state_dict()
        return weights

    def _metrics(self) -> dict[str, Any]:
        """Logged values, sums over this pass, and states of metrics in the module."""
        connector, results = self._trainer._logger_connector, self._trainer.fit_loop.epoch_loop._results
        sums = {key: _states(one) for key, one in results.items() if one.is_tensor and not one.has_reset}
        return {
            "callback": dict(connector._callback_metrics),
            "logged": dict(connector._logged_metrics),
            "within": [connector._first_loop_iter, connector._current_fx],
            "sums": sums,
            "modules": {name: [_states(one), one._update_count] for name, one in self._metric_modules()},
        }

    def _load_metrics(self, state: dict[str, Any]) -> None:
        connector, loop = self._trainer._logger_connector, self._trainer.fit_loop.epoch_loop
        device = self._trainer.strategy.root_device
        connector._callback_metrics.update(_on(device, state["callback"]))
        connector._logged_metrics.update(_on(device, state["logged"]))
        connector._first_loop_iter, connector._current_fx = state["within"]
        loop._results = _ContinuedResults(_on(device, state["sums"]))
        for name, one in self._metric_modules():
            if name in state["modules"]:
                states, one._update_count = state["modules"][name]
                vars(one).update(_on(device, states))

    def _metric_modules(self) -> Iterator[tuple[str, Any]]:
        modules = self._trainer.lightning_module.named_modules()
        return ((name, one) for name, one in modules if isinstance(one, Metric))


class _ContinuedResults(_ResultCollection):  # type: ignore[misc]  # untyped here
    """Sums over a pass, each of which begins with what it had before the restart.

    Args:
        before: values of the sums by their keys.
    """

    def __init__(self, before: dict[str, dict[str, Any]]) -> None:
        super().__init__(training=True)
        self._before = before

    def __setitem__(self, key: str, result: Any) -> None:
        vars(result).update(self._before.pop(key, {}))
        super().__setitem__(key, result)


def _states(metric: Any) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in metric._defaults}


def _on(device: torch.device, tree: Any) -> Any:
    """The tree with its tensors on this device."""
    if isinstance(tree, dict):
        return {key: _on(device, value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_on(device, value) for value in tree]
    return tree.to(device) if isinstance(tree, torch.Tensor) else tree


@contextmanager
def _without_tensors_of_cpsr(strategy: Any, weights: dict[str, Any]) -> Iterator[None]:
    """Inside, dumps contain these very weights, which can be told from others, and no optimizer state."""
    strategy.lightning_module_state_dict = lambda: weights
    strategy.optimizer_state = lambda optimizer: {}
    try:
        yield
    finally:
        del strategy.lightning_module_state_dict, strategy.optimizer_state
