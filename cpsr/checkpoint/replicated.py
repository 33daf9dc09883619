"""Replicated operators: several ranks hold the same operator. One of each machine copies it, and one writes it for all.

With ZeRO-0 and DDP all ranks of a data-parallel group hold the same weights and moments. One rank writes each
operator. The other ranks' manifests describe it, too, and name that rank: a manifest lists all operators of its rank,
and loading reads the files of several ranks.

Every rank puts the hash of each replicated operator into its manifest. Rank 0 commits nothing if two hashes differ.
Between checkpoints each rank hashes a few elements of each, by which a restart joins only what belongs together.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
import xxhash

from cpsr.checkpoint.boundary import as_integers
from cpsr.checkpoint.manifest import RankManifest, writer_of
from cpsr.checkpoint.parts import REST, Parts
from cpsr.errors import SaveError
from cpsr.state.shard import OperatorState, Shard

__all__ = ["DriftedError", "Samples", "missing_among", "refuse_drifted", "state_hash"]

SAMPLED_ELEMENTS = 64  # of each tensor


class DriftedError(SaveError):
    """Replicas of an operator differ between two ranks, so that no rank can write for another."""


def state_hash(operator: OperatorState) -> str:
    """xxh3-128 of an operator's weights and moments on the host, in hexadecimal."""
    state = xxhash.xxh3_128()
    for values in (operator.parameter.values, *(operator.moments[key] for key in sorted(operator.moments))):
        state.update(values.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return str(state.hexdigest())


class Samples:
    """Hashes of evenly spread elements of what ranks share, of shards on the host.

    Ranks that train apart differ in most elements; a single one that differs is found at the next checkpoint.
    """

    def __init__(self) -> None:
        self._operators: dict[str, OperatorState] = {}
        self._views: dict[str, dict[Any, list[Any]]] = {}  # of each part, by element type: one call packs them

    def of(self, shard: Shard, parts: Parts) -> dict[str, str]:
        """Part -> xxh3-64 of these elements of its weights and moments, in hexadecimal; always of the same parts."""
        if shard.operators is not self._operators:  # tensors were replaced
            self._prepare(shard, parts)
        found = dict[str, str]()
        for part, views in self._views.items():
            state = xxhash.xxh3_64()
            for alike in views.values():
                state.update(numpy.concatenate(alike).data)
            found[part] = state.hexdigest()
        return found

    def _prepare(self, shard: Shard, parts: Parts) -> None:
        self._operators, self._views = shard.operators, {}
        for name, one in shard.operators.items():
            if (part := parts.of(name)) != REST:
                views = self._views.setdefault(part, {})
                for values in (one.parameter.values, *(one.moments[key] for key in sorted(one.moments))):
                    integers = as_integers(values.detach())
                    step = max(1, len(integers) // SAMPLED_ELEMENTS)
                    views.setdefault(integers.dtype, []).append(integers[::step])


def missing_among(records: Mapping[int, RankManifest]) -> Iterator[tuple[int, str]]:
    """State that ranks left to others which did not write it: the rank, and what is wrong, as a clause.

    Args:
        records: of all ranks; state of an absent rank is not judged.
    """
    for rank, record in records.items():
        for file, names in record.frozen_files().items():
            writer = writer_of(file)
            listed = file in record.files or (writer in records and file in records[writer].files)
            if not listed and (writer in records or writer >= record.world_size):
                yield rank, f"leaves {min(names)!r} to rank {writer}, which did not save {file}"
        for name, one in record.operators.items():
            if one.saved_by is None or (one.saved_by not in records and one.saved_by < record.world_size):
                continue
            written = records[one.saved_by].operators.get(name) if one.saved_by in records else None
            if written is None or written.saved_by is not None or not written.is_same_state(one):
                yield (
                    rank,
                    f"leaves {name!r} of iteration {one.iteration} to rank {one.saved_by}, which did not save it",
                )


def refuse_drifted(records: Mapping[int, RankManifest]) -> None:
    """Compare the hashes of each operator on its writer and on the ranks that left it to the writer.

    Raises:
        DriftedError: two differ.
    """
    for rank, record in records.items():
        for name, one in record.operators.items():
            if one.saved_by is not None and one.xxh3_128 != records[one.saved_by].operators[name].xxh3_128:
                raise DriftedError(
                    f"ranks {one.saved_by} and {rank} should hold the same of {name!r}, as ranks that train on "
                    f"different data in one data-parallel group do, and differ at iteration {one.iteration}"
                )
