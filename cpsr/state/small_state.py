"""A copy of the small state, of which a CUDA device may still have to send a part."""

import copy
from typing import Any

import torch

from cpsr.errors import UnsupportedEngineError
from cpsr.state.arrival import Deadline
from cpsr.state.codec import decode, encode
from cpsr.state.device_values import DeviceNumber, DeviceValues

__all__ = ["SmallState", "host_copy"]

_UNCHANGING = (int, float, str, bytes, type(None), DeviceNumber)


class SmallState:
    """A copy of plain data; what lies on a CUDA device follows in the order of the current stream.

    Args:
        tree: see `cpsr.state.codec.encode`; also `DeviceNumber`s.

    Raises:
        UnsupportedEngineError: an object that is not plain data; the message names it.
    """

    def __init__(self, tree: Any) -> None:
        self._later = DeviceValues()
        self._data, self._tensors = encode(tree, later=self._later)
        self._later.send()

    @property
    def encoded(self) -> tuple[Any, dict[str, torch.Tensor]] | None:
        """The encoded tree, for reading; None where a device has a part of it."""
        return None if self._later else (self._data, self._tensors)

    @property
    def here(self) -> bool:
        """Whether it is complete; does not wait."""
        return self._later.here

    def wait(self, deadline: Deadline | None = None) -> None:
        """Wait for what the device sends.

        Raises:
            SaveError: it hangs, and the deadline has passed.
        """
        self._later.wait(deadline)

    def tree(self) -> Any:
        """The plain data, with numbers and host tensors in the place of those on a device; once it is here."""
        return decode(self._data, self._tensors, self._later.values())


def host_copy(tree: Any) -> Any:
    """A copy of plain data as it is now; of a `DeviceNumber` the reference.

    Raises:
        UnsupportedEngineError: a tensor of a device, which would have to be copied there.
    """
    if isinstance(tree, dict):
        return {key: host_copy(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(host_copy, tree))
    if isinstance(tree, _UNCHANGING):
        return tree
    if isinstance(tree, torch.Tensor) and tree.device.type != "cpu":
        raise UnsupportedEngineError(f"the small state has a tensor on {tree.device}")
    return copy.deepcopy(tree)
