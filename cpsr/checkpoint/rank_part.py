"""One rank's part of a checkpoint: tensor files, and operators that lie in files of earlier ones or of other ranks.

In a *sparse* checkpoint of a mixture every rank writes all but some experts, and links the files with those. Experts
have their own files, named after the iteration at which they were saved::

    rank-00000.params.safetensors                       what every token passes, of this checkpoint
    rank-00000.experts-0000000100.params.safetensors    experts of this checkpoint, 100
    rank-00000.experts-0000000080.params.safetensors    a link to what checkpoint 80 wrote, for those not saved since

A file is carried until every expert in it was saved again. So every sparse checkpoint holds every operator, and can
be verified, loaded and deleted like any other. The manifest gives each operator's iteration, which names its file;
the same operator in an older file is out of date.
"""

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.commit import Attempt
from cpsr.checkpoint.files import link_file, sync_directory, write_bytes, write_tensors
from cpsr.checkpoint.frozen_files import FrozenFiles, FrozenLinks, FrozenPart
from cpsr.checkpoint.host_snapshot import Contents
from cpsr.checkpoint.manifest import (
    FileRecord,
    OperatorRecord,
    RankManifest,
    expert_files,
    file_name,
    rank_manifest_name,
)
from cpsr.checkpoint.replicated import state_hash
from cpsr.checkpoint.saved import SCALARS, operator_record, tensor_record
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.tensor_file import in_memory_order
from cpsr.errors import SaveError
from cpsr.state.codec import encode
from cpsr.state.shard import Shard

__all__ = ["RankPartWriter"]

# Parts that are searched for carried files, newest first; retention never removes the newest two.
_REMEMBERED_PARTS = 8


class RankPartWriter:
    """Writes this rank's parts, and remembers where those of this life are durable.

    Nothing is carried from an earlier life, or from a state before a roll-back. Where the newest checkpoint was
    abandoned, the files before it are the newest.

    Args:
        rank: this one.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._parts: deque[tuple[Path, RankManifest]] = deque(maxlen=_REMEMBERED_PARTS)  # newest first

    def remove(self, directory: Path) -> None:
        """Remove this rank's files of an uncommitted step, its manifest first; that it was skipped stays marked."""
        (directory / rank_manifest_name(self._rank)).unlink(missing_ok=True)
        prefixes = (f"rank-{self._rank:05d}.", f".rank-{self._rank:05d}.")
        for path in list(directory.iterdir()) if directory.is_dir() else []:
            if path.name.startswith(prefixes) and path.suffix != ".skip":
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
        refuse_abandoned()
        if snapshot.sealed is not None:
            snapshot.sealed.result()  # has hashed the buffer by then
        outside = FrozenPart(snapshot.scalars)
        if frozen is not None:
            outside = frozen.write(directory, snapshot.scalars, refuse_abandoned)
        data, scalar_tensors = encode(outside.scalars, prefix=SCALARS)
        files, operators = self._carry(directory, snapshot.contents, attempt)
        operators |= self._of_others(snapshot, attempt)
        files |= outside.files
        new_bytes = outside.written_bytes
        for name, tensors in _files(self._rank, snapshot, scalar_tensors).items():
            refuse_abandoned()
            files[name] = write_tensors(directory / name, tensors, hashed=snapshot.hashed)
            new_bytes += files[name].bytes
        sync_directory(directory)
        manifest = RankManifest(
            run_id=attempt.run_id,
            life=attempt.life,
            attempt=attempt.attempt,
            rank=self._rank,
            world_size=attempt.world_size,
            iteration=snapshot.iteration,
            operators=_written_operators(snapshot) | operators,
            others={name: tensor_record(tensor) for name, tensor in snapshot.shard.others.items()},
            frozen=outside.records,
            files=files,
            scalars=data,
        )
        write_bytes(directory / rank_manifest_name(self._rank), manifest.to_bytes())
        self._parts.appendleft((directory, manifest))
        return new_bytes

    def _earlier(self, attempt: Attempt) -> list[tuple[Path, RankManifest]]:
        """Parts of this attempt, the newest first."""
        same = attempt.life, attempt.attempt
        return [part for part in self._parts if (part[1].life, part[1].attempt) == same]

    def _carry(
        self, directory: Path, contents: Contents, attempt: Attempt
    ) -> tuple[dict[str, FileRecord], dict[str, OperatorRecord]]:
        """Link the files of carried operators; returns their records, and the operators' as they were taken."""
        carried = contents.carried_here
        for source, part in self._earlier(attempt) if carried else ():
            known = {name: part.operators[name] for name in carried if name in part.operators}
            operators = {name: one for name, one in known.items() if one.saved_by is None}  # else it is not here
            if len(operators) < len(carried):
                break
            ages = sorted({one.iteration for one in operators.values()})
            files = {name: part.files[name] for age in ages for name in expert_files(self._rank, age)}
            try:
                for name, record in files.items():
                    link_file(source / name, directory / name, record)
            except FileNotFoundError:
                continue  # it was abandoned, or retention was there; the commit removes what was linked
            return files, operators
        if carried:
            raise SaveError(
                f"{directory}: {len(carried)} parameters of experts are not saved now, and were not saved since the "
                f"run went on either (the first is {min(carried)}); the next checkpoint must save all experts"
            )
        return {}, {}

    def _of_others(self, snapshot: Snapshot, attempt: Attempt) -> dict[str, OperatorRecord]:
        """Records of the operators that other ranks write; those of carried ones are of the part before."""
        contents = snapshot.contents
        before: Mapping[str, OperatorRecord] = next((part.operators for _, part in self._earlier(attempt)), {})
        found: dict[str, OperatorRecord] = {}
        for name, writer in contents.writers.items():
            if name not in contents.carried:
                xxh3_128 = state_hash(snapshot.shard.operators[name])
                taken: dict[str, Any] = {"iteration": snapshot.iteration, "saved_by": writer, "xxh3_128": xxh3_128}
                taken["apart"] = name in contents.experts or None
                found[name] = contents.replicated[name].model_copy(update=taken)
            elif name in before and before[name].saved_by == writer:
                found[name] = before[name]
            else:
                raise SaveError(
                    f"{name!r} is not saved now, and rank {writer} was not to save it since the run went on either; "
                    "the next checkpoint must save all experts"
                )
        return found


def _written_operators(snapshot: Snapshot) -> dict[str, OperatorRecord]:
    """Records of the written operators, with hashes of those that other ranks hold, too."""
    contents = snapshot.contents
    return {
        name: operator_record(
            one, state_hash(one) if name in contents.replicated else None, apart=name in contents.experts
        )
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
