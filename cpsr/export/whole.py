"""One committed checkpoint with the ranks' slices put together."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from cpsr.checkpoint.catalogue import CheckpointInfo, scan
from cpsr.checkpoint.manifest import COMMIT, OperatorRecord, RankManifest, file_name, rank_manifest_name
from cpsr.checkpoint.verify import (
    DamagedFileError,
    UnreadableFileError,
    check_file,
    open_tensors,
    read_manifest,
    read_rank_manifest,
)
from cpsr.errors import CheckpointError, CPSRError, RunMismatchError, UnsupportedEngineError
from cpsr.state.codec import decode

__all__ = ["WholeState", "open_whole"]

Kind = Literal["params", "moments", "extra"]
_Place = tuple[int, tuple[int, ...] | None]  # of a rank's slice: its first element, and its shape if it is a block

_PIPELINE = "PipelineEngine"
# DeepSpeed's MoE layers put these into names. Its own checkpoints keep each expert in a file by itself.
_EXPERTS = (".deepspeed_moe.", ".deepspeed_experts.")


class ModuleIdentity(BaseModel):
    """How the module's own state dict differs from what is saved by name.

    Attributes:
        aliases: further name of a tied tensor -> the name under which it is saved.
        transient: buffers that the module keeps out of its state dict.
        frozen: parameter that the optimizer does not move -> its shape, before it was split over ranks.
        strides: trained parameter -> strides, where its elements are not in row-major order.
        extra: entries of the state dict that are neither parameters nor buffers; they are not saved.
    """

    model_config = ConfigDict(frozen=True)

    aliases: dict[str, str]
    transient: list[str]
    frozen: dict[str, tuple[int, ...]]
    strides: dict[str, tuple[int, ...]]
    extra: list[str]


class RunIdentity(BaseModel):
    """`run.json`, as far as it matters here."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    engine: str
    precision: str
    optimizer: str
    module: ModuleIdentity


def read_identity(run_dir: Path) -> RunIdentity:
    """The identity of a run, whose checkpoints can be put together.

    Raises:
        RunMismatchError: `run_dir` is no run directory.
        UnsupportedEngineError: a pipeline.
        CPSRError: `run.json` is damaged.
    """
    path = run_dir / "run.json"
    try:
        identity = RunIdentity.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise RunMismatchError(f"{run_dir} holds no run.json; name the directory that the run was given") from error
    except (OSError, ValidationError) as error:
        raise CPSRError(
            f"{path} cannot be used ({_first_line(error)}): it is damaged. Restore it from a copy"
        ) from error
    if identity.engine == _PIPELINE:
        raise UnsupportedEngineError(
            f"{run_dir} is a run of a pipeline, whose layout no format of the export has. Nothing was exported"
        )
    return identity


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)


@dataclass(frozen=True)
class _Part:
    """What one rank wrote: its manifest, and its files that were opened (mapped, not read)."""

    manifest: RankManifest
    files: dict[Kind, Any]


