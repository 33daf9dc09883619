"""The interface through which CPSR sees a training engine, and what all engines have in common.

`DeepSpeedAdapter` and `TorchAdapter` derive from it; `tests/engines/test_conformance.py` holds both to the same rules.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from cpsr.engines.distributed_tensors import local
from cpsr.engines.module_state import ModuleState
from cpsr.engines.moe.operators import ModelOperators
from cpsr.engines.moe.token_counts import HookedTokenCounts
from cpsr.engines.naming import (
    Rename,
    module_identity,
    named_buffers,
    parameter_names,
    plain_name,
    same_objects,
    tensor_identity,
)
from cpsr.engines.optimizer_restore import reshard_optimizers, restore_optimizers
from cpsr.engines.optimizer_state import OptimizerState, hyperparameters, learning_rate, load_hyperparameters
from cpsr.engines.schedules import Schedules
from cpsr.engines.state_layout import StateLayout
from cpsr.engines.updated_tensor import Updated
from cpsr.state.frozen_parameters import FrozenPlace
from cpsr.state.shard import PRESENT, OperatorState, ParamSlice, Shard

__all__ = [
    "EngineAdapter",
    "Mixture",
    "Pipeline",
    "StepObserver",
]


class StepObserver(Protocol):
    """What an adapter calls while the user's unchanged loop runs; always on the training thread."""

    def before_update(self) -> None:
        """The optimizer is about to change the state (also called when it will then skip an overflow)."""

    def state_changes(self) -> None:
        """Now it changes: what ranks exchange before an update is through. May come again within one update."""

    def after_step(self, iteration: int, applied: bool) -> None:
        """One step is complete and every counter of the engine is settled.

        Args:
            iteration: optimizer steps so far, skipped ones included.
            applied: False when the step was skipped (fp16 overflow). True where a fused optimizer decides that on a
                GPU: the answer would have to be waited for.
        """

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is about to be called for training with these inputs (references, not copies)."""

    def on_other_forward(self) -> None:
        """The module is about to be called for something else, as an evaluation."""

    def on_train_batch(self) -> None:
        """A pipeline's `train_batch` is called: the loop has finished its last iteration."""

    def on_loss(self, loss: torch.Tensor) -> None:
        """One micro-batch's training loss: a detached, unscaled scalar that stays on its device."""

    def before_external_load(self) -> None:
        """The user's own `load_checkpoint` is about to overwrite the state."""

    def after_external_load(self, iteration: int | None) -> None:
        """The user's own `load_checkpoint` left the engine at `iteration`; None: it has found and changed nothing."""

    def wait_begins(self, place: str) -> None:
        """The thread is about to wait for another pipeline stage.

        Args:
            place: the kind of wait; those of one kind come in the same order in every iteration.
        """

    def wait_ends(self) -> None:
        """It goes on, or failed."""


class Mixture(Protocol):
    """The layers of experts of a model.

    Attributes:
        naming: how the names of the shard's operators mark experts and gates.
    """

    naming: re.Pattern[str]

    def operators(self) -> ModelOperators:
        """Layers of experts and who owns them, from all parameters of the model.

        Raises:
            UnsupportedEngineError: layers that are shared out in different ways.
        """

    def token_counts(self) -> HookedTokenCounts:
        """Hooks that count, over all ranks, the tokens routed to each expert.

        Its layers are those of `operators`. The caller reports the steps to it, and removes the hooks.
        """

    def scale_capacity(self, layer: str, factor: float) -> bool:
        """Let each expert of a layer take so many times the tokens of a training step that the model allows.

        All ranks that share the experts must do it between the same two steps.

        Args:
            layer: name, as in `operators`.
            factor: on what the model was built with; 1 puts exactly that back.

        Returns:
            Whether there is such a limit; where there is none nothing was changed.
        """


@dataclass(frozen=True)
class Pipeline:
    """This rank's place in a pipeline of several stages.

    Attributes:
        stage: of this rank, from 0.
        stages: at least 2.
        traffic: what crosses the boundaries of the stage, a `DeepSpeedTraffic`: its module imports DeepSpeed.
    """

    stage: int
    stages: int
    traffic: Any


class _Nobody:
    """A `StepObserver` that does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *told: None


class Loop(Protocol):
    """Watches the user's loop over an engine."""

    gives_loss: bool
    observer: StepObserver  # while hooks are installed
    recorder: Any  # a `RecordedStep` that follows the forwards; None between them

    def attach(self, observer: StepObserver) -> None:
        """Install the hooks; the engine's own methods keep their signatures and results.

        Raises:
            RuntimeError: an observer is attached already.
        """

    def detach(self) -> None:
        """Remove every hook; without any it does nothing. A step that is not complete by then is not reported."""

    def forget_step(self) -> None:
        """Drop what was seen of the step in progress."""


