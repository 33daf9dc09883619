"""The one interface through which CPSR sees a training engine.

`DeepSpeedAdapter` and `TorchAdapter` implement it; `tests/engines/test_conformance.py` holds both to the same rules.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cpsr.engines.moe.naming import Naming
from cpsr.engines.moe.operators import ModelOperators
from cpsr.engines.moe.token_counts import HookedTokenCounts
from cpsr.engines.stage_traffic import StageTraffic
from cpsr.state.frozen import FrozenPlace
from cpsr.state.shard import Shard

__all__ = ["EngineAdapter", "Stage", "StepObserver"]


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


@dataclass(frozen=True)
class Stage:
    """Which part of a pipeline a rank is.

    Attributes:
        index: of the stage, from 0.
        count: of the stages, at least 2.
    """

    index: int
    count: int


class EngineAdapter(Protocol):
    """Read, write and watch the training state of one rank."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def data_parallel_ranks(self) -> list[int]:
        """Ranks among which the batch is split, this one included.

        They train the same parameters, but for the experts that expert-parallel ranks share among themselves.
        """

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
    def optimizer(self) -> torch.optim.Optimizer:
        """The last of `optimizers`: with it a step ends."""

    @property
    def loop_parts(self) -> list[Any]:
        """Objects of the user's loop whose state `scalars()` holds: the schedule and the gradient scaler, if any."""

    @property
    def gradient_clipping(self) -> float | None:
        """Norm at which the engine clips gradients; None where the loop does that itself."""

    def clip_gradients(self, norm: float | None) -> None:
        """Clip gradients at this norm from now on; None changes nothing."""

    @property
    def pipeline_stage(self) -> Stage | None:
        """This rank's stage; None where there is no pipeline, or one of a single stage, which waits for nobody."""

    @property
    def stage_traffic(self) -> StageTraffic | None:
        """What crosses the boundaries of this rank's stage; None where there is no pipeline of several stages."""

    @property
    def can_evaluate(self) -> bool:
        """Whether `evaluate` can give a loss; known after the first training forward at the latest."""

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

    def renewed(self, shard: Shard) -> Shard | None:
        """A result of `shard()` as it would be now, where its tensors are still the engine's; else None.

        It takes a fraction of the time. The operators' `iteration` stays that of `shard`. Others may have called
        `shard()` since, also after the optimizer replaced its state.
        """

    def frozen(self) -> dict[str, torch.Tensor]:
        """Views of the parameters outside the optimizer, as in `shard()`, without looking at anything else."""

    def compute_dtypes(self) -> dict[str, torch.dtype]:
        """By operator, the dtype of the weights of forward and backward; that of the master where none is named."""

    def frozen_places(self) -> dict[str, FrozenPlace]:
        """Where those of `frozen()` lie that are split over ranks."""

    def push_down(self) -> None:
        """Derive everything that depends on the master weights after the views of `shard()` were written."""

    def scalars(self, on_device: bool = False) -> dict[str, Any]:
        """Exact small state as plain data: counters, optimizer step counts, schedule, loss scale.

        Args:
            on_device: leave numbers of a CUDA device there, as `DeviceNumber`s: reading them waits for all queued work.
        """

    def resharded(self, scalars: dict[str, Any]) -> dict[str, Any]:
        """`scalars()` for this rank, made of those that a rank saved where the run had another number of ranks.

        Also made of what was imported from another tool (`cpsr.engines.imported_state`).

        Raises:
            UnsupportedEngineError: they cannot be dealt to this number of ranks; the message says why.
        """

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Put back what `scalars()` returned, learning rates in the parameter groups included.

        Raises:
            UnsupportedEngineError: of other optimizers, groups or parts; the message names the first difference.
        """

    def random_states(self) -> dict[str, Any]:
        """Random states that the engine keeps beside torch's generators, as plain data; empty if it keeps none."""

    def load_random_states(self, states: dict[str, Any]) -> str | None:
        """Put back what `random_states()` returned.

        Returns:
            What could not be restored, for people; None if all was.
        """

    def learning_rate(self) -> float:
        """Mean learning rate over the parameter groups: what the next update will use."""

    def second_moment_decay(self) -> float:
        """Decay of the optimizer's second moments (Adam's beta2); 0 where it keeps none."""

    def prediction_obstacle(self) -> str | None:
        """Why no later state can be predicted, one clause for people; None where one can.

        Weights must be moved by steps, and beside weights and moments only counts of steps may change.
        """

    def skip_ahead(self, iterations: int) -> list[float]:
        """Move counters, optimizer step counts and schedule forward as if that many steps had been applied.

        Returns:
            The learning rate (`learning_rate()`) each of the skipped updates would have used, in order.
        """

    def expert_naming(self) -> Naming | None:
        """How the names of the shard's operators mark experts and gates; None for a model without experts."""

    def expert_operators(self) -> ModelOperators | None:
        """Layers of experts and who owns them, from all parameters of the model; None for a model without experts.

        Raises:
            UnsupportedEngineError: layers that are shared out in different ways.
        """

    def token_counts(self, probabilities: bool = False) -> HookedTokenCounts | None:
        """Hooks that count, over all ranks, the tokens routed to each expert; None for a model without experts.

        Its layers are those of `expert_operators`. The caller reports the steps to it, and removes the hooks.

        Args:
            probabilities: sum the experts' gating probabilities, too.

        Raises:
            UnsupportedEngineError: nobody gave the place where the layers show their probabilities.
        """

    def scale_expert_capacity(self, layer: str, factor: float) -> bool:
        """Let each expert of a layer take so many times the tokens of a training step that the model allows.

        All ranks that share the experts must do it between the same two steps.

        Args:
            layer: name, as in `expert_operators`.
            factor: on what the model was built with; 1 puts exactly that back.

        Returns:
            Whether there is such a limit; where there is none nothing was changed.
        """

    def attach(self, observer: StepObserver) -> None:
        """Install the hooks; the engine's own methods keep their signatures and results."""

    def detach(self) -> None:
        """Remove every hook that `attach` installed."""

    def evaluation(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients; training mode and every random state are as before on exit."""

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Loss of one recorded forward input inside `evaluation()`: a detached scalar, no side effects on training."""
