"""One rank's part of a checkpoint: the slabs that it writes, and older ones and those of other ranks that it lists.

In a *sparse* checkpoint of a mixture every rank writes all but some experts, and lists the slabs with those. Experts
have their own slabs, named after the iteration at which they were saved::

    rank-00000.params-0000000100-0.0.safetensors           what every token passes, of this checkpoint
    rank-00000.expert-params-0000000100-0.0.safetensors    experts of this checkpoint, 100
    rank-00000.expert-params-0000000080-0.0.safetensors    of checkpoint 80: experts that were not saved since

A slab is carried until every expert in it was saved again. So every sparse checkpoint has every operator, and can be
verified, loaded and deleted like any other. The manifest gives each operator's iteration, which names its slab; the
same operator in an older slab is out of date.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from cpsr.checkpoint.commit import Attempt
from cpsr.checkpoint.files import make_directory, sync_directory, write_bytes, write_tensors
from cpsr.checkpoint.frozen_files import FrozenFiles, FrozenPart
from cpsr.checkpoint.host_snapshot import Contents
from cpsr.checkpoint.manifest import (
    FileRecord,
    OperatorRecord,
    RankManifest,
    Save,
    rank_manifest_name,
    slab_name,
    slab_path,
)
from cpsr.checkpoint.replicated import state_hash
from cpsr.checkpoint.saved import operator_record, tensor_record
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.tensor_file import in_memory_order
from cpsr.errors import SaveError
from cpsr.state.codec import SCALARS, encode
from cpsr.state.shard import Shard

__all__ = ["RankPartWriter"]

# Parts that are searched for carried slabs, newest first; retention never removes the newest two.
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
        self._parts: deque[RankManifest] = deque(maxlen=_REMEMBERED_PARTS)  # newest first

    def write(
        self,
        snapshot: Snapshot,
        attempt: Attempt,
        frozen: FrozenFiles | None = None,
        outside: FrozenPart | None = None,
    ) -> int:
        """Write the slabs of one part, and its manifest last; returns the bytes that were new.

        Args:
            snapshot: what to write.
            attempt: of the save.
            frozen: slabs of the parameters outside the optimizer; None: there are none.
            outside: what is listed of these parameters, where nothing of them is to be written.

        Raises:
            SaveError: rank 0 has abandoned it, what was read back differs, or something cannot be carried.
            SupersededError: a newer life has begun.
            OSError: the file system refused.
        """
        directory, save = attempt.directory, attempt.save
        make_directory(slab_path(directory, ""))
        if snapshot.sealed is not None:
            snapshot.sealed.result()  # has hashed the buffer by then
        if outside is None and frozen is not None:
            outside = frozen.write(attempt, snapshot.scalars)
        outside = outside or FrozenPart(snapshot.scalars)
        known = snapshot.encoded if outside.scalars is snapshot.scalars else None
        data, scalar_tensors = known or encode(outside.scalars, prefix=SCALARS)
        files, operators = self._carry(snapshot.contents, attempt)
        operators |= self._of_others(snapshot, attempt)
        files |= outside.files
        new_bytes = outside.written_bytes
        for name, tensors in _slabs(self._rank, save, snapshot, scalar_tensors).items():
            attempt.refuse_ended(self._rank)
            files[name] = write_tensors(slab_path(directory, name), tensors, hashed=snapshot.hashed)
            new_bytes += files[name].bytes
        sync_directory(slab_path(directory, ""))
        manifest = RankManifest(
            run_id=attempt.run_id,
            life=save.life,
            attempt=save.attempt,
            rank=self._rank,
            world_size=attempt.world_size,
            iteration=save.iteration,
            operators=_written_operators(snapshot) | operators,
            others={name: tensor_record(tensor) for name, tensor in snapshot.shard.others.items()},
            frozen=outside.records,
            files=files,
            scalars=data,
        )
        write_bytes(directory / rank_manifest_name(self._rank, save), manifest.to_bytes())
        self._parts.appendleft(manifest)
        return new_bytes

    def _earlier(self, attempt: Attempt) -> list[RankManifest]:
        """Parts of this attempt, the newest first."""
        return [part for part in self._parts if part.save[1:] == attempt.save[1:]]

    def _carry(self, contents: Contents, attempt: Attempt) -> tuple[dict[str, FileRecord], dict[str, OperatorRecord]]:
        """The slabs with carried operators, and the operators' records as they were taken."""
        carried = contents.carried_here
        for part in self._earlier(attempt) if carried else ():
            known = {name: part.operators[name] for name in carried if name in part.operators}
            operators = {name: one for name, one in known.items() if one.saved_by is None}  # else it is not here
            if len(operators) < len(carried):
                break
            saves = sorted({part.save._replace(iteration=one.iteration) for one in operators.values()})
            names = [
                slab_name(self._rank, kind, save) for save in saves for kind in ("expert-params", "expert-moments")
            ]
            if all(slab_path(attempt.directory, name).exists() for name in names):  # else it was abandoned
                return {name: part.files[name] for name in names}, operators
        if carried:
            raise SaveError(
                f"{attempt.directory}: {len(carried)} parameters of experts are not saved now, and were not saved "
                f"since the run went on either (the first is {min(carried)}); the next checkpoint must save all experts"
            )
        return {}, {}

    def _of_others(self, snapshot: Snapshot, attempt: Attempt) -> dict[str, OperatorRecord]:
        """Records of the operators that other ranks write; those of carried ones are of the part before."""
        contents = snapshot.contents
        before: Mapping[str, OperatorRecord] = next((part.operators for part in self._earlier(attempt)), {})
        found: dict[str, OperatorRecord] = {}
        for name, writer in contents.writers.items():
            if name not in contents.carried:
                xxh3_128 = snapshot.state_hashes.get(name) or state_hash(snapshot.shard.operators[name])
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
    contents, found = snapshot.contents, dict[str, OperatorRecord]()
    for name, one in contents.written(snapshot.shard).operators.items():
        xxh3_128 = (snapshot.state_hashes.get(name) or state_hash(one)) if name in contents.replicated else None
        found[name] = operator_record(one, xxh3_128, apart=name in contents.experts)
    return found


def _slabs(
    rank: int, save: Save, snapshot: Snapshot, scalar_tensors: dict[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    """New slab -> the tensors to write into it."""
    contents = snapshot.contents
    written = contents.written(snapshot.shard)
    tensors = dict(contents.without_experts(written).tensors())
    files = {}
    if snapshot.shard.operators:  # a resumable function has none
        files[slab_name(rank, "params", save)] = _of_kind(tensors, "param/")
        files[slab_name(rank, "moments", save)] = _of_kind(tensors, "moment/")
    files[slab_name(rank, "extra", save)] = _of_kind(tensors, "other/") | scalar_tensors
    experts = dict(Shard({k: one for k, one in written.operators.items() if k in contents.experts}).tensors())
    if experts:
        files[slab_name(rank, "expert-params", save)] = _of_kind(experts, "param/")
        files[slab_name(rank, "expert-moments", save)] = _of_kind(experts, "moment/")
    return files


def _of_kind(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of a kind as they follow each other in memory, from which they are written."""
    return in_memory_order({key: tensor.contiguous() for key, tensor in tensors.items() if key.startswith(prefix)})
