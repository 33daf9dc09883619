"""Which plain torch set-ups, and which objects of other packages, CPSR refuses, each by name."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from cpsr.engines.distributed_tensors import FullySharded, is_distributed, layout_of, local
from cpsr.engines.optimizer_entry import flat_view
from cpsr.errors import UnsupportedEngineError
from cpsr.state.frozen_parameters import FrozenPlace
from cpsr.state.loader_kinds import is_a

__all__ = [
    "FSDP1",
    "data_parallel_ranks",
    "named",
    "refuse_known",
    "require_parts",
    "require_supported",
    "require_whole_experts",
    "unwrapped",
    "wrapper_of",
]

ACCELERATE = (
    "is accelerate's: pass engine_of(accelerator, model, optimizer, scheduler) of cpsr.integrations.accelerate to "
    "CPSRRecovery, and iterate over resume(recovery, loader) of that module"
)
FABRIC = "is Lightning Fabric's: take engine_of and Passes of cpsr.integrations.fabric"
ENGINE = "is a DeepSpeed engine: pass it to CPSRRecovery itself, and neither wrap nor register it"
DEEPSPEED = "belongs to a DeepSpeed engine: pass the engine to CPSRRecovery itself, and neither wrap nor register it"
FSDP1 = (
    "is sharded by FSDP1, which torch has replaced and whose flat parameters CPSR does not read: call "
    "torch.distributed.fsdp.fully_shard (FSDP2) on the model in its place, build the optimizer after that, and pass "
    "TorchAdapter(model, optimizer); under accelerate and the Trainer of transformers choose FSDP version 2"
)
# Package, class, and the reason to refuse it.
KNOWN = (
    ("accelerate", "Accelerator", ACCELERATE),
    ("accelerate", "AcceleratedOptimizer", ACCELERATE),
    ("accelerate", "DataLoaderShard", ACCELERATE),
    ("accelerate", "DataLoaderDispatcher", ACCELERATE),
    ("accelerate", "SkipDataLoader", ACCELERATE),
    ("accelerate", "DeepSpeedEngineWrapper", "is accelerate's: pass its attribute engine"),
    ("deepspeed", "DeepSpeedEngine", ENGINE),
    ("deepspeed", "DeepSpeedOptimizer", DEEPSPEED),
    ("transformers", "Trainer", "runs its own loop: add CPSRCallback of cpsr.integrations.transformers to it"),
    ("lightning.pytorch", "Trainer", "runs its own loop: add CPSRCallback of cpsr.integrations.lightning to it"),
    ("pytorch_lightning", "Trainer", "runs its own loop: add CPSRCallback of cpsr.integrations.lightning to it"),
    *(
        (package, name, FABRIC)
        for package in ("lightning", "lightning_fabric")
        for name in ("Fabric", "_FabricModule", "_FabricOptimizer", "_FabricDataLoader")
    ),
    ("torch", "FullyShardedDataParallel", FSDP1),
    (
        "torch",
        "_BaseDataLoaderIter",
        "is an iterator, which has drawn the order of its pass already, and a restart could not draw it again: pass "
        "the DataLoader itself",
    ),
)


def refuse_known(given: Any, of: str | None = None) -> None:
    """Refuse objects of other packages, whatever they are given as.

    Args:
        given: by the user.
        of: the only package that is meant; None: all.

    Raises:
        UnsupportedEngineError: the message names what was given and what to pass instead.
    """
    for package, name, reason in KNOWN:
        if of in (None, package) and is_a(given, package, name):
            raise UnsupportedEngineError(f"this {type(given).__name__} {reason}")


def require_parts(module: Any, optimizers: Sequence[Any], schedulers: Sequence[Any], scaler: Any) -> None:
    """Refuse what cannot be the parts of a plain torch loop.

    Raises:
        UnsupportedEngineError: the message names what was given and what to pass instead.
    """
    for part in (module, *optimizers):
        refuse_known(part)
    if not isinstance(module, torch.nn.Module):
        raise UnsupportedEngineError(
            f"TorchAdapter takes the model first, and this is {named(module)}: pass the torch.nn.Module that the loop "
            "calls"
        )
    wrong = [one for one in optimizers if not isinstance(one, torch.optim.Optimizer)]
    if wrong or not optimizers:
        raise UnsupportedEngineError(
            f"{named(wrong[0]) if wrong else 'an empty list'} is no torch optimizer: pass a torch.optim.Optimizer "
            "over the model's parameters, or a list of them"
        )
    for name, given in (("optimizers", optimizers), ("schedulers", schedulers)):
        if len({id(one) for one in given}) < len(given):
            raise UnsupportedEngineError(f"one object is given twice among the {name}: give each once")
    for name, part in (*(("scheduler", one) for one in schedulers), ("grad_scaler", scaler)):
        if isinstance(part, type | bool):
            raise UnsupportedEngineError(f"{name} is {named(part)}: pass the {name} object that the loop uses")


def named(given: Any) -> str:
    """What it is, for messages."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return "None" if given is None else f"an object of {type(given).__name__}"


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DistributedDataParallel, or the module itself."""
    wrapper = wrapper_of(module)
    return module if wrapper is None else wrapper.module


def wrapper_of(module: torch.nn.Module) -> torch.nn.parallel.DistributedDataParallel | None:
    """The DistributedDataParallel that a loop calls; None where it calls another module."""
    inner = getattr(module, "_orig_mod", module)  # torch.compile around DDP
    return inner if isinstance(inner, torch.nn.parallel.DistributedDataParallel) else None


def data_parallel_ranks(
    module: torch.nn.Module, parameters: Iterable[torch.Tensor], fully_sharded: FullySharded
) -> list[int]:
    """Ranks among which the batch is split; see `TorchAdapter.data_parallel_ranks`.

    Args:
        module: as it is called, wrapped or not.
        parameters: all of the module.
        fully_sharded: its submodules of FSDP2.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [0]
    if fully_sharded.ranks is not None:
        return fully_sharded.ranks
    if not any(map(is_distributed, parameters)):
        return list(range(torch.distributed.get_world_size()))
    wrapper = wrapper_of(module)
    if wrapper is None:
        return [torch.distributed.get_rank()]
    return torch.distributed.get_process_group_ranks(wrapper.process_group)


