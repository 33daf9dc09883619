"""The interface through which CPSR sees a training engine, and the protocols of what only some engines have.

`DeepSpeedAdapter` and `TorchAdapter` implement it; `tests/engines/test_conformance.py` holds both to the same rules.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from cpsr.engines.moe.operators import ModelOperators, Naming
from cpsr.engines.moe.token_counts import HookedTokenCounts
from cpsr.state.frozen import FrozenPlace
from cpsr.state.shard import Shard

__all__ = [
    "SAMPLED_ELEMENTS",
    "EngineAdapter",
    "GradientClipper",
    "Mixture",
    "Operation",
    "Pipeline",
    "PredictedState",
    "RandomStateKeeper",
    "RepeatedSteps",
    "Repeats",
    "SavedState",
    "StageTraffic",
    "StepObserver",
    "StepRepeater",
    "TrafficLog",
    "Verb",
    "WatchedLoop",
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

    naming: Naming

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


# Of what a stage receives: so many elements show whether it is what came the first time.
SAMPLED_ELEMENTS = 256

Verb = Literal["load", "send", "receive", "all_reduce", "broadcast", "step", "result"]


@dataclass(frozen=True)
class Operation:
    """One thing that a stage did in a step.

    Attributes:
        verb: `load`: a micro-batch is drawn; `send`, `receive`: to and from another stage; `all_reduce`, `broadcast`:
            with ranks of several stages; `step`: the optimizer's; `result`: of `train_batch`.
        where: the other rank; of a collective the name of its group.
        detail: of an `all_reduce` its operator, of a `broadcast` the rank that has the value.
        shape: of the tensor that was moved.
        dtype: its type, without `torch.`.
    """

    verb: Verb
    where: str = ""
    detail: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""


class TrafficLog(Protocol):
    """Takes what a stage does in a step; on the training thread."""

    def begin(self, iteration: int) -> None:
        """A step begins."""

    def add(self, operation: Operation, values: torch.Tensor | None, plain: Any = None) -> None:
        """It did this; the values may change as soon as this has returned, in the order of the device's stream."""

    def end(self, applied: bool, form: Any) -> None:
        """It is complete.

        Args:
            applied: whether the optimizer stepped.
            form: shapes of what is sent to the next stage, which DeepSpeed sends once in a life; None: nothing is.
        """

    def drop(self, reason: str | None) -> None:
        """This step cannot be repeated from a log; None: it was not completed."""


class Repeats(Protocol):
    """Steps as they were logged."""

    @property
    def resting(self) -> Collection[int]:
        """Ranks that repeat only what crosses the boundaries; the others compute."""

    @property
    def form(self) -> Any:
        """As `TrafficLog.end` got it."""

    def operations(self, iteration: int) -> Iterator[tuple[Operation, torch.Tensor | None, Any]]:
        """What this stage did in the step after which this iteration is complete; the last one is `result`."""

    def applied(self, iteration: int) -> bool:
        """Whether the optimizer stepped."""

    def void(self) -> None:
        """No start may repeat from the logs again."""


class StageTraffic(Protocol):
    """Of one rank of a pipeline; on the training thread."""

    @property
    def obstacle(self) -> str | None:
        """Why steps of this pipeline cannot be repeated from logs; None where they can."""

    def follow(self, log: TrafficLog) -> None:
        """Let this take every training step from now on."""

    def repeat(self, repeats: Repeats) -> None:
        """From now on this rank repeats only what crosses the boundaries, until `go_on`."""

    def go_on(self) -> None:
        """The next step is computed."""

    def stop(self) -> None:
        """Follow no more."""


class RepeatedSteps(Protocol):
    """Steps of a replay, which leave out gradients of weights that nobody will use.

    What depends on the gradients of all weights, as their norm and an overflow, is noted in every step. When the step
    is repeated, it comes from there.
    """

    @property
    def left_out(self) -> int:
        """Calls of layers, so far, whose weights got no gradient."""

    def outcome(self) -> dict[str, Any]:
        """What was noted of the last step: numbers, and tensors that nobody changes."""

    def repeat(self, outcome: Mapping[str, Any] | None, without: Collection[str] = ()) -> None:
        """The next step is a repetition; all ranks call it for the same step, and name the same operators.

        Args:
            outcome: of the first time; None: the next step is no repetition.
            without: operators, of any rank, whose update nobody will use.
        """

    def close(self) -> None:
        """The engine is as before: nothing is noted any more."""


@runtime_checkable
class StepRepeater(Protocol):
    """An engine that may repeat steps without all gradients."""

    def repeated_steps(self) -> RepeatedSteps | None:
        """Begin to note what steps come to; None where a replay has to compute every gradient."""


@runtime_checkable
class GradientClipper(Protocol):
    """An engine that clips gradients itself; elsewhere the loop does."""

    @property
    def gradient_clipping(self) -> float:
        """The norm at which it clips; 0 is off."""

    def clip_gradients(self, norm: float) -> None:
        """Clip gradients at this norm from now on."""


@runtime_checkable
class RandomStateKeeper(Protocol):
    """An engine that keeps random states beside torch's generators."""

    def random_states(self) -> dict[str, Any]:
        """They, as plain data; empty where none are in use."""

    def load_random_states(self, states: dict[str, Any]) -> str | None:
        """Put back what `random_states()` returned.

        Returns:
            What could not be restored, for people; None if all was.
        """