class WholeState:
    """A checkpoint over all ranks; tensors are read and put together one at a time, when they are asked for.

    Every file that is used was compared with its hash when this was made by `open_whole`.

    Attributes:
        info: the checkpoint.
        identity: the run's.
        parameters: names of the trained parameters, in the order in which they are saved.
    """

    def __init__(
        self, info: CheckpointInfo, identity: RunIdentity, parts: Sequence[_Part], frozen: Mapping[str, Any]
    ) -> None:
        self.info = info
        self._frozen_files = frozen
        self.identity = identity
        self._parts = parts
        self._records = self._operators()
        self.parameters = list(self._records)

    def elements(self, name: str) -> int:
        """Elements of one trained parameter."""
        return math.prod(self._records[name].global_shape)

    def moments(self, name: str) -> dict[str, str]:
        """Moment -> dtype of one trained parameter."""
        return self._records[name].moments

    def weights(self, name: str) -> torch.Tensor:
        """A trained parameter, of its whole shape, in the dtype of the authoritative copy.

        Raises:
            CheckpointCorruptError: the content of a file differs from its manifest.
            UnsupportedEngineError: the ranks' slices do not make up one tensor.
        """
        return self._whole(name, "params", f"param/{name}", self._records[name].dtype)

    def moment(self, name: str, moment: str) -> torch.Tensor:
        """One of the optimizer's tensors of a trained parameter, of the parameter's shape; errors as of `weights`."""
        return self._whole(name, "moments", f"moment/{moment}/{name}", self._records[name].moments[moment])

    def outside(self) -> dict[str, torch.Tensor]:
        """Buffers and frozen parameters, by name; a buffer is rank 0's, as it is in the engine's own checkpoints.

        Raises:
            CheckpointCorruptError: the content of a file differs from its manifest.
            UnsupportedEngineError: the ranks' slices of a frozen parameter do not make up one tensor.
        """
        frozen, own = self.identity.module.frozen, _outside(self._parts[0].manifest)
        absent = sorted(frozen.keys() - set(own)) if self.identity.engine == "torch" else []
        return {
            name: self._frozen(name, frozen[name]) if name in frozen else self._other(0, name)
            for name in [*own, *absent]
        }

    def scalars(self) -> dict[str, Any]:
        """Rank 0's small state.

        Raises:
            CheckpointCorruptError: it cannot be decoded.
        """
        return self._scalars_of(0)

    def _scalars_of(self, rank: int) -> dict[str, Any]:
        path = self.info.directory / rank_manifest_name(rank)
        file = self._parts[rank].files["extra"]
        try:
            keys = [key for key in file.keys() if key.startswith("scalars")]  # noqa: SIM118 - not a mapping
            tensors = {key: file.get_tensor(key).clone() for key in keys}
            found = decode(self._parts[rank].manifest.scalars, tensors)
        except (KeyError, ValueError, TypeError, IndexError, RecursionError, SafetensorError) as error:
            raise DamagedFileError(path, f"its scalars cannot be decoded: {error!r}") from error
        if not isinstance(found, dict):
            raise DamagedFileError(path, f"its scalars are {type(found).__name__}, not a mapping")
        return found

    def _operators(self) -> dict[str, OperatorRecord]:
        """Every trained parameter, described as on the first rank that owns some of it."""
        found: dict[str, OperatorRecord] = {}
        for rank, part in enumerate(self._parts):
            for name, record in part.manifest.operators.items():
                _require_name(self.info.directory, name)
                first = found.setdefault(name, record)
                if (first.global_shape, first.dtype, first.moments) != (
                    record.global_shape,
                    record.dtype,
                    record.moments,
                ):
                    raise UnsupportedEngineError(
                        f"{self.info.directory}: {name} is not one tensor: rank {rank} saved slices of another shape "
                        f"or dtype ({record.global_shape}, {record.dtype}) than the ranks before it "
                        f"({first.global_shape}, {first.dtype}). Nothing was exported"
                    )
        for name in _outside(self._parts[0].manifest):
            _require_name(self.info.directory, name)
        return found

    def _whole(self, name: str, kind: Kind, key: str, dtype: str) -> torch.Tensor:
        records = ((rank, part.manifest.operators.get(name)) for rank, part in enumerate(self._parts))
        pieces = (
            (rank, (record.offset, record.block), self._read(rank, kind, key, (record.numel,), dtype))
            for rank, record in records
            if record is not None and record.saved_by is None and (record.numel or not self.elements(name))
        )
        return self._shaped(name, self._joined(name, self._records[name].global_shape, pieces))

    def _joined(
        self, name: str, shape: tuple[int, ...], pieces: Iterable[tuple[int, _Place, torch.Tensor]]
    ) -> torch.Tensor:
        """The flattened whole of the ranks' flat pieces: rank, place, and elements."""
        total = math.prod(shape)
        whole: torch.Tensor | None = None
        is_filled = torch.zeros(total, dtype=torch.bool, device="cpu")
        fits = True
        for rank, place, piece in pieces:
            whole = piece.new_empty(total) if whole is None else whole
            target, filled = (_target(one, shape, place, piece.numel()) for one in (whole, is_filled))
            if target.numel() != piece.numel() or (filled.any() and not filled.all()):
                fits = False
            elif filled.numel() and filled.all():
                self._require_replica(name, rank, target.contiguous().view(-1), piece)
            else:
                target.copy_(piece.view(target.shape))
                filled.fill_(True)
        if whole is None or not fits or not is_filled.all():
            raise UnsupportedEngineError(
                f"{self.info.directory}: the slices of {name} that the ranks saved do not make up its {total} "
                f"elements: {int(is_filled.sum())} are there, or some overlap. Nothing was exported"
            )
        return whole

    def _shaped(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        shape, stride = self._records[name].global_shape, self.identity.module.strides.get(name)
        if stride is None:
            return flat.view(shape)
        try:  # run.json may hold anything: torch refuses what lies outside of `flat`
            return flat.as_strided(shape, stride).contiguous()
        except RuntimeError as error:
            raise UnsupportedEngineError(
                f"run.json gives {name} of shape {shape} impossible strides {stride}"
            ) from error

    def _require_replica(self, name: str, rank: int, first: torch.Tensor, piece: torch.Tensor) -> None:
        if not torch.equal(first.view(torch.uint8), piece.view(torch.uint8)):
            raise UnsupportedEngineError(
                f"{self.info.directory}: rank {rank} holds other values of {name} than the ranks before it: the name "
                "stands for different tensors (experts or tensor-parallel parts), or the ranks have drifted apart. "
                "Nothing was exported"
            )

    def _other(self, rank: int, name: str) -> torch.Tensor:
        """A buffer of a rank, or what it has of a frozen parameter: in a file, in its small state, or with buffers."""
        manifest = self._parts[rank].manifest
        frozen = manifest.frozen.get(name)
        if frozen is None:
            if (moved := self._moved_buffer(rank, name)) is not None:
                return moved
            record = manifest.others[name]
            return self._read(rank, "extra", f"other/{name}", record.shape, record.dtype).clone()
        if frozen.file is not None:
            path = self.info.directory / frozen.file
            found = _tensor(self._frozen_files[frozen.file], path, f"frozen/{name}", frozen.shape, frozen.dtype)
            return found.clone()
        try:
            values: torch.Tensor = self._scalars_of(rank)["frozen"]["moved"][name]
        except (KeyError, TypeError) as error:
            path = self.info.directory / rank_manifest_name(rank)
            raise DamagedFileError(path, f"its scalars lack the frozen parameter {name}") from error
        return values

    def _moved_buffer(self, rank: int, name: str) -> torch.Tensor | None:
        """A buffer that has had another layout than at the start of its life: it is in the rank's small state."""
        state = self._scalars_of(rank)["engine"].get("module") or {}
        described = state.get("buffers", {}).get(name)
        if described is None:
            return None
        values: torch.Tensor = described["values"]
        return values.as_strided(described["shape"], described["stride"])

    def _frozen(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Whole on every rank that has it, or in parts, each of which records where it lies."""
        ranks = [rank for rank, part in enumerate(self._parts) if name in _outside(part.manifest)]
        records = [(rank, self._parts[rank].manifest.frozen.get(name)) for rank in ranks]
        known = [(rank, one) for rank, one in records if one is not None]
        if any(one.global_shape is not None for _, one in known):
            places = ((rank, (one.offset or 0, one.block)) for rank, one in known)
            pieces = ((rank, place, self._other(rank, name).reshape(-1)) for rank, place in places)
            return self._joined(name, shape, pieces).view(shape)
        if ranks and (first := self._other(ranks[0], name)).shape == shape:
            return first
        raise UnsupportedEngineError(
            f"{self.info.directory}: no rank saved the frozen parameter {name} whole, or where its part of the shape "
            f"{shape} lies. Nothing was exported"
        )

    def _read(self, rank: int, kind: Kind, key: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return _tensor(self._parts[rank].files[kind], self.info.directory / file_name(rank, kind), key, shape, dtype)


def open_whole(run_dir: Path, iteration: int | None, *, moments: bool) -> WholeState:
    """Open a committed checkpoint, with the hash of every file that is used checked first.

    Args:
        run_dir: the run.
        iteration: of the checkpoint; None is the newest whole one.
        moments: the optimizer's tensors are needed too.

    Raises:
        CheckpointError: there is no such checkpoint, or it lacks what is needed: it is thinned.
        CheckpointCorruptError: a file of it is damaged; the message names it.
        UnsupportedEngineError: what its ranks hold does not make up one model; the message names it.
        RunMismatchError: it is of another run than `run.json`, or `run_dir` is no run directory.
    """
    identity = read_identity(run_dir)
    info = _choose(run_dir / "checkpoints", iteration)
    try:
        return _open(info, identity, moments=moments)
    except DamagedFileError as error:
        if (info.directory / COMMIT).exists():
            raise
        raise CheckpointError(f"{info.directory} was deleted while it was read; export a newer checkpoint") from error


def _choose(checkpoints: Path, iteration: int | None) -> CheckpointInfo:
    catalogue = scan(checkpoints)
    found = [info for info in catalogue.checkpoints if info.full if iteration is None]
    found += [info for info in catalogue.checkpoints if info.iteration == iteration]
    if found:
        return found[-1]
    for problem in catalogue.problems:
        if problem.iteration == iteration:
            raise DamagedFileError(problem.file, problem.what)
    for problem in catalogue.unreadable:
        if iteration is None or problem.iteration == iteration:
            raise UnreadableFileError(problem.file, problem.what)
    whole = [info.iteration for info in catalogue.checkpoints if info.full]
    wanted = "whole checkpoint" if iteration is None else f"committed checkpoint of iteration {iteration}"
    raise CheckpointError(f"{checkpoints} holds no {wanted}; whole ones are {whole or 'none'}. Nothing was exported")


def _open(info: CheckpointInfo, identity: RunIdentity, *, moments: bool) -> WholeState:
    manifest = read_manifest(info.directory)
    if manifest.run_id != identity.run_id:
        raise CheckpointError(f"{info.directory} is of the run {manifest.run_id!r}, run.json of {identity.run_id!r}")
    records = [read_rank_manifest(info.directory, manifest, rank) for rank in range(manifest.world_size)]
    if any(record.sparse for record in records):
        raise UnsupportedEngineError(
            f"{info.directory} was saved with experts.policy, of a mixture of experts, which is not exported yet; the "
            "checkpoint itself is whole, and its job restarts from it. Nothing was exported"
        )
    if not info.full:
        _require_weights_are_enough(info, identity, records, moments=moments)
    used: dict[Kind, bool] = {"params": True, "moments": moments, "extra": info.full}
    kinds = [kind for kind in used if used[kind]]
    for record in records:
        for kind in kinds:
            _check(info.directory, record, kind)
    parts = [_Part(record, _files(info.directory, record, kinds)) for record in records]
    return WholeState(info, identity, parts, _frozen_files(info.directory, records) if info.full else {})


def _require_weights_are_enough(
    info: CheckpointInfo, identity: RunIdentity, records: Sequence[RankManifest], *, moments: bool
) -> None:
    if moments:
        raise CheckpointError(
            f"{info.directory} was thinned: it keeps the weights and no moments, which this format needs. Name a whole "
            "checkpoint, or another format"
        )
    gone = sorted(name for name in _outside(records[0]) if name not in identity.module.transient)
    if gone:
        raise CheckpointError(
            f"{info.directory} was thinned: its {len(gone)} buffers and frozen parameters (the first is {gone[0]}) are "
            "gone, so that its state dict would not be complete. Name a whole checkpoint"
        )


def _check(directory: Path, record: RankManifest, kind: Kind) -> None:
    name = file_name(record.rank, kind)
    if name not in record.files:
        raise DamagedFileError(directory / name, "is not listed in its manifest")
    check_file(directory / name, record.files[name])


def _files(directory: Path, record: RankManifest, kinds: Sequence[Kind]) -> dict[Kind, Any]:
    return {kind: open_tensors(directory / file_name(record.rank, kind)) for kind in kinds}


def _frozen_files(directory: Path, records: Sequence[RankManifest]) -> dict[str, Any]:
    """Files of frozen parameters that some rank refers to, opened, with their hashes checked."""
    described = {name: one for record in records for name, one in record.files.items()}
    wanted = sorted({file for record in records for file in record.frozen_files()})
    for name in wanted:
        if name not in described:
            raise DamagedFileError(directory / name, "is not listed in its manifest")
        check_file(directory / name, described[name])
    return {name: open_tensors(directory / name) for name in wanted}


def _outside(record: RankManifest) -> list[str]:
    """Buffers and frozen parameters."""
    return [*record.others, *record.frozen]


def _tensor(file: Any, path: Path, key: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor of an open file, which must be as its manifest describes it."""
    try:
        found: torch.Tensor = file.get_tensor(key)
    except SafetensorError as error:
        raise DamagedFileError(path, f"lacks {key}, which its manifest lists ({error})") from error
    if found.shape != shape or str(found.dtype) != f"torch.{dtype}":
        raise DamagedFileError(
            path, f"holds {key} as {found.dtype} {tuple(found.shape)}, its manifest has {dtype} {shape}"
        )
    return found


def _target(whole: torch.Tensor, shape: tuple[int, ...], place: _Place, numel: int) -> torch.Tensor:
    """Where in the flattened whole a rank's slice lies; a view, of another size where it lies beyond the whole."""
    offset, block = place
    if block is None:
        return whole[offset : offset + numel]
    start = _start(offset, shape)
    if len(start) != len(block):
        return whole[:0]
    return whole.view(shape)[tuple(slice(begin, begin + size) for begin, size in zip(start, block, strict=True))]


def _start(offset: int, shape: tuple[int, ...]) -> list[int]:
    """The index, in each dimension, of an element of a tensor."""
    found: list[int] = []
    for size in reversed(shape):
        offset, index = divmod(offset, max(1, size))
        found.insert(0, index)
    return found


def _require_name(directory: Path, name: str) -> None:
    """Refuse names that are not one entry of a directory, and those of MoE layers."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UnsupportedEngineError(f"{directory}: {name!r} cannot be the name of a folder. Nothing was exported")
    if any(mark in f".{name}." for mark in _EXPERTS):
        raise UnsupportedEngineError(
            f"{directory}: {name} belongs to an MoE layer, which is not exported yet; the checkpoint itself is whole, "
            "and its job restarts from it. Nothing was exported"
        )
