"""One committed checkpoint with the ranks' slices put together."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from cpsr.checkpoint.assemble import Piece, Slab, Wanted, assemble
from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.manifest import COMMIT, OperatorRecord, RankManifest, rank_manifest_name
from cpsr.checkpoint.saved import FileSlab, SavedCheckpoint
from cpsr.checkpoint.verify import DamagedFileError, read_manifest
from cpsr.errors import CheckpointError, CPSRError, RunMismatchError, UnsupportedEngineError
from cpsr.state.codec import same_bits

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
    """A checkpoint over all ranks; tensors are read, verified and put together one at a time, when they are asked for.

    Args:
        saved: the checkpoint.
        identity: the run's.

    Attributes:
        saved, identity: as given.
        parameters: names of the trained parameters, in the order in which they are saved.
    """

    def __init__(self, saved: SavedCheckpoint, identity: RunIdentity) -> None:
        self.saved, self.identity = saved, identity
        self._ranks = [saved.record(rank) for rank in range(saved.manifest.world_size)]
        self._operators = self._described_operators()
        self._slabs: dict[str, dict[object, Slab]] = {}  # key -> those that hold it, each once
        for number, slab in enumerate(saved.slabs(range(len(self._ranks)))):
            for key in slab.pieces:
                place = slab.file.path if isinstance(slab, FileSlab) else number
                self._slabs.setdefault(key, {}).setdefault(place, slab)
        self.parameters = list(self._operators)
        self._moved_buffers: dict[str, Any] | None = None

    def moments(self, name: str) -> dict[str, str]:
        """Moment -> dtype of one trained parameter."""
        return self._operators[name].moments

    def weights(self, name: str) -> torch.Tensor:
        """A trained parameter, of its whole shape, in the dtype of the authoritative copy.

        Raises:
            CheckpointCorruptError: the content of a file differs from its manifest.
            UnsupportedEngineError: the ranks' slices do not make up one tensor.
        """
        return self._whole(name, f"param/{name}")

    def moment(self, name: str, moment: str) -> torch.Tensor:
        """One of the optimizer's tensors of a trained parameter, of the parameter's shape; errors as of `weights`."""
        return self._whole(name, f"moment/{moment}/{name}")

    def outside(self) -> dict[str, torch.Tensor]:
        """Buffers and frozen parameters, by name; a buffer is rank 0's, as it is in the engine's own checkpoints.

        Raises:
            CheckpointCorruptError: the content of a file differs from its manifest.
            UnsupportedEngineError: the ranks' slices of a frozen parameter do not make up one tensor.
        """
        frozen, own = self.identity.module.frozen, _outside(self._ranks[0])
        absent = sorted(frozen.keys() - set(own)) if self.identity.engine == "torch" else []
        return {
            name: self._frozen(name, frozen[name]) if name in frozen else self._buffer(name) for name in [*own, *absent]
        }

    def scalars(self, rank: int = 0) -> dict[str, Any]:
        """A rank's small state.

        Raises:
            CheckpointCorruptError: it cannot be decoded.
        """
        found = self.saved.small_state(rank)
        if not isinstance(found, dict):
            path = self.saved.directory / rank_manifest_name(rank, self.saved.manifest.save)
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
                    f"{self.saved.directory}: {blocks[0]} is split in blocks over the ranks (tensor parallelism), "
                    "which no format of the export has. Nothing was exported"
                )
            for name, record in manifest.operators.items():
                _require_name(self.saved.directory, name)
                first = found.setdefault(name, record)
                theirs, ours = ((one.global_shape, one.dtype, one.moments) for one in (first, record))
                if theirs != ours:
                    raise UnsupportedEngineError(
                        f"{self.saved.directory}: {name} is not one tensor: rank {rank} saved slices of another shape "
                        f"or dtype {ours} than the ranks before it {theirs}. Nothing was exported"
                    )
        for name in _outside(self._ranks[0]):
            _require_name(self.saved.directory, name)
        return found

    def _whole(self, name: str, key: str) -> torch.Tensor:
        """A trained parameter, or a tensor of its optimizer, in its own order of elements."""
        shape, stride = self._operators[name].global_shape, self.identity.module.strides.get(name)
        slabs = list(self._slabs[key].values())
        flat = self._joined(key, slabs, shape)
        for slab in slabs:
            self._refuse_other_values(key, slab, flat)
        if stride is None:
            return flat.view(shape)
        try:  # run.json may hold anything: torch refuses what lies outside of `flat`
            return flat.as_strided(shape, stride).contiguous()
        except RuntimeError as error:
            raise UnsupportedEngineError(
                f"run.json gives {name} of shape {shape} impossible strides {stride}"
            ) from error

    def _joined(self, key: str, slabs: Sequence[Slab], shape: tuple[int, ...]) -> torch.Tensor:
        """The flattened whole of what these hold of a tensor."""
        total, name = math.prod(shape), key.rpartition("/")[2]
        where = self.saved.directory
        pieces = [slab.pieces[key] for slab in slabs if slab.pieces[key].numel]
        distinct = {(one.start, one.numel) for one in pieces}
        there = sum(numel for _, numel in distinct)
        if there != total or any(one.shape != shape for one in pieces):
            raise UnsupportedEngineError(
                f"{where}: the slices of {name} that the ranks saved do not make up its {total} elements: {there} are "
                "there, or some overlap. Nothing was exported"
            )
        flat = torch.empty(total, dtype=slabs[0].pieces[key].dtype, device="cpu")
        piece = Piece(shape, flat.dtype, 0, total)
        assemble(slabs, {key: Wanted(piece, flat)}, where)
        return flat

    def _refuse_other_values(self, key: str, slab: Slab, flat: torch.Tensor) -> None:
        """Compare a range that several ranks saved with what was read of the first of them."""
        piece = slab.pieces[key]
        alike = [one for one in self._slabs[key].values() if one.pieces[key] == piece]
        if alike[0] is slab or not piece.numel:
            return
        own = self._of_one(key, slab)
        if not same_bits(own, flat[piece.start : piece.start + piece.numel]):
            raise UnsupportedEngineError(
                f"{self.saved.directory}: rank {slab.rank} holds other values of {key.rpartition('/')[2]} than the "
                "ranks before it: the name stands for different tensors (experts or tensor-parallel parts), or the "
                "ranks have drifted apart. Nothing was exported"
            )

    def _of_one(self, key: str, slab: Slab) -> torch.Tensor:
        """What one slab holds of a tensor, flattened."""
        piece = slab.pieces[key]
        values = torch.empty(piece.numel, dtype=piece.dtype, device="cpu")
        assemble([slab], {key: Wanted(piece, values)}, self.saved.directory)
        return values

    def _buffer(self, name: str) -> torch.Tensor:
        """A buffer of rank 0. One that has had another layout than at the start of its life is in the small state."""
        if self._moved_buffers is None:
            self._moved_buffers = (self.scalars()["engine"].get("module") or {}).get("buffers", {})
        moved = self._moved_buffers.get(name)
        if moved is not None:
            values: torch.Tensor = moved["values"]
            return values.as_strided(moved["shape"], moved["stride"])
        slab = next(slab for slab in self._slabs[f"other/{name}"].values() if slab.rank == 0)
        return self._of_one(f"other/{name}", slab).view(slab.pieces[f"other/{name}"].shape)

    def _frozen(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Whole on every rank that has it, or in parts; or among the buffers."""
        key = f"frozen/{name}"
        if key not in self._slabs and f"other/{name}" in self._slabs:
            key = f"other/{name}"
        slabs = list(self._slabs.get(key, {}).values())
        if slabs and all(slab.pieces[key].shape == shape for slab in slabs):
            flat = self._joined(key, slabs, shape)
            for slab in slabs:
                if slab.pieces[key].numel != flat.numel():  # of whole ones rank 0's counts, as of buffers
                    self._refuse_other_values(key, slab, flat)
            return flat.view(shape)
        raise UnsupportedEngineError(
            f"{self.saved.directory}: no rank saved the frozen parameter {name} whole, or where its part of the shape "
            f"{shape} lies. Nothing was exported"
        )


