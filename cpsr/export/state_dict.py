"""A plain state dict in one safetensors file: for `module.load_state_dict(load_file(...), strict=True)`."""

from pathlib import Path
from typing import Literal

import torch

from cpsr.checkpoint.files import sync_directory, write_tensors
from cpsr.export.whole import WholeState

__all__ = ["Precision", "state_dict", "write_state_dict"]

Precision = Literal["fp32", "trained"]

_TRAINED = {"bf16": torch.bfloat16, "fp16": torch.float16}
_METADATA = {"format": "pt"}  # what readers of model files look for


def state_dict(state: WholeState, precision: Precision) -> dict[str, torch.Tensor]:
    """Every tensor of the module's own state dict, by the module's own names.

    Args:
        state: the checkpoint.
        precision: `fp32` widens every narrower floating-point tensor and narrows none; `trained` is what the module
            had while it trained.

    Returns:
        Contiguous tensors that share no memory; tied ones are there under each of their names.

    Raises:
        CheckpointCorruptError, UnsupportedEngineError: see `WholeState`.
    """
    module = state.identity.module
    narrow = None if state.identity.engine == "torch" else _TRAINED.get(state.identity.precision)
    found = {}
    for name in state.parameters:
        weights = state.weights(name)
        found[name] = weights.to(narrow) if precision == "trained" and narrow is not None else weights
    if state.info.full:
        found |= {name: tensor for name, tensor in state.outside().items() if name not in module.transient}
    if precision == "fp32":
        found = {name: _widened(tensor) for name, tensor in found.items()}
    return found | {alias: found[name].clone() for alias, name in module.aliases.items() if name in found}


def write_state_dict(state: WholeState, path: Path, precision: Precision) -> list[str]:
    """Write the file: under a temporary name, read back, then renamed. Takes host memory for all weights.

    Args:
        state: the checkpoint.
        path: the file, not there yet; its directory exists.
        precision: see `state_dict`.

    Returns:
        What was written and what was not, one line each.

    Raises:
        SaveError: the file system refused, or what was read back differs; nothing is left at `path`.
        CheckpointCorruptError, UnsupportedEngineError: see `WholeState`.
    """
    tensors = state_dict(state, precision)
    write_tensors(path, tensors, metadata=_METADATA)
    sync_directory(path.parent)
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    lines = [f"{len(tensors)} tensors of the state dict ({', '.join(kinds)})"]
    if state.identity.module.extra:
        lines.append(f"without the module's extra state, which is not saved: {', '.join(state.identity.module.extra)}")
    return lines


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < torch.float32.itemsize else tensor
