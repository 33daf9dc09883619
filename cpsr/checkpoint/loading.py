"""One rank's part of a committed checkpoint, back into memory: each file is read from the disk once."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from cpsr.checkpoint.manifest import (
    Manifest,
    OperatorRecord,
    RankManifest,
    TensorRecord,
    expert_files,
    file_name,
    rank_manifest_name,
)
from cpsr.checkpoint.verify import DamagedFileError, files_left_to, open_tensors, read_rank_manifest, read_tensors
from cpsr.errors import CheckpointError, RunMismatchError
from cpsr.state.codec import decode
from cpsr.state.shard import OperatorState, Shard

__all__ = ["SCALARS", "decoded_scalars", "dtype_name", "load_branch", "load_shard", "operator_record"]
__all__ += ["place", "settle", "tensor_record"]

Kind = Literal["params", "moments", "extra"]

SCALARS = "scalars"  # the names of their tensors begin with it


def load_shard(
    directory: Path, manifest: Manifest, rank: int, into: Shard, frozen: Mapping[str, torch.Tensor] | None = None
) -> Any:
    """Copy one rank's tensors into the views of `into` and return the scalars.

    Args:
        directory: the checkpoint.
        manifest: of all ranks.
        rank: whose part.
        into: views to be written.
        frozen: the engine's parameters outside the optimizer, which are compared by name and shape alone here.

    Raises:
        CheckpointCorruptError: a file is damaged; `into` holds anything, as its bytes are hashed on the way there.
        UnreadableFileError: the file system refuses to give a file now; `into` holds anything.
        RunMismatchError: the operators or buffers differ from those that were saved; `into` is as it was.
    """
    record = read_rank_manifest(directory, manifest, rank)
    _require_same_state(directory, record, into, frozen or {})
    tensors = _read(directory, manifest, record, ("params", "moments", "extra"), into)
    scalars = decoded_scalars(directory / rank_manifest_name(rank), record.scalars, tensors)
    _take_ages(record, into)
    return scalars


def load_branch(directory: Path, manifest: Manifest, rank: int, path: Sequence[str]) -> Any:
    """One branch of a rank's saved scalars; does not read the rest of its files, which may be large.

    Hashes cover numbers up to the commit record. They do not cover tensors here: the reader must verify them.

    Raises:
        CheckpointCorruptError: the rank's manifest is damaged, or the file of the tensors is none.
        UnreadableFileError: the file system refuses to give a file now.
        CheckpointError: that rank saved no such branch.
    """
    record = read_rank_manifest(directory, manifest, rank)
    branch = record.scalars
    for key in path:
        if not isinstance(branch, dict) or key not in branch:
            raise CheckpointError(f"{directory}: rank {rank} saved no {'.'.join(path)}")
        branch = branch[key]
    prefix = ".".join([SCALARS, *path, ""])
    with open_tensors(directory / file_name(rank, "extra")) as file:
        try:
            tensors = {key: file.get_tensor(key).clone() for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118
        except SafetensorError as error:
            raise DamagedFileError(directory / file_name(rank, "extra"), f"is no safetensors file: {error}") from error
    return decoded_scalars(directory / rank_manifest_name(rank), branch, tensors)


def operator_record(operator: OperatorState, xxh3_128: str | None = None) -> OperatorRecord:
    """An operator's record for the manifest, with its hash where other ranks hold it, too."""
    return OperatorRecord(
        global_shape=operator.parameter.global_shape,
        offset=operator.parameter.offset,
        numel=operator.parameter.numel,
        dtype=dtype_name(operator.parameter.values.dtype),
        iteration=operator.iteration,
        moments={moment: _described_moment(values, operator) for moment, values in operator.moments.items()},
        xxh3_128=xxh3_128,
        block=operator.parameter.block,
    )


def _described_moment(values: torch.Tensor, operator: OperatorState) -> str:
    """Its type; also its size where it is not of the parameter's: `float32[64]`."""
    size = "" if values.numel() == operator.parameter.numel else f"[{values.numel()}]"
    return f"{dtype_name(values.dtype)}{size}"


