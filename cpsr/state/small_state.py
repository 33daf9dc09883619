"""The small exact state of a run: random states, data position, schedule, counters, and registered objects."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from cpsr.state.host_random import capture_host_rng, restore_host_rng

__all__ = [
    "DataPosition",
    "Scalars",
    "capture_rng",
    "restore_rng",
]

_LEARNED = ("probes", "learned", "planning")  # of no use to an exact restart


def capture_rng(device: torch.device | None = None) -> dict[str, Any]:
    """Random states of the host (see `capture_host_rng`) and of this device where it is a GPU, as plain data."""
    gpu = [torch.cuda.get_rng_state(device)] if device is not None and device.type == "cuda" else []
    return {"host": capture_host_rng(), "cuda": gpu}


def restore_rng(state: dict[str, Any], device: torch.device | None = None) -> str | None:
    """Restore what `capture_rng` returned, onto this device.

    Returns:
        What was not restored, for people; None if all was.
    """
    restore_host_rng(state["host"])
    saved = state["cuda"]
    if device is None or device.type != "cuda":
        return "random states of the host are restored, those of a GPU are not: this rank has none" if saved else None
    if not saved:
        return f"random states of the host are restored, that of {device} goes on as it is: none of a GPU was saved"
    torch.cuda.set_rng_state(saved[0], device)
    return None


@dataclass(frozen=True)
class DataPosition:
    """The progress of one rank in its data.

    Attributes:
        batches: batches yielded since the start of the run.
        epoch: passes over the loader that are complete.
        batch: batches yielded of the current pass.
        batches_per_epoch: length of the loader; None if it has none.
        states_epoch: the pass at whose start `states` was taken.
        states: random states that decide the order of that pass (see `cpsr.state.loader`).
        loader: the newest saved state of the loader, of this batch or an earlier one (see `cpsr.state.loader_state`).
        workers: random states of the loader's workers (see `cpsr.state.loader_workers`).
        fetched: random states from which a loader around the DataLoader has fetched batches after this one, and of
            which batch (see `cpsr.state.loader_around`).
        dealing: how the samples of this pass are dealt to ranks (see `cpsr.state.loader_passes`).
        ahead: random states of the host from which batches after this one were drawn that the loop had not trained yet,
            oldest first; those of training are then those after them.
        seeded: the pass that has seeded, or will seed, the persistent workers of this pass; None where each pass seeds
            its workers anew.
        others: loaders beside this one whose persistent workers have been seeded.
        data: how to recognise the data set (see `cpsr.state.data_recognition`).
        resized: True: another number of ranks saved it, and the loader has still to take that into account.
    """

    batches: int = 0
    epoch: int = 0
    batch: int = 0
    batches_per_epoch: int | None = None
    states_epoch: int = 0
    states: dict[str, Any] | None = None
    loader: dict[str, Any] | None = None
    workers: dict[str, Any] | None = None
    dealing: dict[str, int] | None = None
    resized: bool | None = None
    ahead: list[dict[str, Any]] | None = None
    data: dict[str, Any] | None = None
    seeded: int | None = None
    others: int | None = None
    fetched: dict[str, Any] | None = None

    def after_a_batch(self) -> "DataPosition":
        """The position one batch later; at the end of a pass still in that pass."""
        return self._at(self.batches + 1, self.epoch, self.batch + 1)

    def advanced(self, batches: int) -> "DataPosition":
        """The position so many batches later; crosses the end of a pass if the length is known."""
        epoch, batch = self.epoch, self.batch + batches
        if self.batches_per_epoch:
            epoch, batch = epoch + batch // self.batches_per_epoch, batch % self.batches_per_epoch
        return self._at(self.batches + batches, epoch, batch)

    def _at(self, batches: int, epoch: int, batch: int) -> "DataPosition":
        """Another position with the same states; `dataclasses.replace` takes longer."""
        position = object.__new__(DataPosition)
        position.__dict__.update(
            self.__dict__, batches=batches, epoch=epoch, batch=batch, ahead=None, data=None, others=None
        )
        return position

    def to_tree(self) -> dict[str, Any]:
        """Plain data."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True)
