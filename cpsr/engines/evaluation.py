"""Calling a module for its loss without a trace in the training state; the random states of a rank."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.distributed_tensors import whole
from cpsr.errors import UnsupportedEngineError
from cpsr.state.small_state import capture_rng, restore_rng

__all__ = [
    "capture_random_states",
    "loss_of",
    "preserved_training_state",
    "required_loss",
    "restore_random_states",
]


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss in what a module returned, None if there is none.

    Recognised: a tensor without dimensions; an object with `.loss`, or a dict with `loss`, of one element; a tuple or
    list that starts with one of these. A tensor of shape (1,) or (1, 1) is the output for a batch of one. A distributed
    tensor is a loss where every rank has the value.
    """
    if isinstance(output, tuple | list) and not hasattr(output, "loss"):
        output = output[0] if output else None
    named = not isinstance(output, torch.Tensor)
    if isinstance(output, dict):
        output = output.get("loss")
    elif named:
        output = getattr(output, "loss", None)
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return None
    if output.dim() != 0 and not (named and output.numel() == 1):
        return None
    return output if type(output) is torch.Tensor else whole(output)


def required_loss(output: Any, module: torch.nn.Module) -> torch.Tensor:
    """The loss in what a module returned in evaluation mode, detached.

    Raises:
        UnsupportedEngineError: there is none.
    """
    loss = loss_of(output)
    if loss is None:
        raise UnsupportedEngineError(
            f"{type(module).__name__} returned no loss in evaluation mode; return a scalar tensor or an object with "
            ".loss"
        )
    return loss.detach()


@contextmanager
def preserved_training_state(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; modes, buffers and random states are as before on exit.

    Modes are kept per submodule, since a user may hold some of them in evaluation mode while training.
    """
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    buffers = [
        (submodule, name, buffer, buffer._version, buffer.detach().clone())
        for submodule in module.modules()
        for name, buffer in submodule._buffers.items()
        if buffer is not None
    ]
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    # Of the module's devices only: reading another's state would start a context on it.
    devices = sorted({parameter.device.index for parameter in module.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        module.eval()
        try:
            yield
        finally:
            for submodule, training in modes:
                submodule.training = training
            for submodule, name, buffer, version, copy in buffers:
                if buffer._version != version:
                    buffer.copy_(copy)
                submodule._buffers[name] = buffer
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


def capture_random_states(adapter: EngineAdapter) -> dict[str, Any]:
    """The states as plain data: those of `capture_rng`, and under `engine` the engine's own if it keeps any."""
    state = capture_rng(adapter.device)
    own = adapter.random_states()
    return {**state, "engine": own} if own else state


def restore_random_states(adapter: EngineAdapter, state: dict[str, Any]) -> str | None:
    """Restore what `capture_random_states` returned.

    Returns:
        What could not be restored, for people; None if all was.
    """
    notes = [restore_rng(state, adapter.device), adapter.load_random_states(state.get("engine", {}))]
    return "; ".join(note for note in notes if note is not None) or None
