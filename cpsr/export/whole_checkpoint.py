"""One committed checkpoint with the ranks' slices put together."""

import math
from collections.abc import Iterable, Mapping, Sequence
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

__all__ = ["Precision", "WholeState", "open_whole", "state_dict"]

Precision = Literal["fp32", "trained"]

# DeepSpeed's MoE layers put these into names. Its own checkpoints keep each expert in a file by itself.
_EXPERTS = (".deepspeed_moe.", ".deepspeed_experts.")
_TRAINED = {"bf16": torch.bfloat16, "fp16": torch.float16}


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


class WholeState:
    """A checkpoint over all ranks; tensors are read and put together one at a time, when they are asked for.

    Every file that is used was compared with its hash when this was made by `open_whole`.

    Args:
        info: the checkpoint.
        identity: the run's.
        records: manifests of the ranks.
        files: by name, opened (mapped, not read).

    Attributes:
        info, identity: as given.
        parameters: names of the trained parameters, in the order in which they are saved.
    """

    def __init__(
        self, info: CheckpointInfo, identity: RunIdentity, records: Sequence[RankManifest], files: Mapping[str, Any]
    ) -> None:
        self.info, self.identity = info, identity
        self._ranks, self._files = records, files
        self._operators = self._described_operators()
        self.parameters = list(self._operators)

    def moments(self, name: str) -> dict[str, str]:
        """Moment -> dtype of one trained parameter."""
        return self._operators[name].moments

    def weights(self, name: str) -> torch.Tensor:
        """A trained parameter, of its whole shape, in the dtype of the authoritative copy.

        Raises:
            CheckpointCorruptError: the content of a file differs from its manifest.
            UnsupportedEngineError: the ranks' slices do not make up one tensor.
        """
        return self._whole(name, "params", f"param/{name}", self._operators[name].dtype)

    def moment(self, name: str, moment: str) -> torch.Tensor:
        """One of the optimizer's tensors of a trained parameter, of the parameter's shape; errors as of `weights`."""
        return self._whole(name, "moments", f"moment/{moment}/{name}", self._operators[name].moments[moment])

    def outside(self) -> dict[str, torch.Tensor]:
        """Buffers and frozen parameters, by name; a buffer is rank 0's, as it is in the engine's own checkpoints.

        Raises:
            CheckpointCorruptError: the content of a file differs from its manifest.
            UnsupportedEngineError: the ranks' slices of a frozen parameter do not make up one tensor.
        """
        frozen, own = self.identity.module.frozen, _outside(self._ranks[0])
        absent = sorted(frozen.keys() - set(own)) if self.identity.engine == "torch" else []
        return {
            name: self._frozen(name, frozen[name]) if name in frozen else self._other(0, name)
            for name in [*own, *absent]
        }

    def scalars(self, rank: int = 0) -> dict[str, Any]:
        """A rank's small state.

        Raises:
            CheckpointCorruptError: it cannot be decoded.
        """
        path, file = self.info.directory / rank_manifest_name(rank), self._files[file_name(rank, "extra")]
        try:
            keys = [key for key in file.keys() if key.startswith("scalars")]  # noqa: SIM118 - not a mapping
            found = decode(self._ranks[rank].scalars, {key: file.get_tensor(key).clone() for key in keys})
        except (KeyError, ValueError, TypeError, IndexError, RecursionError, SafetensorError) as error:
            raise DamagedFileError(path, f"its scalars cannot be decoded: {error!r}") from error
        if not isinstance(found, dict):
            raise DamagedFileError(path, f"its scalars are {type(found).__name__}, not a mapping")
        return found

    def _described_operators(self) -> dict[str, OperatorRecord]:
        """Every trained parameter, described as on the first rank that owns some of it."""
        found: dict[str, OperatorRecord] = {}
        for rank, manifest in enumerate(self._ranks):
            blocks = [name for name, one in manifest.operators.items() if one.block is not None]
            blocks += [name for name, one in manifest.frozen.items() if one.block is not None]
            if blocks:
                raise UnsupportedEngineError(
                    f"{self.info.directory}: {blocks[0]} is split in blocks over the ranks (tensor parallelism), which "
                    "no format of the export has. Nothing was exported"
                )
            for name, record in manifest.operators.items():
                _require_name(self.info.directory, name)
                first = found.setdefault(name, record)
                theirs, ours = ((one.global_shape, one.dtype, one.moments) for one in (first, record))
                if theirs != ours:
                    raise UnsupportedEngineError(
                        f"{self.info.directory}: {name} is not one tensor: rank {rank} saved slices of another shape "
                        f"or dtype {ours} than the ranks before it {theirs}. Nothing was exported"
                    )
        for name in _outside(self._ranks[0]):
            _require_name(self.info.directory, name)
        return found

    def _whole(self, name: str, kind: Literal["params", "moments"], key: str, dtype: str) -> torch.Tensor:
        """A trained parameter, or a tensor of its optimizer, in its own order of elements."""
        shape, stride = self._operators[name].global_shape, self.identity.module.strides.get(name)
        records = ((rank, manifest.operators.get(name)) for rank, manifest in enumerate(self._ranks))
        flat = self._joined(
            name,
            math.prod(shape),
            (
                (rank, record.offset, self._read(file_name(rank, kind), key, (record.numel,), dtype))
                for rank, record in records
                if record is not None and record.saved_by is None and (record.numel or not math.prod(shape))
            ),
        )
        if stride is None:
            return flat.view(shape)
        try:  # run.json may hold anything: torch refuses what lies outside of `flat`
            return flat.as_strided(shape, stride).contiguous()
        except RuntimeError as error:
            raise UnsupportedEngineError(
                f"run.json gives {name} of shape {shape} impossible strides {stride}"
            ) from error

    def _joined(self, name: str, total: int, pieces: Iterable[tuple[int, int, torch.Tensor]]) -> torch.Tensor:
        """The flattened whole of the ranks' flat pieces: rank, first element, and elements."""
        whole: torch.Tensor | None = None
        is_filled = torch.zeros(total, dtype=torch.bool, device="cpu")
        fits = True
        for rank, offset, piece in pieces:
            whole = piece.new_empty(total) if whole is None else whole
            target, filled = (one[offset : offset + piece.numel()] for one in (whole, is_filled))
            if target.numel() != piece.numel() or (filled.any() and not filled.all()):
                fits = False
            elif not (filled.numel() and filled.all()):
                target.copy_(piece)
                filled.fill_(True)
            elif not torch.equal(target.view(torch.uint8), piece.view(torch.uint8)):
                raise UnsupportedEngineError(
                    f"{self.info.directory}: rank {rank} holds other values of {name} than the ranks before it: the "
                    "name stands for different tensors (experts or tensor-parallel parts), or the ranks have drifted "
                    "apart. Nothing was exported"
                )
        if whole is None or not fits or not is_filled.all():
            raise UnsupportedEngineError(
                f"{self.info.directory}: the slices of {name} that the ranks saved do not make up its {total} "
                f"elements: {int(is_filled.sum())} are there, or some overlap. Nothing was exported"
            )
        return whole

    def _other(self, rank: int, name: str) -> torch.Tensor:
        """A buffer of a rank, or what it has of a frozen parameter: in a file, in its small state, or with buffers."""
        manifest = self._ranks[rank]
        frozen = manifest.frozen.get(name)
        if frozen is not None and frozen.file is not None:
            return self._read(frozen.file, f"frozen/{name}", frozen.shape, frozen.dtype).clone()
        scalars = self.scalars(rank)
        if frozen is not None:
            try:
                values: torch.Tensor = scalars["frozen"]["moved"][name]
            except (KeyError, TypeError) as error:
                path = self.info.directory / rank_manifest_name(rank)
                raise DamagedFileError(path, f"its scalars lack the frozen parameter {name}") from error
            return values
        # A buffer that has had another layout than at the start of its life is in the small state.
        moved = (scalars["engine"].get("module") or {}).get("buffers", {}).get(name)
        if moved is not None:
            values = moved["values"]
            return values.as_strided(moved["shape"], moved["stride"])
        record = manifest.others[name]
        return self._read(file_name(rank, "extra"), f"other/{name}", record.shape, record.dtype).clone()

    def _frozen(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Whole on every rank that has it, or in parts, each of which records where it lies."""
        ranks = [rank for rank, manifest in enumerate(self._ranks) if name in _outside(manifest)]
        records = [(rank, self._ranks[rank].frozen.get(name)) for rank in ranks]
        known = [(rank, one) for rank, one in records if one is not None]
        if any(one.global_shape is not None for _, one in known):
            pieces = ((rank, one.offset or 0, self._other(rank, name).reshape(-1)) for rank, one in known)
            return self._joined(name, math.prod(shape), pieces).view(shape)
        if ranks and (first := self._other(ranks[0], name)).shape == shape:
            return first
        raise UnsupportedEngineError(
            f"{self.info.directory}: no rank saved the frozen parameter {name} whole, or where its part of the shape "
            f"{shape} lies. Nothing was exported"
        )

    def _read(self, file: str, key: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """A tensor of an open file, which must be as its manifest describes it."""
        path = self.info.directory / file
        try:
            found: torch.Tensor = self._files[file].get_tensor(key)
        except SafetensorError as error:
            raise DamagedFileError(path, f"lacks {key}, which its manifest lists ({error})") from error
        if found.shape != shape or str(found.dtype) != f"torch.{dtype}":
            raise DamagedFileError(
                path, f"holds {key} as {found.dtype} {tuple(found.shape)}, its manifest has {dtype} {shape}"
            )
        return found


def open_whole(run_dir: Path, iteration: int | None, *, moments: bool) -> WholeState:
    """Open a committed checkpoint, with the hash of every file that is used checked first.

    Args:
        run_dir: the run.
        iteration: of the checkpoint; None is the newest whole one.
        moments: the optimizer's tensors are needed too.

    Raises:
        CheckpointError: there is no such checkpoint, or it was thinned to its weights.
        CheckpointCorruptError: a file of it is damaged; the message names it.
        UnsupportedEngineError: what its ranks hold does not make up one model; the message names it.
        RunMismatchError: it is of another run than `run.json`, or `run_dir` is no run directory.
    """
    identity = _read_identity(run_dir)
    info = _choose(run_dir / "checkpoints", iteration)
    try:
        return _open(info, identity, moments=moments)
    except DamagedFileError as error:
        if (info.directory / COMMIT).exists():
            raise
        raise CheckpointError(f"{info.directory} was deleted while it was read; export a newer checkpoint") from error


def _read_identity(run_dir: Path) -> RunIdentity:
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
        what: object = error
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise CPSRError(f"{path} cannot be used ({what}): it is damaged. Restore it from a copy") from error
    if identity.engine == "PipelineEngine":
        raise UnsupportedEngineError(
            f"{run_dir} is a run of a pipeline, whose layout no format of the export has. Nothing was exported"
        )
    return identity


def _choose(checkpoints: Path, iteration: int | None) -> CheckpointInfo:
    catalogue = scan(checkpoints)
    found = [info for info in catalogue.checkpoints if info.full and iteration in (None, info.iteration)]
    if found:
        return found[-1]
    for problem in catalogue.problems:
        if problem.iteration == iteration:
            raise DamagedFileError(problem.file, problem.what)
    for problem in catalogue.unreadable:
        if iteration is None or problem.iteration == iteration:
            raise UnreadableFileError(problem.file, problem.what)
    whole = [info.iteration for info in catalogue.checkpoints if info.full]
    wanted = "whole checkpoint" if iteration is None else f"whole checkpoint of iteration {iteration}"
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
    kinds: tuple[Literal["params", "moments", "extra"], ...] = ("params", "extra", *(("moments",) if moments else ()))
    wanted = [file_name(record.rank, kind) for record in records for kind in kinds]
    wanted += sorted({file for record in records for file in record.frozen_files()})
    described = {name: one for record in records for name, one in record.files.items()}
    for name in wanted:
        if name not in described:
            raise DamagedFileError(info.directory / name, "is not listed in its manifest")
        check_file(info.directory / name, described[name])
    return WholeState(info, identity, records, {name: open_tensors(info.directory / name) for name in wanted})


def _outside(record: RankManifest) -> list[str]:
    """Buffers and frozen parameters."""
    return [*record.others, *record.frozen]


def _require_name(directory: Path, name: str) -> None:
    """Refuse names that are not one entry of a directory, and those of MoE layers."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UnsupportedEngineError(f"{directory}: {name!r} cannot be the name of a folder. Nothing was exported")
    if any(mark in f".{name}." for mark in _EXPERTS):
        raise UnsupportedEngineError(
            f"{directory}: {name} belongs to an MoE layer, which is not exported yet; the checkpoint itself is whole, "
            "and its job restarts from it. Nothing was exported"
        )


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
    found |= {name: tensor for name, tensor in state.outside().items() if name not in module.transient}
    if precision == "fp32":
        found = {name: _widened(tensor) for name, tensor in found.items()}
    return found | {alias: found[name].clone() for alias, name in module.aliases.items() if name in found}


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < torch.float32.itemsize else tensor
