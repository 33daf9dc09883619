"""Plain torch training: any module with its optimizers, alone, under DDP, or split over ranks by DTensors."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cpsr.engines.adam_kernels import renew_powers
from cpsr.engines.adapter import EngineAdapter, StepObserver
from cpsr.engines.distributed_tensors import FullySharded, local, part_of
from cpsr.engines.evaluation import preserved_training_state, required_loss
from cpsr.engines.gradient_buckets import GradientBuckets
from cpsr.engines.moe.token_counts import MixtureOfExperts, ModuleMixture
from cpsr.engines.naming import same_objects
from cpsr.engines.schedules import advance_scaler, scaler_state
from cpsr.engines.torch_loop import TorchLoop
from cpsr.engines.torch_refusals import (
    data_parallel_ranks,
    require_parts,
    require_supported,
    require_whole_experts,
    unwrapped,
    wrapper_of,
)
from cpsr.engines.updated_tensor import Updated
from cpsr.errors import ConfigError, UnsupportedEngineError
from cpsr.state.frozen_parameters import FrozenPlace

__all__ = ["TorchAdapter"]

_log = logging.getLogger(__name__)

_ALL = slice(None)
_PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


class TorchAdapter(EngineAdapter):
    """A module and its optimizer; the master weights are the parameters themselves, in their own dtype.

    A step ends with the last of these calls in the loop::

        loss = module(batch)                    # forward and backward as you like, also several micro-batches
        scaler.scale(loss).backward()
        scaler.step(optimizer)                  # or optimizer.step()
        scaler.update()                         # only with grad_scaler=
        scheduler.step()                        # only with scheduler=, every step, also when the scaler skipped it

    Several optimizers, or several schedulers, step once in every step each, in any order. A scheduler that is stepped
    once an epoch must not be given here; register it as user state instead. Parameters may be
    split over ranks by `fully_shard` (FSDP2), `parallelize_module` or `distribute_tensor`: before the optimizer is
    built, and so before this adapter. The shards are then the master weights.

    Args:
        module: the module, or a `DistributedDataParallel` around it. Call it, not the module inside.
        optimizer: any torch optimizer over parameters of the module (see docs/optimizers.md), or a list of them.
        scheduler: learning-rate scheduler that the loop steps after every optimizer step, or a list of them.
        grad_scaler: `torch.amp.GradScaler` that the loop uses.
        micro_batches_per_iteration: batches of the data loader per optimizer step.
        experts: how the module's layers of experts are read; None treats them as any other part.

    Attributes:
        module: the one inside any wrapper.
        optimizers: as given.
        data_parallel_ranks: all of them; where parameters are split, those of the mesh of `fully_shard`, or of DDP's
            process group. Without either, ranks that split parameters train on the same batches: this rank alone.

    Raises:
        ConfigError: `micro_batches_per_iteration` is below 1.
        UnsupportedEngineError: a part that is none (a wrapper of another package), or FSDP1; parameters that overlap
            in memory, lie outside the module, are in two optimizers, or of which a rank holds no block. The message
            names it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Any = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        micro_batches_per_iteration: int = 1,
        experts: MixtureOfExperts | None = None,
    ) -> None:
        if micro_batches_per_iteration < 1:
            raise ConfigError(
                f"micro_batches_per_iteration must be at least 1, not {micro_batches_per_iteration}. Nothing began"
            )
        optimizers, schedulers = _listed(optimizer), [] if scheduler is None else _listed(scheduler)
        require_parts(module, optimizers, schedulers, grad_scaler)
        self._called = module
        inside = unwrapped(module)
        self._fully_sharded = FullySharded(inside)
        self._fully_sharded.reshard()
        super().__init__(inside, optimizers, schedulers)
        self.loop_parts += [] if grad_scaler is None else [grad_scaler]
        self._micro_batches_per_iteration = micro_batches_per_iteration
        self._scaler = grad_scaler
        self._every: tuple[list[int], list[torch.Tensor], list[Updated]] | None = None
        require_supported(inside, optimizers, self._names)
        for one in optimizers:
            renew_powers(one)
        self._places = {id(one): part_of(one, self._names[id(one)]) for one in self._parameters}
        held = {id(one): (local(one), one) for one in self._parameters}
        self._split = {key for key, (own, one) in held.items() if own.shape != one.shape}
        self._absent = frozenset(key for key, (own, one) in held.items() if own.numel() == 0 < one.numel())
        if experts is not None:
            require_whole_experts(self._places, self._names)
            self.mixture = ModuleMixture(inside, list(self._names.values()), experts)
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if distributed else 0
        self.world_size = torch.distributed.get_world_size() if distributed else 1
        self.device = self._fully_sharded.device or local(self._trained()[0]).device
        self.data_parallel_ranks = data_parallel_ranks(module, self._parameters, self._fully_sharded)
        self.wrapper = wrapper_of(module)
        self._buckets = GradientBuckets(self.wrapper, optimizers)
        self._loop: TorchLoop = TorchLoop(module, optimizers, schedulers, grad_scaler)

    @property
    def iteration(self) -> int:
        """Optimizer steps so far; with a gradient scaler the skipped ones count too."""
        return self._loop.iteration

    @property
    def micro_batches_per_iteration(self) -> int:
        """As given."""
        return self._micro_batches_per_iteration

    def _kind(self) -> dict[str, Any]:
        precision = _PRECISIONS.get(self._fully_sharded.dtype or self._trained()[0].dtype, "fp32")
        return {"engine": "torch", "zero_stage": None, "precision": precision}

    def _updated(self) -> list[Updated]:
        """Every parameter of the optimizers, in their order; looked up where it is not as last time."""
        groups = [(one, group, group["params"]) for one in self.optimizers for group in one.param_groups]
        parameters = [parameter for _, _, own in groups for parameter in own]
        kept, ids = self._every, [id(group) for _, group, _ in groups]
        if kept is None or ids != kept[0] or not same_objects(parameters, kept[1]):
            every = [Updated(one, group, p, self._names[id(p)]) for one, group, own in groups for p in own]
            kept = self._every = ids, parameters, every
        return kept[2]

    def _owned(self) -> Iterator[tuple[str, Updated, slice, FrozenPlace]]:
        return ((one.name, one, _ALL, self._places[id(one.master)]) for one in self._updated())

    def _trained(self) -> list[torch.Tensor]:
        return [parameter for one in self.optimizers for group in one.param_groups for parameter in group["params"]]

    def _held(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return parameter

    def _place(self, parameter: torch.nn.Parameter) -> FrozenPlace | None:
        return self._places[id(parameter)] if id(parameter) in self._split else None

    @property
    def called(self) -> torch.nn.Module:
        """The module, or the `DistributedDataParallel` around it."""
        return self._called

    @property
    def reduces_gradients(self) -> bool | None:
        """As `no_sync` of DDP, or `set_requires_gradient_sync` of FSDP2 have it; None with neither."""
        wrapper: Any = self.wrapper
        return self._fully_sharded.reduces if wrapper is None else bool(wrapper.require_backward_grad_sync)

    @reduces_gradients.setter
    def reduces_gradients(self, reduces: bool | None) -> None:
        wrapper: Any = self.wrapper
        if wrapper is not None:
            wrapper.require_backward_grad_sync = reduces
        else:
            self._fully_sharded.reduces = reduces

    def repetition_obstacle(self) -> str | None:
        """See `EngineAdapter.repetition_obstacle`."""
        if self._scaler is not None:
            return "the loop scales its loss with a GradScaler"
        hooks: Any = () if self.wrapper is None else self.wrapper._comm_hooks
        if any(map(_keeps_state, hooks)):
            return "a communication hook of DistributedDataParallel keeps state"
        return None

    def push_down(self) -> None:
        """The masters are the parameters: only what FSDP2 gathered of them before is dropped."""
        self._fully_sharded.reshard()

    def _counters(self, *, on_device: bool) -> dict[str, Any]:
        return {
            "iteration": self._loop.iteration,
            "grad_scaler": None if self._scaler is None else scaler_state(self._scaler, on_device=on_device),
            **self._buckets.state(),
        }

    def _require_same_parts(self, scalars: dict[str, Any]) -> None:
        """A scaler that the saved run did not have keeps its own state; this is logged."""
        if scalars["grad_scaler"] is not None and self._scaler is None:
            raise UnsupportedEngineError(
                "the saved run had a grad_scaler and this one has none; give TorchAdapter the same parts"
            )
        if scalars["grad_scaler"] is None and self._scaler is not None:
            _log.warning("the saved run had no grad_scaler: this one begins with its own scale")

    def _load_counters(self, scalars: dict[str, Any]) -> None:
        if self._scaler is not None and scalars["grad_scaler"]:
            self._scaler.load_state_dict(scalars["grad_scaler"])
        self._buckets.load(scalars)
        self._loop.iteration = int(scalars["iteration"])

    def _advance_counters(self, iterations: int) -> None:
        advance_scaler(self._scaler, iterations)
        self._loop.iteration += iterations

    def require_complete_step(self) -> None:
        """Raise UnsupportedEngineError where the loop is inside a step; the message names the call that is missing."""
        self._loop.require_complete()

    def attach(self, observer: StepObserver) -> None:
        """Let the observer see the loop; with DDP over three ranks or more a collective of them."""
        super().attach(observer)
        self._buckets.attach(self.iteration)

    def detach(self) -> None:
        """Remove the hooks; without any it does nothing."""
        self._buckets.detach()
        super().detach()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """See `EngineAdapter.evaluation`."""
        with preserved_training_state(self._called):
            try:
                yield
            finally:
                self._fully_sharded.reshard()

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """See `EngineAdapter.evaluate`; of the module inside DDP, so that no rank waits.

        Where parameters are split, it is a collective of the ranks that share them.
        """
        return required_loss(self.module(*args, **kwargs), self.module)


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _keeps_state(registered: tuple[Any, Any]) -> bool:
    """Whether a communication hook has a state, and not just a group of ranks."""
    _, state = registered
    return state is not None and not isinstance(state, torch.distributed.ProcessGroup)
