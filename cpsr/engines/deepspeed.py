"""DeepSpeed engines: ZeRO 0 to 3 in fp32, bf16 and fp16, pipelines at ZeRO 0 and 1, MoE layers at ZeRO 0 to 2."""

import operator
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import autocast_if_enabled

from cpsr.engines import optimizer_state
from cpsr.engines.adam_kernels import renew_powers
from cpsr.engines.adapter import Mixture, Pipeline, StepObserver
from cpsr.engines.deepspeed_loop import (
    DeepSpeedLoop,
    EngineScalars,
    load_tracked_states,
    preserved_tracked_states,
    tracked_states,
    untimed,
)
from cpsr.engines.deepspeed_masters import (
    MasterSlice,
    frozen_place,
    master_slices,
    masters,
    owned_frozen,
    push_down,
    settle_after_forward,
    torch_optimizer,
)
from cpsr.engines.deepspeed_repeated import DeepSpeedRepeatedSteps, can_leave_out
from cpsr.engines.deepspeed_support import UNMANAGED, require_supported, warn_of_kept_gradients
from cpsr.engines.deepspeed_traffic import DeepSpeedTraffic
from cpsr.engines.evaluation import preserved_training_state, required_loss
from cpsr.engines.module_state import ModuleState
from cpsr.engines.moe.deepspeed import EngineMixture, expert_names
from cpsr.engines.naming import (
    module_identity,
    named_buffers,
    parameter_names,
    tensor_identity,
)
from cpsr.engines.optimizer_restore import reshard_optimizers, restore_optimizers
from cpsr.engines.optimizer_state import OptimizerState, Updated
from cpsr.engines.schedules import Schedules
from cpsr.errors import UnsupportedEngineError
from cpsr.state.frozen import FrozenPlace
from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = ["DeepSpeedAdapter"]


