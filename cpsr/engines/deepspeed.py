"""DeepSpeed engines: ZeRO 0 to 3 in fp32, bf16 and fp16, pipelines at ZeRO 0 and 1, MoE layers at ZeRO 0 to 2."""

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import autocast_if_enabled

from cpsr.engines.adam_kernels import renew_powers
from cpsr.engines.adapter import EngineAdapter, Pipeline
from cpsr.engines.deepspeed_loop import (
    DeepSpeedLoop,
    load_tracked_states,
    preserved_tracked_states,
    tracked_states,
)
from cpsr.engines.deepspeed_masters import (
    MasterSlice,
    advance_loss_scale,
    frozen_place,
    master_slices,
    masters,
    owned_frozen,
    push_down,
    settle_after_forward,
    torch_optimizer,
)
from cpsr.engines.deepspeed_refusals import require_supported
from cpsr.engines.deepspeed_repeated import DeepSpeedRepeatedSteps, can_leave_out
from cpsr.engines.deepspeed_traffic import DeepSpeedTraffic
from cpsr.engines.evaluation import preserved_training_state, required_loss
from cpsr.engines.moe.deepspeed import EngineMixture, expert_names
from cpsr.engines.updated_tensor import Updated
from cpsr.errors import UnsupportedEngineError
from cpsr.state.frozen_parameters import FrozenPlace

