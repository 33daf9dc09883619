"""Copies of buffers at the last step boundary: a forward changes buffers, and an emergency dump needs whole steps."""

from collections.abc import Mapping

import torch

from cpsr.errors import SaveError

__all__ = ["BoundaryBuffers"]

# Running statistics and counters are copied at every boundary: torch changes them without a new version. Larger ones
# (attention masks, frozen weights) are copied when their version has changed.
SMALL_BYTES = 1 << 16


class BoundaryBuffers:
    """Copies of the buffers outside the optimizer, as they were at the last step boundary.

    Args:
        others: the engine's own tensors by name, which are changed in place.
    """

    def __init__(self, others: Mapping[str, torch.Tensor]) -> None:
        self._others = dict(others)
        small = [name for name, tensor in others.items() if tensor.numel() * tensor.element_size() <= SMALL_BYTES]
        self._small = {name: (others[name].detach(), others[name].detach().clone()) for name in small}
        self._large = {name: tensor for name, tensor in others.items() if name not in self._small}
        self._versions = {name: _version(tensor) for name, tensor in self._large.items()}
        self._copies: dict[str, torch.Tensor] = {}

    def keep(self) -> None:
        """Copy at a step boundary: one call for all small buffers, and one version check for each large one."""
        with torch.no_grad():
            if self._small:
                sources, copies = zip(*self._small.values(), strict=True)
                torch._foreach_copy_(list(copies), list(sources))
            for name, tensor in self._large.items():
                version = _version(tensor)
                if version == self._versions[name]:
                    continue
                self._versions[name] = version
                if name in self._copies:
                    self._copies[name].copy_(tensor, non_blocking=True)
                else:
                    self._copies[name] = tensor.detach().clone()

    def at_boundary(self, others: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The values that these tensors had at the last boundary.

        Raises:
            SaveError: a tensor was replaced, or a large one has changed for the first time and has no copy.
        """
        return {name: self._value(name, tensor) for name, tensor in others.items()}

    def _value(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        known = self._others.get(name)
        if known is None or known.data_ptr() != tensor.data_ptr():  # a frozen parameter is a new view every time
            raise SaveError(f"the buffer '{name}' was replaced since the start of this life")
        if name in self._small:
            return self._small[name][1]
        if _version(tensor) == self._versions[name]:
            return tensor
        if name not in self._copies:
            raise SaveError(f"the buffer '{name}' has changed in the step that was interrupted, for the first time")
        return self._copies[name]


def _version(tensor: torch.Tensor) -> int:
    """Torch's count of changes in place; 0 for a tensor made in inference mode, which has none."""
    return 0 if tensor.is_inference() else tensor._version
