"""What DeepSpeed 0.19.8 writes beside weights and moments: counters, schedule, groups, buffers, loss scale."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cpsr.errors import CheckpointError, UnsupportedEngineError
from cpsr.export.foreign_files import load_file

__all__ = ["checkpoint_folder", "grouped", "load_deepspeed", "loss_scale", "model_states", "small_part", "split_entry"]

_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_EXPERTS = (".deepspeed_moe.", ".deepspeed_experts.")
_NOT = "Nothing was written"


def load_deepspeed(path: Path) -> Any:
    """A file of DeepSpeed's; beside plain data it may hold a stage's number, a loss scaler and addresses in tensors.

    Raises:
        CheckpointError: it is absent, damaged or holds other objects.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return load_file(path, [ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address])


def checkpoint_folder(source: Path, latest: str) -> Path:
    """The folder of a checkpoint: the one that was named, or that which its file of the newest tag names.

    Raises:
        CheckpointError: the tag is no folder there.
    """
    if not (source / latest).is_file():
        return source
    tag = (source / latest).read_text(encoding="utf-8").strip()
    if tag in ("", ".", "..") or Path(tag).name != tag or not (source / tag).is_dir():
        raise CheckpointError(f"{source / latest} names {tag!r}, which is no folder in {source}. {_NOT}")
    return source / tag


def model_states(folder: Path) -> list[dict[str, Any]]:
    """The content of the files of the engines' states, by rank; a single one where the module was not split.

    Raises:
        CheckpointError: there is none, or it cannot be read.
        UnsupportedEngineError: of a pipeline, of tensor parallelism, or of a mixture of experts.
    """
    if found := sorted(path.name for path in folder.glob("layer_*")):
        raise UnsupportedEngineError(
            f"{folder} is of a pipeline or a mixture of experts ({found[0]}), which cannot be imported. {_NOT}"
        )
    if (folder / "mp_rank_01_model_states.pt").exists() or list(folder.glob("*_mp_rank_01_*")):
        raise UnsupportedEngineError(f"{folder} is of tensor parallelism, whose parts are not put together. {_NOT}")
    paths = sorted(folder.glob("zero_pp_rank_*_mp_rank_00_model_states.pt"), key=rank_of)
    single = folder / "mp_rank_00_model_states.pt"
    if not paths and not single.exists():
        raise CheckpointError(f"{folder} holds no *_model_states.pt: it is no checkpoint of DeepSpeed. {_NOT}")
    return [_mapping(path) for path in ([single] if single.exists() else paths)]


def rank_of(path: Path) -> int:
    """The data-parallel rank in the name of a file."""
    digits = path.name.split("zero_pp_rank_")[1].split("_")[0]
    if not digits.isdigit():
        raise CheckpointError(f"{path} has no rank in its name. {_NOT}")
    return int(digits)


def _mapping(path: Path) -> dict[str, Any]:
    found = load_deepspeed(path)
    if not isinstance(found, dict) or not all(isinstance(found.get(key), int) for key in _COUNTERS):
        raise CheckpointError(f"{path} lacks {', '.join(_COUNTERS)}: it is no file of DeepSpeed's engine. {_NOT}")
    return found


def small_part(states: Mapping[str, Any], trained: Collection[str]) -> dict[str, Any]:
    """Of one rank's states: iteration, counters, schedule, and the tensors outside the optimizer, for `ForeignState`.

    Raises:
        UnsupportedEngineError: a parameter of a mixture of experts.
    """
    if experts := sorted(name for name in trained if any(mark in f".{name}." for mark in _EXPERTS)):
        raise UnsupportedEngineError(f"{experts[0]} belongs to an MoE layer, which cannot be imported. {_NOT}")
    module, buffers = states.get("module") or {}, set(states.get("buffer_names") or ())
    outside = {
        name: value
        for name, value in {**module, **(states.get("outside_optimizer") or {})}.items()
        if isinstance(value, torch.Tensor) and name not in trained and (value.numel() or name in buffers)
    }
    return {
        "iteration": states["global_steps"],
        "counters": {key: states[key] for key in _COUNTERS},
        "schedule": (states.get("lr_scheduler"),),
        "outside": outside,
    }


def grouped(shapes: Sequence[Mapping[str, Any]] | None, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`groups` and `group_of` of a `ForeignState`.

    Args:
        shapes: of the parameters in each flat tensor of the optimizer, by name; None: not known.
        groups: of the optimizer; `params` are numbers of flat tensors.
    """
    place = {tensor: index for index, group in enumerate(groups) for tensor in group.get("params", ())}
    group_of = {name: place[index] for index, one in enumerate(shapes or ()) for name in one if index in place}
    return {
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        "group_of": group_of,
    }


def loss_scale(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The running loss scale in the state of DeepSpeed's optimizer; empty where there is none."""
    scaler = optimizer.get("loss_scaler")
    found = {} if scaler is None else vars(scaler)
    return {name: found[name] for name in _LOSS_SCALE if name in found}


def split_entry(entry: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, float | int]]:
    """The tensors with dimensions in the optimizer's state for one tensor, and the numbers."""
    moments = {key: one for key, one in entry.items() if isinstance(one, torch.Tensor) and one.dim()}
    numbers = {key: _number(one) for key, one in entry.items() if key not in moments}
    return moments, numbers


def _number(value: Any) -> float | int:
    found = value.item() if isinstance(value, torch.Tensor) else value
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise UnsupportedEngineError(f"the optimizer's state holds {found!r}, which is no number or tensor. {_NOT}")
    return found
