"""A checkpoint of `torch.distributed.checkpoint` (DCP), which plain torch loads on any number of ranks.

Entries, with the names of `torch.distributed.checkpoint.state_dict`::

    model.<name>                      as in `module.state_dict()`
    optim.state.<parameter>.<key>     the optimizer's tensors and numbers
    optim.param_groups.<parameter>.<key>, and optim.param_groups.<number>.<key> with `params`
    cpsr                              iteration, counters, schedule, scalers

The groups are there in both forms, so that a job may load with or without `flatten_optimizer_state_dict`. torch writes
`.metadata` and what is no tensor as pickles; they hold plain data alone.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from cpsr.checkpoint.files import sync_directory, sync_file
from cpsr.checkpoint.verify import DamagedFileError
from cpsr.engines.optimizer_entry import number_of
from cpsr.errors import UnsupportedEngineError
from cpsr.export.whole_checkpoint import WholeState, state_dict

__all__ = ["write_dcp"]

SMALL = "cpsr"  # key of counters, schedule and scalers
_KEPT = "Nothing was exported; universal or a state dict in safetensors is possible"


def write_dcp(state: WholeState, directory: Path) -> list[str]:
    """Write the checkpoint into an empty directory, forced to the disk. Takes host memory for all weights and moments.

    Args:
        state: the checkpoint, opened with its moments.
        directory: where; exists and is empty. Put in place by the caller.

    Returns:
        What was written, one line each.

    Raises:
        UnsupportedEngineError: a run of DeepSpeed, or state that is nested.
        CheckpointCorruptError: see `WholeState`.
        OSError: the file system refused.
    """
    if state.identity.engine != "torch":
        raise UnsupportedEngineError(
            f"a run of {state.identity.engine} has no torch optimizer that DCP could load into. {_KEPT}"
        )
    engine = state.scalars().get("engine")
    if not isinstance(engine, dict) or "optimizer_state" not in engine:
        raise DamagedFileError(state.saved.directory, "its scalars lack the engine's optimizer_state")
    members, numbers = _members(engine), _numbers(state, engine)
    optim: dict[str, Any] = {}
    for name in state.parameters:
        moments: dict[str, Any] = {key: state.moment(name, key) for key in state.moments(name)}
        optim |= {f"state.{name}.{key}": one for key, one in {**moments, **numbers[name]}.items()}
    for index, (group, names) in enumerate(zip(engine["param_groups"], members, strict=True)):
        values = {key: value for key, value in group.items() if key != "params"}
        optim |= {f"param_groups.{name}.{key}": value for name in names for key, value in values.items()}
        optim |= {f"param_groups.{index}.{key}": value for key, value in {**values, "params": list(names)}.items()}
    model = state_dict(state, "trained")
    small = {key: engine.get(key) for key in ("counters", "loss_scale", "grad_scaler")}
    schedules = engine.get("schedule") or [None]
    small["schedule"] = schedules[0] if len(schedules) == 1 else schedules  # a job with one asks for it by itself
    content = {"model": model, "optim": optim, SMALL: {"iteration": state.saved.iteration, **small}}
    save(content, storage_writer=FileSystemWriter(directory), no_dist=True)
    for path in directory.iterdir():
        sync_file(path)
    sync_directory(directory)
    return [
        f"{len(model)} tensors of the model, {len(state.parameters)} parameters with optimizer state, {len(members)} "
        "parameter groups, schedule and counters",
        "load it with torch.distributed.checkpoint into what get_model_state_dict and get_optimizer_state_dict return",
    ]


def _members(engine: Mapping[str, Any]) -> list[list[str]]:
    """Names of the parameters in each group of all optimizers, in their order."""
    following = iter(engine["optimizer_state"]["names"])
    sizes = [size for one in engine["optimizer_state"]["groups"] for size in one]
    return [[next(following) for _ in range(size)] for size in sizes]


def _numbers(state: WholeState, engine: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each parameter, what its state holds beside tensors of its shape."""
    saved, counts = engine["optimizer_state"], engine["optimizer_steps"]
    found: dict[str, dict[str, Any]] = {}
    for index, name in enumerate(saved["names"]):
        form = json.loads(saved["forms"][saved["of"][index]])
        if form is None:
            continue
        if str(index) in saved["rest"]:
            raise UnsupportedEngineError(f"{state.identity.optimizer} has changed what it keeps for {name}. {_KEPT}")
        if form[0] != "dict" or any(one[0] not in ("tensor", "scalar", "int", "float") for _, one in form[2]):
            raise UnsupportedEngineError(f"{state.identity.optimizer} keeps nested state for {name}. {_KEPT}")
        found[name] = {
            key: number_of(one, counts[index][key], torch.device("cpu")) for key, one in form[2] if one[0] != "tensor"
        }
    if absent := [name for name in state.parameters if name not in found]:
        raise UnsupportedEngineError(f"the optimizer has no state for {absent[0]}: it took no step with it. {_KEPT}")
    return found
