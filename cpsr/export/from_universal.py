"""Reads a DeepSpeed universal checkpoint: written by `ds_to_universal`, or by `cpsr export`."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cpsr.errors import CheckpointError, UnsupportedEngineError
from cpsr.export.deepspeed_files import (
    checkpoint_folder,
    grouped,
    load_deepspeed,
    loss_scale,
    model_states,
    small_part,
    split_entry,
)
from cpsr.export.foreign import ForeignParameter, ForeignState

__all__ = ["read_universal"]

_WEIGHTS = "fp32.pt"
_NOT = "Nothing was written"


def read_universal(source: Path) -> ForeignState:
    """The state in a universal checkpoint; its tensors are mapped from the files.

    Args:
        source: the folder of the checkpoint, or the one above with `latest_universal`.

    Raises:
        CheckpointError: it is not whole, or a file cannot be read as tensors and plain data.
        UnsupportedEngineError: it holds what cannot be imported; the message names it.
    """
    folder = checkpoint_folder(source, "latest_universal")
    if not (folder / "zero").is_dir():
        raise CheckpointError(f"{folder} holds no folder 'zero': it is no universal checkpoint. {_NOT}")
    states = model_states(folder)[0]
    optimizer = load_deepspeed(folder / "zero" / "optimizer_state.pt")
    shapes: dict[str, Any] = {name: shape for one in states.get("param_shapes") or () for name, shape in one.items()}
    parameters = {
        path.name: _parameter(path, shapes.get(path.name), optimizer)
        for path in sorted((folder / "zero").iterdir())
        if path.is_dir() and any(one.name not in (_WEIGHTS, "step.pt") for one in path.glob("*.pt"))
    }
    if absent := sorted(shapes.keys() - parameters.keys()):
        raise UnsupportedEngineError(
            f"{folder} holds no optimizer state for {absent[0]}, which the optimizer has but never moved. {_NOT}; "
            "freeze it, or train one step in which it has a gradient"
        )
    return ForeignState(
        parameters=parameters,
        loss_scale=states.get("loss_scale") or loss_scale(optimizer),
        **small_part(states, parameters.keys()),
        **grouped(states.get("param_shapes"), optimizer["param_groups"]),
    )


def _parameter(path: Path, shape: Any, optimizer: Mapping[str, Any]) -> ForeignParameter:
    found = {one.stem: _value(one) for one in sorted(path.glob("*.pt"))}
    if "fp32" not in found:
        raise CheckpointError(f"{path} lacks {_WEIGHTS}: the checkpoint is not whole. {_NOT}")
    weights = found.pop("fp32")
    shape = tuple(weights.shape if shape is None else shape)
    moments, numbers = split_entry({**_common_numbers(optimizer), **found})
    for name, values in {"fp32": weights, **moments}.items():
        if values.numel() != math.prod(shape):
            raise CheckpointError(f"{path / name}.pt has {values.numel()} elements, the shape is {shape}. {_NOT}")
    return ForeignParameter(weights.reshape(shape), moments, numbers)


def _common_numbers(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """At ZeRO-3 the step count is with the optimizer, once for all of each flat tensor."""
    states = list((optimizer.get("optimizer_state_dict") or {}).get("state", {}).values())
    steps = [state["step"] for state in states if "step" in state]
    if steps and any(float(step) != float(steps[0]) for step in steps):
        raise UnsupportedEngineError(f"parameters have taken different numbers of steps. {_NOT}")
    return {"step": steps[0]} if steps else {}


def _value(path: Path) -> Any:
    found = load_deepspeed(path)
    if isinstance(found, dict):
        found = found.get("param")
    if not isinstance(found, torch.Tensor | int | float):
        raise CheckpointError(f"{path} holds no tensor. {_NOT}")
    return found
