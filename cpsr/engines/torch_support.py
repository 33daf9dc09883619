"""Which plain torch set-ups CPSR refuses, each by name."""

import itertools
from collections.abc import Sequence

import torch

from cpsr.engines.state_tree import flat_view
from cpsr.errors import UnsupportedEngineError

__all__ = ["require_supported", "unwrapped"]


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DistributedDataParallel, or the module itself."""
    inner = getattr(module, "_orig_mod", module)  # torch.compile around DDP
    return inner.module if isinstance(inner, torch.nn.parallel.DistributedDataParallel) else module


def require_supported(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]
) -> None:
    """Check that the parameters are whole, apart in memory, all in the module and each in one optimizer.

    Raises:
        UnsupportedEngineError: they are not; the message names the culprit.
    """
    for submodule in module.modules():
        if "FullyShardedDataParallel" in type(submodule).__name__ or "FSDPModule" in [
            base.__name__ for base in type(submodule).__mro__
        ]:
            raise UnsupportedEngineError(
                f"{type(submodule).__name__} splits parameters over ranks out of sight; use DistributedDataParallel, "
                "or DeepSpeed's ZeRO-3 for sharded parameters"
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


def _require_no_overlap(module: torch.nn.Module, names: dict[int, str]) -> None:
    ranges = []
    for parameter in module.parameters():
        flat_view(parameter, names[id(parameter)])
        start = parameter.data_ptr()
        ranges.append((start, start + parameter.numel() * parameter.element_size(), names[id(parameter)]))
    ranges = sorted(entry for entry in ranges if entry[1] > entry[0])
    for (_, end, first), (start, _, second) in itertools.pairwise(ranges):
        if start < end:
            raise UnsupportedEngineError(
                f"parameters {first} and {second} are different tensors in the same memory; tie weights by using one "
                "Parameter object in both places"
            )
