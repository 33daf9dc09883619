"""Parameters that ranks split: distributed tensors (`torch.distributed.tensor.DTensor`), and modules of FSDP2.

FSDP2 and tensor parallelism split parameters by a mesh of ranks and one placement for each of its dimensions.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from cpsr.errors import UnsupportedEngineError

__all__ = [
    "FullySharded",
    "Part",
    "is_distributed",
    "layout_of",
    "local",
    "part_of",
    "split_as",
    "whole",
]

# Imported only where the caller has made one: it takes half a second.
_DISTRIBUTED = "torch.distributed.tensor"


@dataclass(frozen=True)
class Part:
    """A block of a whole tensor.

    Attributes:
        global_shape: of the whole.
        start: index of its first element in each dimension.
        shape: of the block; a dimension is 0 where this rank holds nothing.
        is_range: whether every rank's block is a range of the flattened whole.
    """

    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    is_range: bool = True

    @property
    def numel(self) -> int:
        """Elements of the block."""
        return math.prod(self.shape)

    @cached_property
    def offset(self) -> int:
        """Index of its first element in the flattened whole."""
        strides = [math.prod(self.global_shape[dimension + 1 :]) for dimension in range(len(self.global_shape))]
        return sum(index * stride for index, stride in zip(self.start, strides, strict=True))

    @property
    def block(self) -> tuple[int, ...] | None:
        """Its shape, where it is no range of the flattened whole; else None."""
        return None if self.is_range else self.shape


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


def part_of(tensor: torch.Tensor, name: str) -> Part:
    """Which part of a tensor this rank holds; all of a plain one.

    Raises:
        UnsupportedEngineError: a distributed tensor whose ranks hold addends, or no blocks; `name` is in the message.
    """
    shape = tuple(tensor.shape)
    if not is_distributed(tensor):
        return Part(shape, (0,) * len(shape), shape)
    distributed: Any = tensor
    splits = _splits(distributed, name)
    start, size = [0] * len(shape), list(shape)
    for dimension, ranks, place in splits:
        share = -(-size[dimension] // ranks)  # as torch.chunk divides
        begin = min(share * place, size[dimension])
        start[dimension] += begin
        size[dimension] = min(share, size[dimension] - begin)
    if tuple(size) != tuple(local(tensor).shape):
        raise UnsupportedEngineError(
            f"{name} of shape {shape} is split in parts of sizes that CPSR does not know: this rank should hold "
            f"{tuple(size)} of it and holds {tuple(local(tensor).shape)} ({layout_of(tensor)}); split it with "
            "fully_shard, parallelize_module or distribute_tensor"
        )
    split = {dimension for dimension, ranks, _ in splits if ranks > 1}
    return Part(shape, tuple(start), tuple(size), all(math.prod(shape[:dimension]) <= 1 for dimension in split))


def _splits(tensor: Any, name: str) -> list[tuple[int, int, int]]:
    """Divisions of a dimension one after the other: which one, in how many parts, and the number of this rank's."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedEngineError(
            f"{name} is split over ranks {tensor.device_mesh.mesh.tolist()}, and this rank is not one of them: every "
            "rank of the job must hold a part of what its module trains"
        )
    plain: list[tuple[int, int, int]] = []
    strided: list[tuple[int, int, int]] = []
    for placement, ranks, place in zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True):
        if placement.is_replicate():
            continue
        if placement.is_shard() and not hasattr(placement, "split_factor"):
            plain.append((placement.dim % tensor.ndim, ranks, place))
        elif hasattr(placement, "split_factor") and _follows(tensor, placement):
            # What FSDP2 makes of a parameter that tensor parallelism has split already: a part of that part.
            strided.append((placement.dim % tensor.ndim, ranks, place))
        else:
            raise UnsupportedEngineError(
                f"{name} is placed as {placement} ({layout_of(tensor)}), so that this rank holds no block of it; use "
                "Shard and Replicate, as fully_shard and parallelize_module do"
            )
    return plain + strided


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
