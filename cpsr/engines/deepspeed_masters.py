"""Where each DeepSpeed optimizer keeps the master weights this rank owns, by parameter name.

Written against DeepSpeed 0.19. Each function below knows one layout; `master_slices` picks the one in use.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from cpsr.errors import UnsupportedEngineError
from cpsr.state.frozen_parameters import FrozenPlace

__all__ = [
    "MasterSlice",
    "advance_loss_scale",
    "frozen_place",
    "master_slices",
    "masters",
    "owned_frozen",
    "push_down",
    "settle_after_forward",
    "torch_optimizer",
]


@dataclass(frozen=True)
class MasterSlice:
    """The range of one parameter inside the tensor that the torch optimizer updates.

    Attributes:
        parameter: the module's parameter.
        master: the tensor the optimizer updates, the key into its state; often many parameters in one flat tensor.
        start: index in the flattened `master` of the first owned element.
        numel: owned elements; padding at the end of `master` belongs to no slice.
        global_shape: shape of the whole parameter.
        offset: index in the flattened whole parameter of the first owned element.
    """

    parameter: torch.nn.Parameter
    master: torch.Tensor
    start: int
    numel: int
    global_shape: tuple[int, ...]
    offset: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether `master` is this parameter and nothing else."""
        return self.numel == self.master.numel() and tuple(self.master.shape) == self.global_shape


def torch_optimizer(engine: Any) -> torch.optim.Optimizer:
    """The optimizer with the state, inside DeepSpeed's wrapper."""
    optimizer = engine.optimizer
    inner = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        raise UnsupportedEngineError(
            f"{type(optimizer).__name__} holds {type(inner).__name__}, not a torch optimizer; use one"
        )
    return inner


def masters(optimizer: Any) -> list[tuple[int, torch.Tensor]]:
    """Every tensor that is updated on this rank with the index of its parameter group, in a fixed order.

    Raises:
        UnsupportedEngineError: a wrapper with a layout that is not known here.
    """
    kind = type(optimizer)
    if kind is DeepSpeedZeroOptimizer_Stage3:
        return [
            (optimizer.sub_group_to_group_id[i], flat) for i, flat in enumerate(optimizer.fp32_partitioned_groups_flat)
        ]
    if kind is DeepSpeedZeroOptimizer:
        return list(enumerate(optimizer.single_partition_of_fp32_groups))
    if kind is BF16_Optimizer:
        return list(enumerate(optimizer.fp32_groups_flat_partition))
    if kind is FP16_Optimizer:
        return list(enumerate(optimizer.fp32_groups_flat))
    if kind is FP16_UnfusedOptimizer:
        return [(i, master) for i, group in enumerate(optimizer.fp32_groups) for master in group]
    if isinstance(optimizer, torch.optim.Optimizer):
        return [(i, parameter) for i, group in enumerate(optimizer.param_groups) for parameter in group["params"]]
    raise UnsupportedEngineError(
        f"DeepSpeed optimizer {kind.__module__}.{kind.__name__} keeps its master weights in a way CPSR does not know; "
        "use ZeRO 0 to 3 with fp32, bf16 or fp16"
    )


def master_slices(optimizer: Any) -> Iterator[MasterSlice]:
    """The slices this rank owns, in the optimizer's order; call `masters` first to refuse what is not known."""
    kind = type(optimizer)
    if kind is DeepSpeedZeroOptimizer_Stage3:
        return _stage3(optimizer)
    if kind is DeepSpeedZeroOptimizer:
        return _partitioned(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups)
    if kind is BF16_Optimizer:
        return _partitioned(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition)
    if kind is FP16_Optimizer:
        return _flattened(optimizer.fp16_groups, optimizer.fp32_groups_flat)
    if kind is FP16_UnfusedOptimizer:
        return _one_to_one(optimizer.fp16_groups, optimizer.fp32_groups)
    groups = [group["params"] for group in optimizer.param_groups]
    return _one_to_one(groups, groups)


def _one_to_one(groups: Any, master_groups: Any) -> Iterator[MasterSlice]:
    for parameters, group in zip(groups, master_groups, strict=True):
        for parameter, master in zip(parameters, group, strict=True):
            yield MasterSlice(parameter, master, 0, parameter.numel(), tuple(parameter.shape))