def open_whole(run_dir: Path, iteration: int | None, *, moments: bool = True) -> WholeState:
    """Open a committed checkpoint. Its files stay open: a running job may delete it meanwhile.

    Args:
        run_dir: the run.
        iteration: of the checkpoint; None is the newest whole one.
        moments: the optimizer's tensors are needed too.

    Raises:
        CheckpointError: there is no such checkpoint, or it was thinned to its weights.
        CheckpointCorruptError: a file that is needed is missing, or a manifest damaged; the message names it.
        UnsupportedEngineError: what its ranks hold does not make up one model; the message names it.
        RunMismatchError: it is of another run than `run.json`, or `run_dir` is no run directory.
    """
    identity = _read_identity(run_dir)
    info = _choose(run_dir / "checkpoints", iteration)
    try:
        return _open(info, identity, moments=moments)
    except DamagedFileError as error:
        if not _is_gone(info):
            raise
        what = f"{info.directory} was deleted, replaced, or thinned to its weights, while it was read"
        raise CheckpointError(f"{what}; export a newer checkpoint") from error


def _is_gone(info: SavedCheckpoint) -> bool:
    """Whether retention or another save was there meanwhile."""
    try:
        return read_manifest(info.directory).listing != info.listing
    except DamagedFileError:
        return not (info.directory / COMMIT).exists()


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


def _choose(checkpoints: Path, iteration: int | None) -> SavedCheckpoint:
    catalogue = scan(checkpoints)
    found = [info for info in catalogue.checkpoints if info.full and iteration in (None, info.iteration)]
    if found:
        return found[-1]
    for problem in [*catalogue.problems, *catalogue.unreadable]:
        if problem.iteration == iteration or (iteration is None and problem in catalogue.unreadable):
            raise problem
    whole = [info.iteration for info in catalogue.checkpoints if info.full]
    wanted = "whole checkpoint" if iteration is None else f"whole checkpoint of iteration {iteration}"
    raise CheckpointError(f"{checkpoints} holds no {wanted}; whole ones are {whole or 'none'}. Nothing was exported")


def _open(info: SavedCheckpoint, identity: RunIdentity, *, moments: bool) -> WholeState:
    saved = SavedCheckpoint(info.directory, info.manifest, records=None)
    if saved.manifest.run_id != identity.run_id:
        raise CheckpointError(
            f"{info.directory} is of the run {saved.manifest.run_id!r}, run.json of {identity.run_id!r}"
        )
    if any(saved.record(rank).sparse for rank in range(saved.manifest.world_size)):
        raise UnsupportedEngineError(
            f"{info.directory} was saved with experts.policy, of a mixture of experts, which is not exported yet; the "
            "checkpoint itself is whole, and its job restarts from it. Nothing was exported"
        )
    records = [saved.record(rank) for rank in range(saved.manifest.world_size)]
    names = {name for record in records for name in record.files}
    saved.hold(sorted(name for name in names if moments or ".moments-" not in name))
    return WholeState(saved, identity)


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
