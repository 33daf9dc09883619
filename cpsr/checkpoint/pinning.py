"""Page-locked shared memory: a GPU copies into it without a staging buffer, and beside the training."""

import logging
from typing import Any

import torch

from cpsr.errors import SaveError

__all__ = ["Pinning"]

logger = logging.getLogger(__name__)

# Of CUDA's runtime: for the contexts of all devices, and what it answers about memory that is registered already.
_PORTABLE, _SUCCESS, _ALREADY_REGISTERED = 1, 0, 712


class Pinning:
    """Registers memory with CUDA, until `undo`.

    Memory must not be unmapped while it is registered: CUDA would go on to copy into the old pages, whatever lies at
    that address later.

    Args:
        memory: mapped by this process; registered by nobody else.
        device: whose copies go there; no other device is touched.

    Raises:
        SaveError: CUDA refuses.
    """

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self._memory: torch.Tensor | None = memory if memory.numel() else None
        self._device = device
        if self._memory is None:
            return
        with torch.cuda.device(device):
            status = self._register(memory)
            if status == _ALREADY_REGISTERED:
                # By somebody who unmapped it without a word: this mapping is new. Those pages are not these.
                _clear_error(device)
                if int(_runtime().cudaHostUnregister(memory.data_ptr())) == _SUCCESS:
                    status = self._register(memory)
            if status != _SUCCESS:
                self._memory = None
                _clear_error(device)
                raise SaveError(f"{memory.numel()} bytes of shared memory could not be pinned (CUDA error {status})")

    @staticmethod
    def _register(memory: torch.Tensor) -> int:
        return int(_runtime().cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE))

    def undo(self) -> None:
        """Unregister it, when no copy is under way; a second call has no effect."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        try:
            with torch.cuda.device(self._device):
                status = int(_runtime().cudaHostUnregister(memory.data_ptr()))
                if status != _SUCCESS:
                    _clear_error(self._device)
                    logger.warning("shared memory could not be unpinned (CUDA error %d)", status)
        except RuntimeError as error:  # after an error of a kernel every call fails
            logger.warning("shared memory could not be unpinned: %s", error)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's stub has no types


def _clear_error(device: torch.device) -> None:
    """Launch a kernel: CUDA keeps the error of a refused call, and torch raises it after the next launch.

    Torch has no call that only clears it. A second error is one of the device itself, and is raised. Where torch is to
    compute deterministically, the allocation launches a kernel as well.
    """
    try:
        torch.empty(1, device=device).fill_(0)
    except RuntimeError:
        torch.empty(1, device=device).fill_(0)
