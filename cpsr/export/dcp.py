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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from cpsr.checkpoint.files import sync_directory, sync_file
from cpsr.checkpoint.verify import DamagedFileError
from cpsr.engines.state_tree import number_of
from cpsr.errors import UnsupportedEngineError
from cpsr.export.whole import WholeState, state_dict
from cpsr.state.codec import same

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
        UnsupportedEngineError: state that is nested, or groups of which the parameters are not known.
        CheckpointCorruptError: see `WholeState`.
        OSError: the file system refused.
    """
    engine = state.scalars().get("engine")
    if not isinstance(engine, dict) or "optimizer_state" not in engine:
        raise DamagedFileError(state.info.directory, "its scalars lack the engine's optimizer_state")
    members = _members(state, engine)
    numbers = _numbers(state, engine, members)
    optim: dict[str, Any] = {}
    for name in state.parameters:
        moments: dict[str, Any] = {key: state.moment(name, key) for key in state.moments(name)}
        optim |= {f"state.{name}.{key}": one for key, one in {**moments, **numbers[name]}.items()}
    for index, (group, names) in enumerate(zip(engine["param_groups"], members, strict=True)):
        values = {key: value for key, value in group.items() if key != "params"}
        optim |= {f"param_groups.{name}.{key}": value for name in names for key, value in values.items()}
        optim |= {f"param_groups.{index}.{key}": value for key, value in {**values, "params": list(names)}.items()}
    model = _model(state)
    small = {key: engine.get(key) for key in ("counters", "loss_scale", "grad_scaler")}
    schedules = engine.get("schedule") or [None]
    small["schedule"] = schedules[0] if len(schedules) == 1 else schedules  # a job with one asks for it by itself
    content = {"model": model, "optim": optim, SMALL: {"iteration": state.info.iteration, **small}}
    save(content, storage_writer=FileSystemWriter(directory), no_dist=True)
    for path in directory.iterdir():
        sync_file(path)
    sync_directory(directory)
    return [
        f"{len(model)} tensors of the model, {len(state.parameters)} parameters with optimizer state, {len(members)} "
        "parameter groups, schedule and counters",
        "load it with torch.distributed.checkpoint into what get_model_state_dict and get_optimizer_state_dict return",
    ]


def _model(state: WholeState) -> dict[str, torch.Tensor]:
    """The module's state dict; trained parameters in the dtype of the authoritative copy, all else as in the module."""
    found = state_dict(state, "trained")
    if state.identity.engine != "torch":
        found |= {name: state.weights(name) for name in state.parameters}
        found |= {name: found[of].clone() for name, of in state.identity.module.aliases.items() if of in found}
    return found


def _members(state: WholeState, engine: Mapping[str, Any]) -> list[list[str]]:
    """Names of the parameters in each group of all optimizers, in their order."""
    saved = engine["optimizer_state"]
    sizes = [size for one in saved["groups"] for size in one]
    names: Sequence[str] = saved["names"]
    if all(names):
        following = iter(names)
        return [[next(following) for _ in range(size)] for size in sizes]
    if len(sizes) == 1:
        return [list(state.parameters)]
    raise UnsupportedEngineError(
        f"{state.info.directory} was saved with {len(sizes)} parameter groups under ZeRO, which does not tell the "
        f"parameters of each. {_KEPT}"
    )


def _numbers(state: WholeState, engine: Mapping[str, Any], members: list[list[str]]) -> dict[str, dict[str, Any]]:
    """Of each parameter, what its state holds beside tensors of its shape."""
    saved, counts = engine["optimizer_state"], engine["optimizer_steps"]
    found: dict[str, dict[str, Any]] = {}
    for index, name in enumerate(saved["names"]):
        form = json.loads(saved["forms"][saved["of"][index]])
        if form is None:
            continue
        if name and str(index) in saved["rest"]:
            raise UnsupportedEngineError(f"{state.identity.optimizer} has changed what it keeps for {name}. {_KEPT}")
        if form[0] != "dict" or any(one[0] not in ("tensor", "scalar", "int", "float") for _, one in form[2]):
            raise UnsupportedEngineError(f"{state.identity.optimizer} keeps nested state for {name}. {_KEPT}")
        own = {
            key: number_of(one, counts[index][key], torch.device("cpu")) for key, one in form[2] if one[0] != "tensor"
        }
        for one in [name] if name else [one for group in members for one in group]:
            if not same(found.setdefault(one, own), own):
                raise UnsupportedEngineError(f"parameters under ZeRO have taken different numbers of steps. {_KEPT}")
    if absent := [name for name in state.parameters if name not in found]:
        raise UnsupportedEngineError(f"the optimizer has no state for {absent[0]}: it took no step with it. {_KEPT}")
    return found
