"""The submodules of a model on which `fully_shard` (FSDP2) was called."""

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["FullySharded"]

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