class DeepSpeedAdapter:
    """One rank of a `DeepSpeedEngine` or `PipelineEngine`.

    The loop stays as it is: `engine(batch)`, `engine.backward(loss)`, `engine.step()`, or `engine.train_batch()`.
    `push_down` and, under ZeRO-3, `evaluate` are collective: all ranks must call them together. A learning-rate
    scheduler must have been given to `deepspeed.initialize`; one stepped by hand is not seen.

    Pipelines: the loss observed is the result of `train_batch`, the mean over the step, which every rank knows. Forward
    inputs are not observed: they exist on the first stage only. `can_evaluate` is False.

    MoE layers: experts are named by their numbers over all ranks (see `expert_names`). Where ranks share a layer's
    experts, `evaluate` is collective, too. In a pipeline all ranks make their adapters together: each then knows the
    layers of all stages.

    Args:
        engine: the first element of what `deepspeed.initialize` returned.

    Raises:
        UnsupportedEngineError: a feature or an optimizer that keeps state out of sight; the message names it.
    """

    def __init__(self, engine: Any) -> None:
        require_supported(engine)
        masters(engine.optimizer)
        self.rank: int = deepspeed.comm.get_rank()
        self.world_size: int = deepspeed.comm.get_world_size()
        self.device: torch.device = torch.device(engine.device)
        self._engine = engine
        self._pipeline = isinstance(engine, deepspeed.PipelineEngine)
        self._schedule = Schedules([] if engine.lr_scheduler is None else [engine.lr_scheduler])
        self._scalars = EngineScalars(engine, pipeline=self._pipeline)
        self._rename = expert_names(engine.module)
        self._names = parameter_names(engine.module, self._rename)
        self._module_state = ModuleState(engine.module, self._rename)
        renew_powers(torch_optimizer(engine))
        warn_of_kept_gradients(engine.optimizer, torch_optimizer(engine))
        self._state = OptimizerState([torch_optimizer(engine)])
        self._masters: list[torch.Tensor] = []  # that `_named` is of
        self._named: list[tuple[str, MasterSlice]] = []
        self._whole: dict[int, str] = {}  # by the id of a master that is one parameter
        self._loop = DeepSpeedLoop(engine, self._pipeline)
        mixture = EngineMixture(engine, self._names.values())
        self.mixture: Mixture | None = mixture if mixture.found else None
        self.pipeline: Pipeline | None = None
        if self._pipeline and engine.num_stages > 1:
            self.pipeline = Pipeline(int(engine.stage_id), int(engine.num_stages), DeepSpeedTraffic(engine, self))

    @property
    def data_parallel_ranks(self) -> list[int]:
        """Of the engine's data-parallel group; of its stage, in a pipeline."""
        return torch.distributed.get_process_group_ranks(self._engine.data_parallel_group)

    @property
    def iteration(self) -> int:
        """Optimizer steps so far, skipped ones included: the engine's `global_steps`."""
        return int(self._engine.global_steps)

    @property
    def micro_batches_per_iteration(self) -> int:
        """Gradient accumulation steps, of one batch each; where the loop decides, those of the configuration."""
        return int(self._engine.gradient_accumulation_steps())

    @property
    def module(self) -> torch.nn.Module:
        """The engine's module."""
        module: torch.nn.Module = self._engine.module
        return module

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Torch's own; ZeRO 1 and 2 step it once for each parameter group."""
        return [torch_optimizer(self._engine)]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The only one."""
        return torch_optimizer(self._engine)

    @property
    def loop_parts(self) -> list[Any]:
        """The engine's schedule and gradient scaler."""
        return [one for one in (self._engine.lr_scheduler, self._scalars.scaler) if one is not None]

    @property
    def gradient_clipping(self) -> float:
        """`gradient_clipping` of the engine's configuration; 0 is off."""
        return float(self._engine.gradient_clipping())

    def clip_gradients(self, norm: float) -> None:
        """Clip gradients at this norm from now on."""
        self._engine._config.gradient_clipping = norm
        if hasattr(self._engine.optimizer, "clip_grad"):
            self._engine.optimizer.clip_grad = norm

    @property
    def can_evaluate(self) -> bool:
        """Whether a training forward gave a loss; never for a pipeline, whose loss exists on its last stage only."""
        return self._loop.gives_loss and not self._pipeline

    def describe(self) -> dict[str, Any]:
        """Identity of what is trained; see `EngineAdapter.describe`. Frozen parameters and buffers are listed too."""
        engine = self._engine
        tensors = {
            self._name(piece): tensor_identity(piece.master, piece.global_shape, piece.offset, piece.numel)
            for piece in master_slices(engine.optimizer)
        }
        places = self.frozen_places()
        for name, value in (self.frozen() | named_buffers(engine.module, self._rename)).items():
            place = places.get(name, FrozenPlace(tuple(value.shape)))
            tensors[name] = tensor_identity(value, place.global_shape, place.offset)
        return {
            "engine": type(engine).__name__,
            "zero_stage": int(engine.zero_optimization_stage()),
            "precision": "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32",
            "optimizer": type(torch_optimizer(engine)).__name__,
            "tensors": tensors,
            "module": module_identity(engine.module, {name for _, name in self._outside()}, tensors, self._rename),
        }

    def shard(self, to_fill: bool = False) -> Shard:
        """Views of this rank's masters and moments; take them anew after the user's own `load_checkpoint`."""
        iteration, updated = self.iteration, {id(one.master): one for one in self._updated()}
        operators = {}
        for name, piece in self._named:
            owned = slice(piece.start, piece.start + piece.numel)
            values, moments = self._state.views(name, updated[id(piece.master)], owned, to_fill=to_fill)
            parameter = ParamSlice(values, piece.global_shape, piece.offset)
            operators[name] = OperatorState(name, parameter, moments, iteration)
        return Shard(operators, self._module_state.buffers(to_fill=to_fill), self.frozen())

    def _updated(self) -> list[Updated]:
        """What the optimizer updates on this rank; names and slices are looked up where it is not as last time."""
        found = masters(self._engine.optimizer)
        now = [master for _, master in found]
        if len(now) != len(self._masters) or any(map(operator.is_not, now, self._masters)):
            self._named = [(self._name(piece), piece) for piece in master_slices(self._engine.optimizer)]
            self._masters = now
            self._whole = {id(piece.master): name for name, piece in self._named if piece.is_whole}
        optimizer = torch_optimizer(self._engine)
        groups = optimizer.param_groups
        return [Updated(optimizer, groups[i], one, self._whole.get(id(one), "")) for i, one in found]

    def frozen(self) -> dict[str, torch.Tensor]:
        """Views of what this rank keeps of the parameters outside the optimizer; under ZeRO-3 a partition of each."""
        return {name: owned_frozen(self._engine.optimizer, parameter) for parameter, name in self._outside()}

    def frozen_places(self) -> dict[str, FrozenPlace]:
        """See `EngineAdapter.frozen_places`; under ZeRO-3 partitions are flat, and so all have one."""
        places = {name: frozen_place(self._engine.optimizer, parameter) for parameter, name in self._outside()}
        return {name: place for name, place in places.items() if place is not None}

    def _outside(self) -> Iterator[tuple[torch.nn.Parameter, str]]:
        """Parameters that the optimizer does not move, with their names."""
        trained = {id(parameter) for parameter in self._trained_parameters()}
        for parameter in self._engine.module.parameters():
            if id(parameter) not in trained:
                yield parameter, self._names[id(parameter)]

    def _trained_parameters(self) -> Iterator[torch.nn.Parameter]:
        optimizer = self._engine.optimizer
        for attribute in ("bit16_groups", "bf16_groups", "fp16_groups"):
            if hasattr(optimizer, attribute):
                groups = getattr(optimizer, attribute)
                return (parameter for group in groups for parameter in group)
        return (parameter for group in optimizer.param_groups for parameter in group["params"])

    def _name(self, piece: MasterSlice) -> str:
        name = self._names.get(id(piece.parameter))
        if name is None:
            raise UnsupportedEngineError(
                f"the optimizer updates a parameter of shape {piece.global_shape} that is not in the engine's module; "
                "make it a parameter of the module"
            )
        return name

    def compute_dtypes(self) -> dict[str, torch.dtype]:
        """Those of the module's parameters."""
        return {self._name(piece): piece.parameter.dtype for piece in master_slices(self._engine.optimizer)}

    def repeated_steps(self) -> DeepSpeedRepeatedSteps | None:
        """See `StepRepeater.repeated_steps`."""
        return DeepSpeedRepeatedSteps(self._engine, self._names) if can_leave_out(self._engine) else None

    def push_down(self) -> None:
        """Copy the masters into the module's parameters, and wait until they are there; collective under ZeRO."""
        push_down(self._engine.optimizer)
        # Under ZeRO-3 the copies into the partitions run on the current stream. The next forward gathers these on a
        # stream of DeepSpeed's own (`overlap_comm`), which waits for no other before it reads them. DeepSpeed itself
        # synchronises here only where it gathers persistent parameters, and there may be none.
        get_accelerator().synchronize(self.device.index)

    def scalars(self, on_device: bool = False) -> dict[str, Any]:
        """Counters, loss scale, optimizer step counts, parameter groups and schedule; see `EngineAdapter.scalars`.

        Between two steps those of the last boundary: micro-batches of a step that is not complete do not count.
        """
        return {
            **self._scalars.state(self._loop.micro_steps, on_device=on_device),
            **self._state.scalars(self._updated(), on_device=on_device),
            "param_groups": optimizer_state.hyperparameters(self.optimizer),
            "schedule": self._schedule.state(),
            "module": self._module_state.state(),
        }

    def resharded(self, scalars: dict[str, Any]) -> dict[str, Any]:
        """See `EngineAdapter.resharded`; each step counts as many micro-batches as it takes now."""
        if not self._engine.managed_gradient_accumulation():
            raise UnsupportedEngineError(
                f"{UNMANAGED}, nor dealt to another number of ranks. Nothing was changed; start with as many ranks as "
                "the run had"
            )
        counters = dict(scalars["counters"])
        counters["micro_steps"] = counters["global_steps"] * self.micro_batches_per_iteration
        return {**scalars, **reshard_optimizers(scalars, self._updated()), "counters": counters}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Put `scalars()` back; the rates last, since schedulers overwrite them when they load."""
        self._scalars.require_same_parts(scalars)
        restore_optimizers(self._state, self._updated(), scalars)
        rates = [group.get("lr") for group in scalars["param_groups"]]
        self._schedule.load(scalars["schedule"], rates)
        optimizer_state.load_hyperparameters(self.optimizer, scalars["param_groups"])
        self._scalars.load(scalars)
        self._module_state.load(scalars.get("module"), self.device)
        self._loop.forget_step()

    def random_states(self) -> dict[str, Any]:
        """Those of activation checkpointing, by name."""
        return dict(tracked_states())

    def load_random_states(self, states: dict[str, Any]) -> str | None:
        """Put `random_states()` back; see `load_tracked_states`."""
        return load_tracked_states(states)

    def prediction_obstacle(self) -> str | None:
        """What of the optimizer cannot be extrapolated, or batches that nobody can count."""
        if not self._engine.managed_gradient_accumulation():
            return UNMANAGED
        return self._state.obstacle(self._updated())

    def skip_ahead(self, iterations: int) -> list[float]:
        """Advance counters, step counts, schedule and loss scale as `iterations` applied steps would have."""
        rates = []
        for _ in range(iterations):
            rates.append(optimizer_state.learning_rate(self.optimizers))
            self._schedule.advance()
        updated = self._updated()
        self._state.advance(updated, iterations)
        self._scalars.skip_ahead(iterations, len(updated))
        self._loop.forget_step()
        return rates

    def attach(self, observer: StepObserver) -> None:
        """Install the hooks on this engine instance.

        Raises:
            RuntimeError: an observer is attached already.
        """
        self._loop.attach(observer)

    def detach(self) -> None:
        """Remove the hooks; without any it does nothing."""
        self._loop.detach()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Evaluation mode without gradients; modes, buffers, random states and timers are as before on exit."""
        # Not compiled: evaluation mode would be compiled anew, and take the place of what training has compiled.
        eager = torch.compiler.set_stance("force_eager") if self._engine.is_compiled else nullcontext()
        with eager, preserved_training_state(self._engine.module), preserved_tracked_states(), untimed(self._engine):
            try:
                yield
            finally:
                settle_after_forward(self._engine.optimizer)

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Loss of one forward input inside `evaluation()`; collective under ZeRO-3 and where ranks share experts.

        The module is called, not the engine: `engine.forward` clears what it knows of the last backward.

        Raises:
            UnsupportedEngineError: a pipeline, or the module gave no loss.
        """
        if self._pipeline:
            raise UnsupportedEngineError("a pipeline's loss exists on its last stage only: CPSR cannot evaluate it")
        with autocast_if_enabled(self._engine):
            return required_loss(self._engine.module(*args, **kwargs), self._engine.module)
