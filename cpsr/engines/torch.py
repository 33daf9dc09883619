"""Plain torch training: any module with its optimizers, alone, under DDP, or split over ranks by DTensors."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch

from cpsr.engines import optimizer_state
from cpsr.engines.adam_kernels import renew_powers
from cpsr.engines.adapter import Mixture, Pipeline, StepObserver
from cpsr.engines.evaluation import preserved_training_state, required_loss
from cpsr.engines.gradient_buckets import GradientBuckets
from cpsr.engines.module_state import ModuleState
from cpsr.engines.moe.token_counts import MixtureOfExperts, ModuleMixture
from cpsr.engines.naming import module_identity, named_buffers, parameter_names, tensor_identity
from cpsr.engines.optimizer_restore import reshard_optimizers, restore_optimizers
from cpsr.engines.optimizer_state import OptimizerState, Updated
from cpsr.engines.schedules import Schedules, advance_scaler, scaler_state
from cpsr.engines.sharded import FullySharded, is_distributed, layout_of, local, part_of
from cpsr.engines.torch_loop import TorchLoop
from cpsr.engines.torch_support import (
    data_parallel_ranks,
    require_parts,
    require_supported,
    require_whole_experts,
    unwrapped,
    wrapper_of,
)
from cpsr.errors import ConfigError, UnsupportedEngineError
from cpsr.state.frozen import FrozenPlace
from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = ["TorchAdapter"]

_log = logging.getLogger(__name__)

_PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


class TorchAdapter:
    """A module and its optimizer; the master weights are the parameters themselves, in their own dtype.

    The end of a step is the last of these calls in the loop, so they must come in this order, once a step::

        loss = module(batch)                    # forward and backward as you like, also several micro-batches
        scaler.scale(loss).backward()
        scaler.step(optimizer)                  # or optimizer.step()
        scaler.update()                         # only with grad_scaler=
        scheduler.step()                        # only with scheduler=, every step, also when the scaler skipped it

    Several optimizers, or several schedulers, step once in every step each, in the order in which they are given. A
    scheduler that is stepped once an epoch must not be given here; register it as user state instead. Parameters may be
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
        optimizers: as given; with the last one, `optimizer`, a step ends.
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
        self.module = self._module = unwrapped(module)
        self.optimizers: list[torch.optim.Optimizer] = optimizers
        self.optimizer = optimizers[-1]
        self.loop_parts: list[Any] = [*schedulers, *([] if grad_scaler is None else [grad_scaler])]
        self.micro_batches_per_iteration = micro_batches_per_iteration
        self._schedule = Schedules(schedulers)
        self._scaler = grad_scaler
        self._fully_sharded = FullySharded(self._module)
        self._fully_sharded.reshard()
        self._names = parameter_names(self._module)
        # Of FSDP2's modules the sharded ones, in whose place they have gathered ones at times.
        self._parameters = list(self._module.parameters())
        self._state = OptimizerState(optimizers)
        self._module_state = ModuleState(self._module)
        self._every: tuple[list[int], list[torch.Tensor], list[Updated]] | None = None
        require_supported(self._module, optimizers, self._names)
        for one in optimizers:
            renew_powers(one)
        self._parts = {id(one): part_of(one, self._names[id(one)]) for one in self._parameters}
        self._absent = {key for key, part in self._parts.items() if part.numel == 0 and 0 not in part.global_shape}
        require_whole_experts(experts, self._parts, self._names)
        names = list(self._names.values())
        self.mixture: Mixture | None = None if experts is None else ModuleMixture(self._module, names, experts)
        self.pipeline: Pipeline | None = None
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank: int = torch.distributed.get_rank() if distributed else 0
        self.world_size: int = torch.distributed.get_world_size() if distributed else 1
        self.device: torch.device = self._fully_sharded.device or local(self._masters()[0]).device
        self.data_parallel_ranks = data_parallel_ranks(module, self._parameters, self._fully_sharded)
        self._buckets = GradientBuckets(wrapper_of(module), optimizers)
        self._loop = TorchLoop(module, optimizers, schedulers, grad_scaler)

    @property
    def iteration(self) -> int:
        """Optimizer steps so far; with a gradient scaler the skipped ones count too."""
        return self._loop.iteration

    @property
    def can_evaluate(self) -> bool:
        """Whether the last training forward returned a loss."""
        return self._loop.gives_loss

    def describe(self) -> dict[str, Any]:
        """Identity of what is trained; see `EngineAdapter.describe`. Frozen parameters and buffers are listed too."""
        tensors = {self._names[id(p)]: self._identity(p) for p in self._masters()}
        tensors |= {
            name: tensor_identity(value, tuple(value.shape)) for name, value in named_buffers(self._module).items()
        }
        tensors |= {name: self._identity(parameter) for parameter, name in self._outside()}
        return {
            "engine": "torch",
            "zero_stage": None,
            "precision": _PRECISIONS.get(self._fully_sharded.dtype or self._masters()[0].dtype, "fp32"),
            "optimizer": "+".join(type(one).__name__ for one in self.optimizers),
            "tensors": tensors,
            "module": module_identity(self._module, {name for _, name in self._outside()}, tensors),
        }

    def _identity(self, parameter: torch.Tensor) -> dict[str, Any]:
        part = self._parts[id(parameter)]
        identity = tensor_identity(local(parameter), part.global_shape, part.offset)
        return identity | ({"layout": layout_of(parameter)} if is_distributed(parameter) else {})

    def shard(self, to_fill: bool = False) -> Shard:
        """Views of this rank's parameters and moments; take them anew after the optimizer loaded a state dict.

        A parameter that is split over ranks, and of which this one holds nothing, is not there.
        """
        operators = {}
        for updated in self._held():
            name, part = updated.name, self._parts[id(updated.master)]
            values, moments = self._state.views(name, updated, to_fill=to_fill)
            piece = ParamSlice(values, part.global_shape, part.offset, part.block)
            operators[name] = OperatorState(name, piece, moments, self._loop.iteration)
        return Shard(operators, self._module_state.buffers(to_fill=to_fill), self.frozen())

    def _updated(self) -> list[Updated]:
        """Every parameter of the optimizers, in their order; looked up where it is not as last time."""
        groups = [(one, group, group["params"]) for one in self.optimizers for group in one.param_groups]
        parameters = [parameter for _, _, own in groups for parameter in own]
        kept, ids = self._every, [id(group) for _, group, _ in groups]
        if kept is None or ids != kept[0] or not _same(parameters, kept[1]):
            every = [Updated(one, group, p, self._names[id(p)]) for one, group, own in groups for p in own]
            kept = self._every = ids, parameters, every
        return kept[2]

    def _held(self) -> list[Updated]:
        """Those of which this rank holds anything."""
        every = self._updated()
        return [one for one in every if id(one.master) not in self._absent] if self._absent else every

    def _masters(self) -> list[torch.Tensor]:
        return [parameter for one in self.optimizers for group in one.param_groups for parameter in group["params"]]

    def frozen(self) -> dict[str, torch.Tensor]:
        """Views of this rank's parts of the parameters outside the optimizer."""
        return {name: local(one) for one, name in self._outside() if id(one) not in self._absent}

    def frozen_places(self) -> dict[str, FrozenPlace]:
        """See `EngineAdapter.frozen_places`."""
        found = {name: self._parts[id(one)] for one, name in self._outside() if id(one) not in self._absent}
        return {
            name: FrozenPlace(part.global_shape, part.offset, part.block)
            for name, part in found.items()
            if part.shape != part.global_shape
        }

    def _outside(self) -> Iterator[tuple[torch.nn.Parameter, str]]:
        """Parameters that the optimizer does not move, with their names."""
        trained = {id(parameter) for parameter in self._masters()}
        for parameter in self._parameters:
            if id(parameter) not in trained:
                yield parameter, self._names[id(parameter)]

    def compute_dtypes(self) -> dict[str, torch.dtype]:
        """None: the masters are the parameters. A mixed-precision policy of FSDP2 casts them for each forward."""
        return {}

    def push_down(self) -> None:
        """The masters are the parameters: only what FSDP2 gathered of them before is dropped."""
        self._fully_sharded.reshard()

    def scalars(self, on_device: bool = False) -> dict[str, Any]:
        """Iteration, optimizer step counts, parameter groups, schedule and gradient scaler.

        See `EngineAdapter.scalars`.
        """
        return {
            "iteration": self._loop.iteration,
            **self._state.scalars(self._updated(), on_device=on_device),
            "param_groups": [group for one in self.optimizers for group in optimizer_state.hyperparameters(one)],
            "schedule": self._schedule.state(),
            "grad_scaler": None if self._scaler is None else scaler_state(self._scaler, on_device=on_device),
            "module": self._module_state.state(),
            **self._buckets.state(),
        }

    def resharded(self, scalars: dict[str, Any]) -> dict[str, Any]:
        """See `EngineAdapter.resharded`."""
        return {**scalars, **reshard_optimizers(scalars, self._updated())}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Put `scalars()` back; the rates last, since schedulers may overwrite them when they load.

        A scaler that the saved run did not have keeps its own state; this is logged.

        Raises:
            UnsupportedEngineError: a gradient scaler then and none now; parts of another number or kind.
        """
        if scalars["grad_scaler"] is not None and self._scaler is None:
            raise UnsupportedEngineError(
                "the saved run had a grad_scaler and this one has none; give TorchAdapter the same parts"
            )
        if scalars["grad_scaler"] is None and self._scaler is not None:
            _log.warning("the saved run had no grad_scaler: this one begins with its own scale")
        groups = list(scalars["param_groups"])
        restore_optimizers(self._state, self._updated(), scalars)
        self._schedule.load(scalars["schedule"], [group.get("lr") for group in groups])
        for place, one in enumerate(self.optimizers):
            last = place == len(self.optimizers) - 1
            own = groups if last else groups[: len(one.param_groups)]
            optimizer_state.load_hyperparameters(one, own)
            groups = groups[len(own) :]
        if self._scaler is not None and scalars["grad_scaler"]:
            self._scaler.load_state_dict(scalars["grad_scaler"])
        self._module_state.load(scalars.get("module"), self.device)
        self._buckets.load(scalars)
        self._loop.iteration = int(scalars["iteration"])
        self._loop.forget_step()

    def prediction_obstacle(self) -> str | None:
        """What of the optimizers cannot be extrapolated."""
        return self._state.obstacle(self._updated())

    def skip_ahead(self, iterations: int) -> list[float]:
        """Advance iteration, step counts, schedule and gradient scaler as `iterations` applied steps would have."""
        rates = []
        for _ in range(iterations):
            rates.append(optimizer_state.learning_rate(self.optimizers))
            self._schedule.advance()
        self._state.advance(self._updated(), iterations)
        advance_scaler(self._scaler, iterations)
        self._loop.iteration += iterations
        return rates

    def require_complete_step(self) -> None:
        """Raise UnsupportedEngineError where the loop is inside a step; the message names the call that is missing."""
        self._loop.require_complete()

    def attach(self, observer: StepObserver) -> None:
        """Install the hooks; with DDP over three ranks or more a collective of them.

        Raises:
            RuntimeError: an observer is attached already.
        """
        self._loop.attach(observer)
        self._buckets.attach(self.iteration)

    def detach(self) -> None:
        """Remove the hooks; without any it does nothing. A step that is not complete by then is not reported."""
        self._buckets.detach()
        self._loop.detach()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Evaluation mode without gradients; modes, buffers and random states are as before on exit."""
        with preserved_training_state(self._called):
            try:
                yield
            finally:
                self._fully_sharded.reshard()

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Loss of one forward input inside `evaluation()`; of the module inside DDP, so that no rank waits.

        Where parameters are split, it is a collective of the ranks that share them.

        Raises:
            UnsupportedEngineError: the module gave no loss.
        """
        return required_loss(self._module(*args, **kwargs), self._module)


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _same(found: list[torch.Tensor], before: list[torch.Tensor]) -> bool:
    return len(found) == len(before) and all(map(is_, found, before))