class Scalars:
    """Everything of one rank that is not a tensor of the model or the optimizer; saved exactly.

    Just captured, it may have `DeviceNumber`s in the place of numbers; those restored have none.

    Attributes:
        iteration: optimizer steps taken.
        cumulative_learning_rate: sum of the learning rates of all applied steps: the predictor's time axis.
        learning_rate: learning rate of the next step.
        peak_learning_rate: largest learning rate so far.
        origin: `trained`, or `predicted` for every state that descends from one in `lineage`.
        lineage: past restarts from a state that was predicted, had experts older than the rest, or had the weights
            alone, as `{"failure_iteration", "checkpoint_iteration"}`.
        history_start: first iteration whose checkpoints lead to this state; older ones belong to another branch.
        engine: what `EngineAdapter.scalars` returned.
        rng: what `cpsr.engines.evaluation` captured.
        data: the data position.
        registered: `state_dict()` of the user's registered objects, by name.
        recent_losses: this rank's last training losses, oldest first, for the guard's comparison.
        probes: recent forward inputs or batches for the guard's loss veto.
        learned: state of the predictor.
        planning: this rank's costs of a checkpoint, and the phases of the training so far, for the planner.
        experts: tokens routed to experts, and those not saved yet, if checkpoints leave experts out.
        frozen: what `FrozenWeights.state` returned for parameters outside the optimizer; empty without any.
        script: hyperparameters as the script has set them at its start (`cpsr.engines.script_settings`); empty if that
            is not known. Its key `since` lists the iterations at which others took their place.
        global_batch_size: samples that all ranks together train on in an iteration; None where that is not known.
    """

    iteration: int
    cumulative_learning_rate: float
    learning_rate: float
    peak_learning_rate: float
    origin: str
    lineage: list[dict[str, int]]
    history_start: int
    engine: dict[str, Any]
    rng: dict[str, Any]
    data: DataPosition
    registered: dict[str, Any] = field(default_factory=dict)
    recent_losses: list[float] = field(default_factory=list)
    probes: list[Any] = field(default_factory=list)
    learned: dict[str, Any] = field(default_factory=dict)
    planning: dict[str, Any] = field(default_factory=dict)
    experts: dict[str, Any] = field(default_factory=dict)
    frozen: dict[str, Any] = field(default_factory=dict)
    global_batch_size: int | None = None
    script: dict[str, Any] = field(default_factory=dict)

    def to_tree(self) -> dict[str, Any]:
        """Plain data for `cpsr.state.codec.encode`."""
        tree = {item.name: getattr(self, item.name) for item in fields(self)}
        tree["data"] = self.data.to_tree()
        return tree

    def without_learned(self) -> dict[str, Any]:
        """The tree without what training does not need: for a snapshot to host memory, which is taken often.

        What the predictor and the planner have learned is that of the newest checkpoint; see `with_learned`.
        """
        tree = self.to_tree()
        for name in _LEARNED:
            del tree[name]
        return tree

    @staticmethod
    def with_learned(tree: dict[str, Any], checkpoint: Mapping[str, Any] | None) -> dict[str, Any]:
        """The tree with what it lacks, from that of the newest checkpoint; None: there is none.

        Args:
            tree: what `to_tree` or `without_learned` returned.
            checkpoint: what `to_tree` returned.
        """
        there = {} if checkpoint is None else checkpoint
        return {name: there[name] for name in _LEARNED if name in there} | tree

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> "Scalars":
        """What `to_tree` returned.

        Raises:
            TypeError: a field is missing or unknown: the checkpoint was written by another version.
        """
        return cls(**{**tree, "data": DataPosition(**tree["data"])})
