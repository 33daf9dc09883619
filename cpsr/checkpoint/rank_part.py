"""One rank's part of a checkpoint: its tensor files, carried files, operators in other ranks' files, its manifest."""

from collections.abc import Callable
from pathlib import Path

import torch

from cpsr.checkpoint.carried import CarriedFiles
from cpsr.checkpoint.commit import Attempt
from cpsr.checkpoint.files import sync_directory, write_bytes, write_tensors
from cpsr.checkpoint.frozen_files import FrozenFiles, FrozenLinks, FrozenPart
from cpsr.checkpoint.loading import SCALARS, operator_record, tensor_record
from cpsr.checkpoint.manifest import OperatorRecord, RankManifest, file_name, rank_manifest_name
from cpsr.checkpoint.replicated import records_of_others, state_hash
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.tensor_file import in_memory_order
from cpsr.state.codec import encode
from cpsr.state.shard import Shard

__all__ = ["RankPartWriter"]


class RankPartWriter:
    """Writes this rank's parts, and remembers them for checkpoints that carry files.

    Args:
        rank: this one.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._carried = CarriedFiles()

    def remove(self, directory: Path) -> None:
        """Remove this rank's files of an uncommitted step, its manifest first."""
        (directory / rank_manifest_name(self._rank)).unlink(missing_ok=True)
        prefixes = (f"rank-{self._rank:05d}.", f".rank-{self._rank:05d}.")
        for path in list(directory.iterdir()) if directory.is_dir() else []:
            if path.name.startswith(prefixes):
                path.unlink(missing_ok=True)

    def write(
        self,
        directory: Path,
        snapshot: Snapshot,
        attempt: Attempt,
        refuse_abandoned: Callable[[], None],
        frozen: FrozenFiles | FrozenLinks | None = None,
    ) -> int:
        """Write the files of one part, its manifest last; returns the bytes that were new.

        Args:
            directory: of the checkpoint.
            snapshot: what to write.
            attempt: of the save.
            refuse_abandoned: raises where rank 0 has abandoned it; called before each file.
            frozen: files of the parameters outside the optimizer; None: there are none.

        Raises:
            SaveError: from `refuse_abandoned`; or what was read back differs, or something cannot be carried.
            OSError: the file system refused.
        """
        contents, shard = snapshot.contents, snapshot.contents.written(snapshot.shard)
        refuse_abandoned()
        outside = FrozenPart(snapshot.scalars)
        if frozen is not None:
            outside = frozen.write(directory, snapshot.scalars, refuse_abandoned)
        data, scalar_tensors = encode(outside.scalars, prefix=SCALARS)
        same = attempt.life, attempt.attempt
        files, operators = self._carried.put_into(directory, same, contents)
        operators |= records_of_others(contents, snapshot.shard, snapshot.iteration, self._carried.newest(same))
        written, files = outside.written_bytes, files | outside.files
        for name, part in _files(self._rank, snapshot, scalar_tensors).items():
            refuse_abandoned()
            files[name] = write_tensors(directory / name, part)
            written += files[name].bytes
        sync_directory(directory)
        manifest = RankManifest(
            run_id=attempt.run_id,
            life=attempt.life,
            attempt=attempt.attempt,
            rank=self._rank,
            world_size=attempt.world_size,
            iteration=snapshot.iteration,
            operators=_described(snapshot) | operators,
            others={name: tensor_record(tensor) for name, tensor in shard.others.items()},
            frozen=outside.records,
            files=files,
            scalars=data,
        )
        write_bytes(directory / rank_manifest_name(self._rank), manifest.to_bytes())
        self._carried.record(directory, manifest)
        return written


def _described(snapshot: Snapshot) -> dict[str, OperatorRecord]:
    """Records of the written operators, with hashes of those that other ranks hold, too."""
    contents = snapshot.contents
    return {
        name: operator_record(one, state_hash(one) if name in contents.replicated else None)
        for name, one in contents.written(snapshot.shard).operators.items()
    }


def _files(
    rank: int, snapshot: Snapshot, scalar_tensors: dict[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    """File -> the tensors to write into it."""
    contents = snapshot.contents
    written = contents.written(snapshot.shard)
    tensors = dict(contents.without_experts(written).tensors())
    files = {
        file_name(rank, "params"): _of_kind(tensors, "param/"),
        file_name(rank, "moments"): _of_kind(tensors, "moment/"),
        file_name(rank, "extra"): _of_kind(tensors, "other/") | scalar_tensors,
    }
    experts = dict(Shard({k: one for k, one in written.operators.items() if k in contents.experts}).tensors())
    if experts:
        files[file_name(rank, "params", snapshot.iteration)] = _of_kind(experts, "param/")
        files[file_name(rank, "moments", snapshot.iteration)] = _of_kind(experts, "moment/")
    return files


def _of_kind(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of a kind as they follow each other in memory, from which they are written."""
    return in_memory_order({key: tensor.contiguous() for key, tensor in tensors.items() if key.startswith(prefix)})