def require_supported(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]
) -> None:
    """Check that the parameters are blocks of memory, apart, all in the module and each in one optimizer.

    Raises:
        UnsupportedEngineError: they are not; the message names the culprit.
    """
    for submodule in module.modules():
        if "FullyShardedDataParallel" in type(submodule).__name__:
            raise UnsupportedEngineError(f"this {type(submodule).__name__} {FSDP1}")
    for name, buffer in module.named_buffers():
        if is_distributed(buffer) and local(buffer).shape != buffer.shape:
            raise UnsupportedEngineError(
                f"buffer {name} of shape {tuple(buffer.shape)} is split over ranks ({layout_of(buffer)}), and CPSR "
                "takes only parameters that are split; keep it whole on every rank"
            )
    owners: dict[int, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                _require_own(module, optimizer, index, parameter, names, owners)
        if not any(group["params"] for group in optimizer.param_groups):
            raise UnsupportedEngineError(
                f"the optimizer {type(optimizer).__name__} has no parameters: there is nothing to train"
            )
    _require_no_overlap(module, names)


def _require_own(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    index: int,
    parameter: torch.Tensor,
    names: dict[int, str],
    owners: dict[int, torch.optim.Optimizer],
) -> None:
    if id(parameter) not in names:
        raise UnsupportedEngineError(
            f"parameter group {index} of the optimizer has a parameter of shape {tuple(parameter.shape)} that "
            f"is not in {type(module).__name__}; make it a parameter of the module"
        )
    owner = owners.setdefault(id(parameter), optimizer)
    if owner is not optimizer:
        raise UnsupportedEngineError(
            f"{names[id(parameter)]} is in two optimizers, {type(owner).__name__} and {type(optimizer).__name__}; give "
            "each parameter to one of them"
        )


def require_whole_experts(places: Mapping[int, FrozenPlace], names: dict[int, str]) -> None:
    """Check that no parameter of a mixture of experts is split in blocks that are no ranges.

    Raises:
        UnsupportedEngineError: one is; the message names it.
    """
    if blocks := [names[key] for key, place in places.items() if place.block is not None]:
        raise UnsupportedEngineError(
            f"{blocks[0]} is split in blocks over ranks, and checkpoints of single experts hold rows of their "
            "parameters; split it by its first dimension, or do not pass experts= to TorchAdapter"
        )


def _require_no_overlap(module: torch.nn.Module, names: dict[int, str]) -> None:
    ranges = []
    for parameter in module.parameters():
        held, name = local(parameter), names[id(parameter)]
        flat_view(parameter, name)
        if is_distributed(parameter) and not held.is_contiguous():
            raise UnsupportedEngineError(
                f"this rank's part of {name}, of shape {tuple(held.shape)}, has strides {held.stride()}: it is not "
                "laid out row by row, so that its place in the whole would not be known; make it contiguous"
            )
        start = held.data_ptr()
        ranges.append((start, start + held.numel() * held.element_size(), name))
    ranges = sorted(entry for entry in ranges if entry[1] > entry[0])
    for (_, end, first), (start, _, second) in itertools.pairwise(ranges):
        if start < end:
            raise UnsupportedEngineError(
                f"parameters {first} and {second} are different tensors in the same memory; tie weights by using one "
                "Parameter object in both places"
            )