class EngineAdapter(ABC):
    """One rank of a training engine.

    Args:
        module: see `module`.
        optimizers: see `optimizers`.
        schedulers: the engine's learning-rate schedulers.
        rename: gives the names that the module's tensors are saved by.

    Attributes:
        rank, world_size: of this process among all.
        device: where forward and backward run.
        data_parallel_ranks: ranks among which the batch is split, this one included. They train the same parameters,
            but for the experts that expert-parallel ranks share among themselves.
        module: whose forward is called for training, inside any wrapper; on a pipeline, this rank's stage.
        optimizers: torch's own, inside of the engine's wrapper: hooks around their steps see the weights of `shard()`
            change. What a hook writes into them is what training goes on with. An engine may call one several times in
            a step, each time with some of its parameter groups.
        optimizer: the last of them.
        loop_parts: objects of the user's loop whose state `scalars()` holds: schedules and the gradient scaler, if any.
        mixture: the layers of experts; None for a model without any.
        pipeline: this rank's place in it; None where there is none, or one of a single stage, which waits for nobody.
        wrapper: the DistributedDataParallel around `module`; None where there is none.
        gradient_clipping: the norm at which the engine clips gradients, 0 is off; None: the loop clips.
    """

    rank: int
    world_size: int
    device: torch.device
    data_parallel_ranks: list[int]
    mixture: Mixture | None = None
    pipeline: Pipeline | None = None
    wrapper: torch.nn.Module | None = None
    gradient_clipping: float | None = None
    _loop: Loop

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        rename: Rename = plain_name,
    ) -> None:
        self.module = module
        self.optimizers = list(optimizers)
        self.optimizer = self.optimizers[-1]
        self.loop_parts: list[Any] = list(schedulers)
        self._schedule = Schedules(schedulers)
        self._rename = rename
        self._names = parameter_names(module, rename)
        # Of FSDP2's modules the sharded ones, in whose place they have gathered ones at times.
        self._parameters = list(module.parameters())
        self._absent: frozenset[int] = frozenset()  # ids of the parameters of which this rank holds nothing
        self._state = OptimizerState(self.optimizers)
        self._module_state = ModuleState(module, rename)
        self._views: tuple[StateLayout, dict[str, OperatorState]] | None = None
        self._others: tuple[list[torch.Tensor], list[torch.nn.Parameter]] = [], []  # see `_outside`

    # What a rank saves of its engine, and how it comes back

    def describe(self) -> dict[str, Any]:
        """Identity of what is trained, as plain data.

        Keys: `engine`, `zero_stage` (int or None), `precision` (`fp32`, `bf16`, `fp16`), `optimizer` (class names),
        `tensors` (name -> {`shape`: global shape, `dtype`, `offset`, `numel`: this rank's slice, and `layout`: how a
        mesh of ranks splits a distributed tensor}, also of frozen parameters and buffers), `module` (how its own state
        dict differs: see `cpsr.engines.naming.module_identity`).
        """
        outside = dict(self._outside())
        tensors = {
            name: tensor_identity(one.master, place, None if owned.stop is None else owned.stop - owned.start)
            for name, one, owned, place in self._owned()
        }
        buffers = named_buffers(self.module, self._rename)
        tensors |= {name: tensor_identity(one) for name, one in buffers.items()}
        tensors |= {name: tensor_identity(self._held(one), self._place(one)) for name, one in outside.items()}
        return {
            **self._kind(),
            "optimizer": "+".join(type(one).__name__ for one in self.optimizers),
            "tensors": tensors,
            "module": module_identity(self.module, set(outside), tensors, self._rename),
        }

    def shard(self, to_fill: bool = False) -> Shard:
        """Views of this rank's state. State that an optimizer has still to create is zeros, which cannot be written.

        The same operators, whose `iteration` is -1, until the engine has other tensors. Take them anew after the
        optimizer has loaded a state dict, or the user's own `load_checkpoint` has run.

        Args:
            to_fill: for a restart: memory in the place of absent state. `load_scalars` then makes it the optimizer's
                where it was saved, and drops it where it was absent. The operators are the caller's own.

        Raises:
            UnsupportedEngineError: an optimizer, offload or wrapper keeps state out of sight; the message names it.
        """
        operators = self._operators(to_fill=True) if to_fill else self._known_operators()
        return Shard(operators, self._module_state.buffers(to_fill=to_fill), self.frozen())

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Inside, nobody changes the engine: `shard` and `scalars` compare it with the last time once."""
        parts = self._state, self._module_state.named
        for part in parts:
            part.rest(True)
        try:
            yield
        finally:
            for part in parts:
                part.rest(False)

    def _known_operators(self) -> dict[str, OperatorState]:
        layout = self._state.layout(self._updated())
        if self._views is None or self._views[0] is not layout:
            self._views = layout, self._operators(to_fill=False)
        return self._views[1]

    def _operators(self, *, to_fill: bool) -> dict[str, OperatorState]:
        operators = {}
        for name, updated, owned, place in self._owned():
            if id(updated.master) not in self._absent:
                values, moments = self._state.views(name, updated, owned, to_fill=to_fill)
                operators[name] = OperatorState(name, ParamSlice(values, *place), moments, PRESENT)
        return operators

    def frozen(self) -> dict[str, torch.Tensor]:
        """Views of this rank's parts of the parameters outside the optimizers, without looking at anything else."""
        return {name: local(self._held(one)) for name, one in self._outside() if id(one) not in self._absent}

    def frozen_places(self) -> dict[str, FrozenPlace]:
        """Where those of `frozen()` lie that are split over ranks."""
        places = {name: self._place(one) for name, one in self._outside() if id(one) not in self._absent}
        return {name: place for name, place in places.items() if place is not None}

    def compute_dtypes(self) -> dict[str, torch.dtype]:
        """By operator, the dtype of the weights of forward and backward; that of the master where none is named."""
        return {}

    @abstractmethod
    def push_down(self) -> None:
        """Derive everything that depends on the master weights after the views of `shard()` were written."""

    def scalars(self, on_device: bool = False) -> dict[str, Any]:
        """Exact small state as plain data: counters, optimizer step counts, schedule, loss scale.

        Args:
            on_device: leave numbers of a CUDA device there, as `DeviceNumber`s: reading them waits for all queued work.
        """
        return {
            **self._counters(on_device=on_device),
            **self._state.scalars(self._updated(), on_device=on_device),
            "param_groups": [group for one in self.optimizers for group in hyperparameters(one)],
            "schedule": self._schedule.state(),
            "module": self._module_state.state(),
        }

    def resharded(self, scalars: dict[str, Any]) -> dict[str, Any]:
        """`scalars()` for this rank, made of those that a rank saved where the run had another number of ranks.

        Raises:
            UnsupportedEngineError: they cannot be dealt to this number of ranks; the message says why.
        """
        return {**scalars, **reshard_optimizers(scalars, self._updated())}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Put back what `scalars()` returned; the rates last, since schedulers overwrite them when they load.

        Raises:
            UnsupportedEngineError: of other optimizers, groups or parts; the message names the first difference.
        """
        self._require_same_parts(scalars)
        groups = list(scalars["param_groups"])
        restore_optimizers(self._state, self._updated(), scalars)
        self._schedule.load(scalars["schedule"], [group.get("lr") for group in groups])
        for one in self.optimizers:
            own = groups if one is self.optimizer else groups[: len(one.param_groups)]
            load_hyperparameters(one, own)
            groups = groups[len(own) :]
        self._load_counters(scalars)
        self._module_state.load(scalars.get("module"), self.device)
        self._loop.forget_step()

    def random_states(self) -> dict[str, Any]:
        """Those that the engine keeps beside torch's generators, as plain data; empty where none are in use."""
        return {}

    def load_random_states(self, states: dict[str, Any]) -> str | None:
        """Put back what `random_states()` returned.

        Returns:
            What could not be restored, for people; None if all was.
        """
        return None

    # The user's loop over the engine

    @property
    @abstractmethod
    def iteration(self) -> int:
        """Optimizer steps so far, skipped ones included."""

    @property
    @abstractmethod
    def micro_batches_per_iteration(self) -> int:
        """Batches of the data loader that one optimizer step consumes on this rank."""

    def attach(self, observer: StepObserver) -> None:
        """Let the observer see the loop: see `Loop.attach`."""
        self._loop.attach(observer)

    def detach(self) -> None:
        """Remove every hook that `attach` installed; without any it does nothing."""
        self._loop.detach()

    def clip_gradients(self, norm: float) -> None:
        """Clip gradients at this norm from now on; of an engine that clips itself."""
        raise NotImplementedError(f"the loop clips, not {type(self).__name__}")

    # Repeating a step: see `RecordedStep`

    updates_itself = False  # `called.step()` is the update, and `called.backward` may be the backward

    # Whether the next backward reduces gradients over the ranks; None: the engine decides.
    reduces_gradients: bool | None = None

    @property
    @abstractmethod
    def called(self) -> Any:
        """What the loop calls: the engine, or the module with its wrapper."""

    @property
    def loop(self) -> Loop:
        """The hooks on the loop."""
        return self._loop

    def forward_weights(self) -> dict[str, torch.Tensor]:
        """What this rank holds of the weights of forward and backward, by name; views."""
        named = ((self._names[id(one)], local(self._held(one))) for one in self._parameters)
        return {name: held for name, held in named if held.numel()}

    def repetition_obstacle(self) -> str | None:
        """Why a step cannot be repeated without the loop, one clause for people; None where it can."""
        return None

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Inside, the observer learns of no step; then call `load_scalars`, which also forgets what was counted."""
        observer, self._loop.observer = self._loop.observer, cast(StepObserver, _Nobody())
        try:
            yield
        finally:
            self._loop.observer = observer

    def repeated_steps(self) -> Any:
        """Begin to note what steps come to: `DeepSpeedRepeatedSteps`; None where a replay computes every gradient."""
        return None

    # What a prediction, and its check, need

    def prediction_obstacle(self) -> str | None:
        """Why no later state can be predicted, one clause for people; None where one can.

        Weights must be moved by steps, and beside weights and moments only counts of steps may change.
        """
        return self._state.obstacle(self._updated())

    def replay_obstacle(self) -> str | None:
        """Why windows of snapshots cannot hold the optimizers' state, one clause for people; None where they can."""
        return self._state.replay_obstacle(self._updated())

    def skip_ahead(self, iterations: int) -> list[float]:
        """Move counters, optimizer step counts and schedule forward as if that many steps had been applied.

        Returns:
            The learning rate (`optimizer_state.learning_rate`) each of the skipped updates would have used, in order.
        """
        rates = []
        for _ in range(iterations):
            rates.append(learning_rate(self.optimizers))
            self._schedule.advance()
        self._state.advance(self._updated(), iterations)
        self._advance_counters(iterations)
        self._loop.forget_step()
        return rates

    @property
    def can_evaluate(self) -> bool:
        """Whether `evaluate` can give a loss; known after the first training forward at the latest."""
        return self._loop.gives_loss

    @abstractmethod
    def evaluation(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients; modes, buffers and every random state are as before on exit."""

    @abstractmethod
    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Loss of one recorded forward input inside `evaluation()`: a detached scalar, no side effects on training.

        Raises:
            UnsupportedEngineError: the module gave no loss.
        """

    # What each engine has of its own

    @abstractmethod
    def _kind(self) -> dict[str, Any]:
        """`engine`, `zero_stage` and `precision` of `describe()`."""

    @abstractmethod
    def _updated(self) -> list[Updated]:
        """Every tensor that the optimizers update on this rank, in a fixed order."""

    @abstractmethod
    def _owned(self) -> Iterable[tuple[str, Updated, slice, FrozenPlace]]:
        """Each operator's name, the tensor that is updated, which elements of it are the operator's, and their place.

        Those of which this rank holds nothing are among them.
        """

    @abstractmethod
    def _trained(self) -> Iterable[torch.Tensor]:
        """The module's parameters that the optimizers move."""

    def _outside(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The other ones, with their names."""
        trained, (before, others) = list(self._trained()), self._others
        if not same_objects(trained, before):
            ids = set(map(id, trained))
            others = [one for one in self._parameters if id(one) not in ids]
            self._others = trained, others
        return ((self._names[id(one)], one) for one in others)

    @abstractmethod
    def _held(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """What this rank has of such a parameter; a distributed tensor as it is."""

    @abstractmethod
    def _place(self, parameter: torch.nn.Parameter) -> FrozenPlace | None:
        """Where that lies in the parameter; None where it is the whole."""

    @abstractmethod
    def _counters(self, *, on_device: bool) -> dict[str, Any]:
        """What `scalars()` has of the engine alone."""

    def _require_same_parts(self, scalars: dict[str, Any]) -> None:  # noqa: B027 - most engines have no such parts
        """Raise UnsupportedEngineError where the saved engine had other parts; nothing is changed."""

    @abstractmethod
    def _load_counters(self, scalars: dict[str, Any]) -> None:
        """Put `_counters()` back."""

    @abstractmethod
    def _advance_counters(self, iterations: int) -> None:
        """Count so many applied steps."""
