"""Buffers at the last step boundary: a forward changes them, and a state that is left must not be half of a step."""

from collections.abc import Mapping

import torch

from cpsr.errors import SaveError

__all__ = ["BoundaryBuffers"]


class BoundaryBuffers:
    """Copies of those buffers outside the optimizer that change at all; attention masks and the like never do.

    Args:
        others: the engine's own tensors by name, which are changed in place.
    """

    def __init__(self, others: Mapping[str, torch.Tensor]) -> None:
        self._others = dict(others)
        self._versions = {name: _version(tensor) for name, tensor in others.items()}
        self._copies: dict[str, torch.Tensor] = {}

    def keep(self) -> None:
        """This is a step boundary; costs a look at a counter for each buffer, and a copy of each that has changed."""
        for name, tensor in self._others.items():
            version = _version(tensor)
            if version == self._versions[name]:
                continue
            self._versions[name] = version
            with torch.no_grad():
                if name in self._copies:
                    self._copies[name].copy_(tensor, non_blocking=True)
                else:
                    self._copies[name] = tensor.detach().clone()

    def at_boundary(self, others: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The values that these tensors had at the last boundary.

        Raises:
            SaveError: one has changed since for the first time, or was replaced: its value then is not known.
        """
        return {name: self._value(name, tensor) for name, tensor in others.items()}

    def _value(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        known = self._others.get(name)
        if known is None or known.data_ptr() != tensor.data_ptr():  # a frozen parameter is a new view every time
            raise SaveError(f"the buffer '{name}' was replaced since the start of this life")
        if _version(tensor) == self._versions[name]:
            return tensor
        if name not in self._copies:
            raise SaveError(f"the buffer '{name}' has changed in the step that was interrupted, for the first time")
        return self._copies[name]


def _version(tensor: torch.Tensor) -> int:
    """Counts changes in place; those of a tensor made in inference mode are not counted, and it has none."""
    return 0 if tensor.is_inference() else tensor._version