__all__ = ["DeepSpeedAdapter"]

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
# DeepSpeed's names for the running values of its two kinds of dynamic loss scaler; the rest is configuration.
_LOSS_SCALE_VALUES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class DeepSpeedAdapter(EngineAdapter):
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
        schedulers = [] if engine.lr_scheduler is None else [engine.lr_scheduler]
        super().__init__(engine.module, [torch_optimizer(engine)], schedulers, expert_names(engine.module))
        self.rank = deepspeed.comm.get_rank()
        self.world_size = deepspeed.comm.get_world_size()
        self.device = torch.device(engine.device)
        self.data_parallel_ranks = torch.distributed.get_process_group_ranks(engine.data_parallel_group)
        self._engine = engine
        self._pipeline = isinstance(engine, deepspeed.PipelineEngine)
        renew_powers(self.optimizer)
        self._masters: list[torch.Tensor] = []  # that `_slices` are of
        self._slices: list[tuple[str, MasterSlice, FrozenPlace]] = []
        self._whole: dict[int, str] = {}  # by the id of a master that is one parameter
        self._loop: DeepSpeedLoop = DeepSpeedLoop(engine, self._pipeline)
        mixture = EngineMixture(engine, self._names.values())
        self.mixture = mixture if mixture.found else None
        if self._pipeline and engine.num_stages > 1:
            self.pipeline = Pipeline(int(engine.stage_id), int(engine.num_stages), DeepSpeedTraffic(engine, self))

    @property
    def iteration(self) -> int:
        """Optimizer steps so far, skipped ones included: the engine's `global_steps`."""
        return int(self._engine.global_steps)

    @property
    def micro_batches_per_iteration(self) -> int:
        """Gradient accumulation steps, of one batch each; where the loop decides, those of the configuration."""
        return int(self._engine.gradient_accumulation_steps())

    @property
    def gradient_clipping(self) -> float:  # type: ignore[override]  # the engine's own
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

    def _kind(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "engine": type(engine).__name__,
            "zero_stage": int(engine.zero_optimization_stage()),
            "precision": "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32",
        }

    def _owned(self) -> Iterator[tuple[str, Updated, slice, FrozenPlace]]:
        updated = {id(one.master): one for one in self._updated()}
        for name, piece, place in self._slices:
            yield name, updated[id(piece.master)], slice(piece.start, piece.start + piece.numel), place

    def _updated(self) -> list[Updated]:
        """What the optimizer updates on this rank; names and slices are looked up where it is not as last time."""
        found = masters(self._engine.optimizer)
        now = [master for _, master in found]
        if len(now) != len(self._masters) or any(map(operator.is_not, now, self._masters)):
            self._slices = [
                (self._name(piece), piece, FrozenPlace(piece.global_shape, piece.offset))
                for piece in master_slices(self._engine.optimizer)
            ]
            self._masters = now
            self._whole = {id(piece.master): name for name, piece, _ in self._slices if piece.is_whole}
        groups = self.optimizer.param_groups
        return [Updated(self.optimizer, groups[i], one, self._whole.get(id(one), "")) for i, one in found]

    def _trained(self) -> Iterable[torch.Tensor]:
        optimizer = self._engine.optimizer
        for attribute in ("bit16_groups", "bf16_groups", "fp16_groups"):
            if hasattr(optimizer, attribute):
                groups = getattr(optimizer, attribute)
                return (parameter for group in groups for parameter in group)
        return (parameter for group in optimizer.param_groups for parameter in group["params"])

    def _held(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Under ZeRO-3 this rank's partition."""
        return owned_frozen(self._engine.optimizer, parameter)

    def _place(self, parameter: torch.nn.Parameter) -> FrozenPlace | None:
        """Under ZeRO-3 partitions are flat, and so all have one."""
        return frozen_place(self._engine.optimizer, parameter)

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
        """See `EngineAdapter.repeated_steps`."""
        return DeepSpeedRepeatedSteps(self._engine, self._names) if can_leave_out(self._engine) else None

    updates_itself = True

    @property
    def called(self) -> Any:
        """The engine."""
        return self._engine

    def repetition_obstacle(self) -> str | None:
        """See `EngineAdapter.repetition_obstacle`."""
        return "a pipeline runs its step inside train_batch" if self._pipeline else None

    def push_down(self) -> None:
        """Copy the masters into the module's parameters, and wait until they are there; collective under ZeRO."""
        push_down(self._engine.optimizer)
        # Under ZeRO-3 the copies into the partitions run on the current stream. The next forward gathers these on a
        # stream of DeepSpeed's own (`overlap_comm`), which waits for no other before it reads them. DeepSpeed itself
        # synchronises here only where it gathers persistent parameters, and there may be none.
        get_accelerator().synchronize(self.device.index)

    def _counters(self, *, on_device: bool) -> dict[str, Any]:
        """Between two steps those of the last boundary: micro-batches of a step that is not complete do not count."""
        engine = self._engine
        counters = {name: int(getattr(engine, name)) for name in _COUNTERS} | {"micro_steps": self._loop.micro_steps}
        return {
            "counters": counters,
            "micro_batches": int(engine.gradient_accumulation_steps()),
            "loss_scale": {
                name: getattr(scaler, name)
                for scaler in self._loss_scalers()
                for name in _LOSS_SCALE_VALUES
                if hasattr(scaler, name)
            },
        }

    def _loss_scalers(self) -> list[Any]:
        """The one object with the running loss scale, none where the precision needs none."""
        optimizer = self._engine.optimizer
        return [getattr(optimizer, name) for name in ("loss_scaler", "loss_scale_config") if hasattr(optimizer, name)]

    def resharded(self, scalars: dict[str, Any]) -> dict[str, Any]:
        """See `EngineAdapter.resharded`; each step counts as many micro-batches as it takes now."""
        counters = dict(scalars["counters"])
        counters["micro_steps"] = counters["global_steps"] * self.micro_batches_per_iteration
        return {**super().resharded(scalars), "counters": counters}

    def _load_counters(self, scalars: dict[str, Any]) -> None:
        engine = self._engine
        for name in _COUNTERS:
            setattr(engine, name, scalars["counters"][name])
        now = int(engine.gradient_accumulation_steps())
        if scalars.get("micro_batches", now) != now and not self._pipeline:
            # A step ends where the count is a multiple of them: else the first one would be too short.
            engine.micro_steps = engine.global_steps * now
        for scaler in self._loss_scalers():
            for name, value in scalars["loss_scale"].items():
                setattr(scaler, name, value)

    def _advance_counters(self, iterations: int) -> None:
        engine = self._engine
        for _ in range(iterations):
            advance_loss_scale(engine.optimizer)
        engine.global_steps += iterations
        engine.global_samples += iterations * engine.train_batch_size()
        if not self._pipeline:  # pipelines leave this counter at zero
            engine.micro_steps += iterations * int(engine.gradient_accumulation_steps())

    def random_states(self) -> dict[str, Any]:
        """Those of activation checkpointing, by name."""
        return dict(tracked_states())

    def load_random_states(self, states: dict[str, Any]) -> str | None:
        """Put `random_states()` back; see `load_tracked_states`."""
        return load_tracked_states(states)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """See `EngineAdapter.evaluation`; the engine's own timers count it as a forward."""
        # Not compiled: evaluation mode would be compiled anew, and take the place of what training has compiled.
        eager = torch.compiler.set_stance("force_eager") if self._engine.is_compiled else nullcontext()
        with eager, preserved_training_state(self.module), preserved_tracked_states():
            try:
                yield
            finally:
                settle_after_forward(self._engine.optimizer)

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """See `EngineAdapter.evaluate`; collective under ZeRO-3 and where ranks share experts.

        The module is called, not the engine: `engine.forward` clears what it knows of the last backward.
        """
        if self._pipeline:
            raise UnsupportedEngineError("a pipeline's loss exists on its last stage only: CPSR cannot evaluate it")
        with autocast_if_enabled(self._engine):
            return required_loss(self.module(*args, **kwargs), self.module)
