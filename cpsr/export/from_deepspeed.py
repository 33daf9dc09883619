"""Reads a checkpoint that DeepSpeed's `save_checkpoint` wrote at ZeRO 1, 2 or 3: the ranks' parts are put together."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cpsr.errors import CheckpointError, UnsupportedEngineError
from cpsr.export.deepspeed_files import (
    checkpoint_folder,
    grouped,
    load_deepspeed,
    loss_scale,
    model_states,
    rank_of,
    small_part,
    split_entry,
)
from cpsr.export.foreign import ForeignParameter, ForeignState
from cpsr.state.codec import same

__all__ = ["read_deepspeed"]

_NOT = "Nothing was written"
_WEIGHTS = "fp32"


class _Piece(NamedTuple):
    """A rank's part of a parameter, inside the flat tensors of one parameter group (or part of one)."""

    name: str
    flat: Mapping[str, torch.Tensor]  # the weights' under `fp32`, else a moment's
    numbers: Mapping[str, float | int]
    start: int
    numel: int


def read_deepspeed(source: Path) -> ForeignState:
    """The state in DeepSpeed's own checkpoint; takes host memory for all weights and moments.

    Args:
        source: the folder of the checkpoint, or the one above with `latest`.

    Raises:
        CheckpointError: it is not whole, or a file cannot be read as tensors and plain data.
        UnsupportedEngineError: it holds what cannot be imported; the message names it.
    """
    folder = checkpoint_folder(source, "latest")
    states = model_states(folder)[0]
    shapes = states.get("param_shapes")
    paths = sorted(folder.glob("*zero_pp_rank_*_optim_states.pt"), key=rank_of)
    if not paths or shapes is None:
        raise UnsupportedEngineError(
            f"{folder} holds no state of ZeRO 1, 2 or 3, and at ZeRO-0 DeepSpeed does not save the names that the "
            f"optimizer's state belongs to. {_NOT}; save at ZeRO 1, which needs no other change"
        )
    if [rank_of(path) for path in paths] != list(range(len(paths))) or len(paths) != states["dp_world_size"]:
        raise CheckpointError(
            f"{folder} was saved by {states['dp_world_size']} ranks and holds the files of ranks "
            f"{[rank_of(path) for path in paths]}: it is not whole. {_NOT}"
        )
    optimizers = [_optimizer(path) for path in paths]
    pieces: dict[str, list[_Piece]] = {}
    for rank, (path, one) in enumerate(zip(paths, optimizers, strict=True)):
        for piece in _pieces(path, one, shapes, rank, len(paths)):
            pieces.setdefault(piece.name, []).append(piece)
    parameters = {
        name: _joined(folder, name, tuple(shape), pieces.get(name, []))
        for part in shapes
        for name, shape in part.items()
    }
    first = optimizers[0]
    base = first.get("base_optimizer_state") or first["optimizer_state_dict"]
    return ForeignState(
        parameters=parameters,
        loss_scale=loss_scale(first),
        **small_part(states, parameters.keys()),
        **grouped(shapes, base["param_groups"]),
    )


def _optimizer(path: Path) -> dict[str, Any]:
    found = load_deepspeed(path)
    optimizer = found.get("optimizer_state_dict") if isinstance(found, dict) else None
    if not isinstance(optimizer, dict):
        raise CheckpointError(f"{path} holds no optimizer_state_dict. {_NOT}")
    return optimizer


def _pieces(
    path: Path, optimizer: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]], rank: int, ranks: int
) -> Iterator[_Piece]:
    if "fp32_flat_groups" in optimizer:
        yield from _pieces_of_stage_3(path, optimizer, shapes, rank, ranks)
        return
    base, mappings = optimizer.get("base_optimizer_state"), optimizer.get("param_slice_mappings")
    if not isinstance(base, dict) or "state" not in base or mappings is None:
        raise UnsupportedEngineError(
            f"{path} has no param_slice_mappings, or was written with elastic_checkpoint: it does not tell where "
            f"parameters lie. {_NOT}; load it with DeepSpeed 0.19 and save it again"
        )
    for index, flat in enumerate(optimizer["single_partition_of_fp32_groups"]):
        moments, numbers = _entry(path, base["state"], index)
        for name, place in mappings[index].items():
            yield _Piece(name, {_WEIGHTS: flat, **moments}, numbers, place.start, place.numel)


def _pieces_of_stage_3(
    path: Path, optimizer: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]], rank: int, ranks: int
) -> Iterator[_Piece]:
    """Of every parameter rank r has the r-th of equal parts, parameter after parameter; the last ones are padded."""
    for index, part in enumerate(shapes):
        moments, numbers = _entry(path, optimizer["optimizer_state_dict"]["state"], index)
        flat = {_WEIGHTS: optimizer["fp32_flat_groups"][index], **moments}
        start = 0
        for name, shape in part.items():
            own = math.ceil(math.prod(shape) / ranks)
            yield _Piece(name, flat, numbers, start, max(0, min(own, math.prod(shape) - rank * own)))
            start += own


def _entry(path: Path, states: Mapping[Any, Any], index: int) -> tuple[dict[str, torch.Tensor], dict[str, float | int]]:
    if index not in states:
        raise UnsupportedEngineError(f"{path}: the optimizer has no state for its tensor {index}: it took no step")
    return split_entry(states[index])


def _joined(folder: Path, name: str, shape: tuple[int, ...], pieces: Sequence[_Piece]) -> ForeignParameter:
    if not pieces:
        raise CheckpointError(f"{folder}: no rank holds any of {name}: the checkpoint is not whole. {_NOT}")
    for one in pieces[1:]:
        if one.flat.keys() != pieces[0].flat.keys() or not same(dict(one.numbers), dict(pieces[0].numbers)):
            raise UnsupportedEngineError(f"{folder}: the ranks keep different state for {name}. {_NOT}")
    found = {}
    for key in pieces[0].flat:
        whole = torch.cat([one.flat[key][one.start : one.start + one.numel] for one in pieces])
        if whole.numel() != math.prod(shape):
            raise CheckpointError(
                f"{folder}: the ranks hold {whole.numel()} elements of {key} of {name}, its shape is {shape}: the "
                f"checkpoint is not whole, or has a layout that is not known. {_NOT}"
            )
        found[key] = whole.view(shape)
    return ForeignParameter(found.pop(_WEIGHTS), found, pieces[0].numbers)