def _flattened(groups: Any, flats: Any) -> Iterator[MasterSlice]:
    for parameters, flat in zip(groups, flats, strict=True):
        start = 0
        for parameter in parameters:
            yield MasterSlice(parameter, flat, start, parameter.numel(), tuple(parameter.shape))
            start += parameter.numel()


def _partitioned(groups: Any, flats: Any) -> Iterator[MasterSlice]:
    for parameters, flat in zip(groups, flats, strict=True):
        for parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is None:  # wholly on other ranks
                continue
            here, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
            yield MasterSlice(parameter, flat, here.start, here.numel, tuple(parameter.shape), whole.start)


def _stage3(optimizer: Any) -> Iterator[MasterSlice]:
    for parameters in optimizer.fp16_groups:
        for parameter in parameters:
            group, start, padded = optimizer.grad_position[optimizer.get_param_id(parameter)]
            offset, numel = _owned_range(optimizer, parameter, padded)
            if numel:
                flat = optimizer.fp32_partitioned_groups_flat[group]
                yield MasterSlice(parameter, flat, start, numel, tuple(parameter.ds_shape), offset)


def _owned_range(optimizer: Any, parameter: Any, padded: int) -> tuple[int, int]:
    """Offset and number of the elements of a ZeRO-3 partition of `padded` elements that are not padding."""
    offset = optimizer._get_param_partition_rank(parameter) * padded
    return offset, max(0, min(padded, parameter.ds_numel - offset))


def owned_frozen(optimizer: Any, parameter: Any) -> torch.Tensor:
    """What this rank keeps of a parameter outside the optimizer: all of it, under ZeRO-3 its partition, flat."""
    if type(optimizer) is not DeepSpeedZeroOptimizer_Stage3:
        whole: torch.Tensor = parameter.detach()
        return whole
    partition: torch.Tensor = parameter.ds_tensor.detach().view(-1)
    return partition[: _owned_range(optimizer, parameter, partition.numel())[1]]


def frozen_place(optimizer: Any, parameter: Any) -> FrozenPlace | None:
    """Where that part lies under ZeRO-3, without its padding; None where the parameter is whole."""
    if type(optimizer) is not DeepSpeedZeroOptimizer_Stage3:
        return None
    offset, _ = _owned_range(optimizer, parameter, parameter.ds_tensor.numel())
    return FrozenPlace(tuple(parameter.ds_shape), min(offset, parameter.ds_numel))


@torch.no_grad()
def push_down(optimizer: Any) -> None:
    """Give the module the masters' new values; collective under ZeRO: every rank must call it.

    On a device the copies may still be queued: see `DeepSpeedAdapter.push_down`.
    """
    kind = type(optimizer)
    if kind is DeepSpeedZeroOptimizer_Stage3:
        _push_down_stage3(optimizer)
    elif kind in (DeepSpeedZeroOptimizer, BF16_Optimizer):
        optimizer.update_lp_params()
    elif kind is FP16_Optimizer:
        for piece in master_slices(optimizer):
            master = piece.master[piece.start : piece.start + piece.numel]
            piece.parameter.copy_(master.view(piece.global_shape))
    elif kind is FP16_UnfusedOptimizer:
        for piece in master_slices(optimizer):
            piece.parameter.copy_(piece.master)


def _push_down_stage3(optimizer: Any) -> None:
    # The order of DeepSpeed's own step: a parameter still gathered would keep its old values.
    optimizer._partition_all_parameters()
    for sub_group in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
    _gather_persistent(optimizer)


def advance_loss_scale(optimizer: Any) -> None:
    """Count an applied step where the loss scale does; the fused wrapper of bf16 has the counter, but leaves it."""
    if type(optimizer) is FP16_Optimizer and not optimizer.loss_scale_config.use_grad_scaling:
        return
    if hasattr(optimizer, "_update_scale"):
        optimizer._update_scale(False)


def settle_after_forward(optimizer: Any) -> None:
    """Under ZeRO-3, drop what a forward without a backward left gathered; collective.

    Nothing need wait for the device: the partitions are not written. DeepSpeed keeps gathered memory from being used
    again while a stream still reads it, and waits for gathers in flight.
    """
    if type(optimizer) is DeepSpeedZeroOptimizer_Stage3:
        optimizer._partition_all_parameters()
        _gather_persistent(optimizer)


def _gather_persistent(optimizer: Any) -> None:
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