def tensor_record(tensor: torch.Tensor) -> TensorRecord:
    """A buffer's record for the manifest."""
    return TensorRecord(shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _require_same_state(directory: Path, record: RankManifest, into: Shard, frozen: Mapping[str, torch.Tensor]) -> None:
    wanted: dict[str, object] = {
        f"param/{name}": operator_record(operator).described for name, operator in into.operators.items()
    }
    wanted |= {f"other/{name}": tensor_record(tensor) for name, tensor in into.others.items()}
    wanted |= {f"frozen/{name}": tensor_record(tensor) for name, tensor in frozen.items()}
    saved: dict[str, object] = {f"param/{name}": operator.described for name, operator in record.operators.items()}
    saved |= {f"other/{name}": tensor for name, tensor in record.others.items()}
    saved |= {f"frozen/{name}": TensorRecord(shape=one.shape, dtype=one.dtype) for name, one in record.frozen.items()}
    for key in [*wanted, *saved]:
        if saved.get(key) != wanted.get(key):
            name = key.partition("/")[2]
            changed = {f"{kind}/{name}" for kind in ("param", "frozen")} <= wanted.keys() | saved.keys()
            why = " A weight that begins or ceases to train makes another run." if changed else ""
            raise RunMismatchError(
                f"{directory} is of another model, another optimizer or another split over ranks; the first difference "
                f"is {key}: saved was {_described(saved.get(key))}, this job has {_described(wanted.get(key))}.{why} "
                "Nothing was changed; use the model and the optimizer it was saved from, or another run_dir"
            )


def _described(record: object) -> str:
    if isinstance(record, OperatorRecord):
        moments = ", ".join(f"{moment} {dtype}" for moment, dtype in sorted(record.moments.items())) or "no moments"
        elements = f"elements {record.offset} to {record.offset + record.numel}"
        if record.block is not None:
            elements = f"a block of shape {record.block} that begins at element {record.offset}"
        return f"{record.dtype} of shape {record.global_shape}, {elements}, {moments}"
    if isinstance(record, TensorRecord):
        return f"{record.dtype} of shape {record.shape}"
    return "nothing of that name"


def _keys(name: str, operator: OperatorRecord, kinds: Collection[Kind]) -> list[str]:
    """Names of its tensors of these kinds."""
    moments = operator.moments if "moments" in kinds else ()
    return [f"param/{name}", *(f"moment/{moment}/{name}" for moment in moments)]


def _read(
    directory: Path, manifest: Manifest, record: RankManifest, kinds: Sequence[Kind], into: Shard
) -> dict[str, torch.Tensor]:
    """Read a rank's tensors of these kinds into the shard, and verify the files; returns those of the scalars."""
    names = [file_name(record.rank, kind) for kind in kinds]
    if absent := sorted(set(names) - record.files.keys()):
        path = directory / rank_manifest_name(record.rank)
        raise DamagedFileError(path, f"lists {sorted(record.files)}, not {absent}")
    targets = dict(into.tensors())
    wanted: dict[str, Collection[str] | None] = dict.fromkeys(_of_kinds(record.files, kinds), ())
    wanted |= _in_expert_files(record, kinds) | dict.fromkeys(names)
    found: dict[str, torch.Tensor] = {}
    for name, keys in wanted.items():
        found |= read_tensors(directory / name, record.files[name], partial(place, targets, keys))
    found |= _left_to_others(directory, manifest, record, kinds, targets)
    if lacking := settle(targets, found):
        raise DamagedFileError(directory, f"its manifest describes {lacking}, its files hold nothing of that name")
    return {key: tensor for key, tensor in found.items() if key.startswith(SCALARS)}


def settle(targets: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> str | None:
    """Copy what was read, and not read into its target at once; returns the first key of which nothing was found."""
    for key, target in targets.items():
        if key not in found:
            return key
        if found[key] is not target:
            with torch.no_grad():
                target.copy_(found[key])
    return None


def place(
    targets: Mapping[str, torch.Tensor],
    wanted: Collection[str] | None,
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Memory for a tensor of a file; None if it is not among `wanted` (None: all are) or has no target."""
    if wanted is not None and key not in wanted:
        return None
    target = targets.get(key)
    if target is None:
        return torch.empty(shape, dtype=dtype, device="cpu") if key.startswith(SCALARS) else None
    if (target.shape, target.dtype) != (shape, dtype):
        raise ValueError(
            f"it holds {key} as {dtype} of shape {shape}, not as {target.dtype} of shape {tuple(target.shape)}"
        )
    in_place = target.device.type == "cpu" and target.is_contiguous()
    return target if in_place else torch.empty(shape, dtype=dtype, device="cpu")


def _of_kinds(names: Iterable[str], kinds: Collection[Kind]) -> list[str]:
    return [name for name in names if name.split(".")[-2] in kinds]


def _take_ages(record: RankManifest, into: Shard) -> None:
    for name, operator in into.operators.items():
        if operator.iteration != record.operators[name].iteration:
            into.operators[name] = replace(operator, iteration=record.operators[name].iteration)


def _in_expert_files(record: RankManifest, kinds: Collection[Kind]) -> dict[str, Collection[str]]:
    """Files of experts of one iteration -> names of the tensors that are taken from there."""
    found: dict[str, Collection[str]] = {}
    for taken_at, operators in record.by_iteration().items():
        keys = {key for name, one in operators.items() for key in _keys(name, one, kinds)}
        files = _of_kinds(expert_files(record.rank, taken_at), kinds)
        found |= {name: keys for name in files if name in record.files}
    return found


def _left_to_others(
    directory: Path,
    manifest: Manifest,
    record: RankManifest,
    kinds: Collection[Kind],
    targets: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The operators in other ranks' files, verified like this rank's own."""
    found: dict[str, torch.Tensor] = {}
    for writer, operators in record.by_writer().items():
        keys = {key for name, one in operators.items() for key in _keys(name, one, kinds)}
        files = files_left_to(directory, manifest, writer, operators.values())
        for name in _of_kinds(files, kinds):
            found |= read_tensors(directory / name, files[name], partial(place, targets, keys))
        if lacking := keys - found.keys():
            path = directory / rank_manifest_name(record.rank)
            raise DamagedFileError(path, f"leaves {min(lacking)} to rank {writer}, whose files do not hold it")
    return found


def decoded_scalars(path: Path, data: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The scalars, with their tensors."""
    try:
        return decode(data, tensors)
    except (KeyError, ValueError, TypeError, IndexError, RecursionError) as error:
        raise DamagedFileError(path, f"its scalars cannot be decoded: {error!r}") from error