@dataclass(frozen=True)
class Pipeline:
    """This rank's place in a pipeline of several stages.

    Attributes:
        stage: of this rank, from 0.
        stages: at least 2.
        traffic: what crosses the boundaries of the stage.
    """

    stage: int
    stages: int
    traffic: StageTraffic


class SavedState(Protocol):
    """What a rank saves of its engine, and how it comes back."""

    def describe(self) -> dict[str, Any]:
        """Identity of what is trained, as plain data.

        Keys: `engine`, `zero_stage` (int or None), `precision` (`fp32`, `bf16`, `fp16`), `optimizer` (class name),
        `tensors` (name -> {`shape`: global shape, `dtype`, `offset`, `numel`: this rank's slice, and `layout`: how a
        mesh of ranks splits a distributed tensor}), `module` (how its own state dict differs: see
        `cpsr.engines.naming.module_identity`).
        """

    def shard(self, to_fill: bool = False) -> Shard:
        """Views of this rank's state. State that an optimizer has still to create is zeros, which cannot be written.

        Args:
            to_fill: for a restart: memory in the place of absent state. `load_scalars` then makes it the optimizer's
                where it was saved, and drops it where it was absent.

        Raises:
            UnsupportedEngineError: an optimizer, offload or wrapper keeps state out of sight; the message names it.
        """

    def frozen(self) -> dict[str, torch.Tensor]:
        """Views of the parameters outside the optimizer, as in `shard()`, without looking at anything else."""

    def frozen_places(self) -> dict[str, FrozenPlace]:
        """Where those of `frozen()` lie that are split over ranks."""

    def compute_dtypes(self) -> dict[str, torch.dtype]:
        """By operator, the dtype of the weights of forward and backward; that of the master where none is named."""

    def push_down(self) -> None:
        """Derive everything that depends on the master weights after the views of `shard()` were written."""

    def scalars(self, on_device: bool = False) -> dict[str, Any]:
        """Exact small state as plain data: counters, optimizer step counts, schedule, loss scale.

        Args:
            on_device: leave numbers of a CUDA device there, as `DeviceNumber`s: reading them waits for all queued work.
        """

    def resharded(self, scalars: dict[str, Any]) -> dict[str, Any]:
        """`scalars()` for this rank, made of those that a rank saved where the run had another number of ranks.

        Raises:
            UnsupportedEngineError: they cannot be dealt to this number of ranks; the message says why.
        """

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Put back what `scalars()` returned, learning rates in the parameter groups included.

        Raises:
            UnsupportedEngineError: of other optimizers, groups or parts; the message names the first difference.
        """


class WatchedLoop(Protocol):
    """The user's loop over the engine."""

    @property
    def iteration(self) -> int:
        """Optimizer steps so far, skipped ones included."""

    @property
    def micro_batches_per_iteration(self) -> int:
        """Batches of the data loader that one optimizer step consumes on this rank."""

    @property
    def module(self) -> torch.nn.Module:
        """Whose forward is called for training; on a pipeline, this rank's stage."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Torch's own, inside of the engine's wrapper: hooks around their steps see the weights of `shard()` change.

        What a hook writes into them is what training goes on with. An engine may call one several times in a step, each
        time with some of its parameter groups.
        """

    @property
    def loop_parts(self) -> list[Any]:
        """Objects of the user's loop whose state `scalars()` holds: the schedule and the gradient scaler, if any."""

    def attach(self, observer: StepObserver) -> None:
        """Install the hooks; the engine's own methods keep their signatures and results."""

    def detach(self) -> None:
        """Remove every hook that `attach` installed."""


class PredictedState(Protocol):
    """What a prediction, and its check, need of an engine."""

    def prediction_obstacle(self) -> str | None:
        """Why no later state can be predicted, one clause for people; None where one can.

        Weights must be moved by steps, and beside weights and moments only counts of steps may change.
        """

    def skip_ahead(self, iterations: int) -> list[float]:
        """Move counters, optimizer step counts and schedule forward as if that many steps had been applied.

        Returns:
            The learning rate (`optimizer_state.learning_rate`) each of the skipped updates would have used, in order.
        """

    @property
    def can_evaluate(self) -> bool:
        """Whether `evaluate` can give a loss; known after the first training forward at the latest."""

    def evaluation(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients; training mode and every random state are as before on exit."""

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Loss of one recorded forward input inside `evaluation()`: a detached scalar, no side effects on training."""


@runtime_checkable
class EngineAdapter(SavedState, WatchedLoop, PredictedState, Protocol):
    """One rank of a training engine.

    Attributes:
        rank, world_size: of this process among all.
        device: where forward and backward run.
        mixture: the layers of experts; None for a model without any.
        pipeline: this rank's place in it; None where there is none, or one of a single stage, which waits for nobody.
    """

    rank: int
    world_size: int
    device: torch.device
    mixture: Mixture | None
    pipeline: Pipeline | None

    @property
    def data_parallel_ranks(self) -> list[int]:
        """Ranks among which the batch is split, this one included.

        They train the same parameters, but for the experts that expert-parallel ranks share among themselves.
        """
