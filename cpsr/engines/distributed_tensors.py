"""Parameters that ranks split: distributed tensors (`torch.distributed.tensor.DTensor`), and modules of FSDP2.

FSDP2 and tensor parallelism split parameters by a mesh of ranks and one placement for each of its dimensions.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cpsr.errors import UnsupportedEngineError
from cpsr.state.frozen_parameters import FrozenPlace

__all__ = [
    "FullySharded",
    "is_distributed",
    "layout_of",
    "local",
    "part_of",
    "split_as",
    "whole",
]

# Imported only where the caller has made one: it takes half a second.
_DISTRIBUTED = "torch.distributed.tensor"


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a `DTensor`, also as a parameter."""
    module = sys.modules.get(_DISTRIBUTED)
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, without a copy and without its graph: of a plain tensor all of it."""
    # As FSDP2 reads it itself: `to_local()` of a parameter makes a new parameter each time.
    distributed: Any = tensor
    held: torch.Tensor = distributed._local_tensor if is_distributed(tensor) else tensor
    return held.detach()


def whole(tensor: torch.Tensor) -> torch.Tensor | None:
    """The plain tensor with its graph, where this rank holds all of it; None where ranks hold parts or addends."""
    if not is_distributed(tensor):
        return tensor
    distributed: Any = tensor
    if not all(placement.is_replicate() for placement in distributed.placements):
        return None
    found: torch.Tensor = distributed.to_local()
    return found


def split_as(tensor: Any, held: torch.Tensor) -> torch.Tensor:
    """The distributed tensor that is split as another one, and of which this rank holds `held`, without a copy."""
    distributed = sys.modules[_DISTRIBUTED].DTensor
    made: torch.Tensor = distributed.from_local(
        held, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return made


def layout_of(tensor: Any) -> str:
    """How a distributed tensor is split, for people and to be compared: placements and the ranks of its mesh."""
    placements = ", ".join(map(str, tensor.placements))
    return f"{placements} over ranks {tensor.device_mesh.mesh.tolist()}"


def part_of(tensor: torch.Tensor, name: str) -> FrozenPlace:
    """Where the part of a tensor lies that this rank holds; of a plain one that is the whole.

    It is a block where some rank's part is no range of the flattened whole, so that all ranks describe it alike.

    Raises:
        UnsupportedEngineError: a distributed tensor whose ranks hold addends, or no blocks; `name` is in the message.
    """
    shape = tuple(tensor.shape)
    if not is_distributed(tensor):
        return FrozenPlace(shape)
    distributed: Any = tensor
    mesh, placements = distributed.device_mesh, distributed.placements
    if mesh.get_coordinate() is None:
        raise UnsupportedEngineError(
            f"{name} is split over ranks {mesh.mesh.tolist()}, and this rank is not one of them: every rank of the job "
            "must hold a part of what its module trains"
        )
    for placement in placements:
        strided = hasattr(placement, "split_factor")
        if not (placement.is_replicate() or (_follows(tensor, placement) if strided else placement.is_shard())):
            raise UnsupportedEngineError(
                f"{name} is placed as {placement} ({layout_of(tensor)}), so that this rank holds no block of it; use "
                "Shard and Replicate, as fully_shard and parallelize_module do"
            )
    # As torch's own checkpoints ask for it.
    size, start = sys.modules[f"{_DISTRIBUTED}._utils"].compute_local_shape_and_global_offset(shape, mesh, placements)
    if tuple(size) != tuple(local(tensor).shape):
        raise UnsupportedEngineError(
            f"{name} of shape {shape} is split in parts of sizes that CPSR does not know: this rank should hold "
            f"{tuple(size)} of it and holds {tuple(local(tensor).shape)} ({layout_of(tensor)}); split it with "
            "fully_shard, parallelize_module or distribute_tensor"
        )
    offset = sum(index * math.prod(shape[dimension + 1 :]) for dimension, index in enumerate(start))
    split = {one.dim % len(shape) for one, ranks in zip(placements, mesh.shape, strict=True) if _divides(one, ranks)}
    is_range = all(math.prod(shape[:dimension]) <= 1 for dimension in split)
    return FrozenPlace(shape, offset, None if is_range else tuple(size))


def _divides(placement: Any, ranks: int) -> bool:
    return ranks > 1 and not placement.is_replicate()


def _follows(tensor: Any, placement: Any) -> bool:
    """Whether a strided division is of the parts that all plain divisions of the same dimension make."""
    pairs: Sequence[tuple[Any, int]] = list(zip(tensor.placements, tensor.device_mesh.shape, strict=True))
    same = [(one, ranks) for one, ranks in pairs if getattr(one, "dim", None) == placement.dim]
    strided = [one for one, _ in same if hasattr(one, "split_factor")]
    made = math.prod(ranks for one, ranks in same if not hasattr(one, "split_factor"))
    return len(strided) == 1 and placement.split_factor == made


_CLASS = "FSDPModule"  # what fully_shard adds to the classes of a module; known by name, so that nothing is imported


class FullySharded:
    """What `fully_shard` made of a model: where its parameters are gathered, over which ranks, and in which dtype.

    Args:
        module: the model; it may contain none of these.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._modules: list[Any] = [
            one for one in module.modules() if any(base.__name__ == _CLASS for base in type(one).__mro__)
        ]

    @property
    def ranks(self) -> list[int] | None:
        """Ranks among which the batch is split; None without such submodules.

        Where submodules have different meshes, it is those that all of them have in common.
        """
        found: set[int] | None = None
        for group in self._groups():
            mesh = set(group.mesh_info.mesh.mesh.flatten().tolist())
            found = mesh if found is None else found & mesh
        return None if found is None else sorted(found)

    @property
    def device(self) -> torch.device | None:
        """Where forward and backward run, which with CPU offload is not where parameters lie; None without any."""
        for group in self._groups():
            device: torch.device = group.device
            return device
        return None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of forward and backward, where it is another than that of the parameters; else None."""
        for group in self._groups():
            dtype: torch.dtype | None = group.mp_policy.param_dtype
            return dtype
        return None

    @property
    def reduces(self) -> bool | None:
        """Whether the next backward reduces gradients; None without such submodules."""
        return next((bool(group.reduce_grads) for group in self._groups()), None)

    @reduces.setter
    def reduces(self, reduces: bool | None) -> None:
        for module in self._modules if reduces is not None else ():
            module.set_requires_gradient_sync(reduces, recurse=False)

    def reshard(self) -> None:
        """Let the next forward gather the parameters anew; the module then has the sharded ones again.

        A forward without gradients leaves gathered copies, which do not show what is written into the shards.
        """
        for module in self._modules:
            module.reshard()

    def _groups(self) -> Iterator[Any]:
        for module in self._modules:
            state = module._get_fsdp_state()
            # One group for each module before torch 2.12, of which there is no public view.
            groups = getattr(state, "_fsdp_param_groups", None)
            yield from groups if groups is not None else filter(None, [state._fsdp_param_group])
