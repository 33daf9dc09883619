"""Loads a checkpoint that another number of ranks saved."""

import logging
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from cpsr.checkpoint.frozen_files import FrozenFiles
from cpsr.checkpoint.manifest import Manifest
from cpsr.checkpoint.resharding import load_buffers, load_resharded, load_resharded_frozen, read_small_state
from cpsr.elastic.small_state import differing, require_alike, small_state_of
from cpsr.engines.adapter import EngineAdapter
from cpsr.state.shard import Shard

__all__ = ["Resharding"]

logger = logging.getLogger(__name__)


class Resharding:
    """One rank's way to load a checkpoint of another number of ranks; each rank reads what it needs by itself.

    Rank r takes the small state and the buffers of rank r modulo the old number. Buffers of layers and experts that
    this one did not have come from another. Stages in the middle of a pipeline are dealt no batches: there all ranks
    take the position of the one that was dealt most. Rank 0 also compares the small states of all old ranks.
    """

    def __init__(self, adapter: EngineAdapter, frozen: FrozenFiles | None) -> None:
        self._adapter = adapter
        self._frozen = frozen

    def load(self, directory: Path, manifest: Manifest, into: Shard) -> dict[str, Any]:
        """Fill the views of `into` and return the small state; see `CheckpointStore.load` for what it raises."""
        rank, saved_by = self._adapter.rank, self._adapter.rank % manifest.world_size
        saved = read_small_state(directory, manifest, saved_by)
        if rank == 0 or self._adapter.pipeline is not None:
            others = (other for other in range(manifest.world_size) if other != saved_by)
            trees = [saved, *(read_small_state(directory, manifest, other) for other in others)]
            saved = {**saved, "data": max((tree["data"] for tree in trees), key=itemgetter("batches"))}
            if rank == 0:
                self._compare(trees, manifest.world_size)
        load_buffers(directory, manifest, saved_by, into)
        found = small_state_of(rank, saved_by, saved, self._adapter.resharded)
        load_resharded(directory, manifest, into)
        if self._frozen is not None:
            frozen = load_resharded_frozen(directory, manifest, saved_by, self._frozen, found["frozen"])
            found = {**found, "frozen": frozen}
        return found

    def _compare(self, trees: Sequence[Mapping[str, Any]], ranks: int) -> None:
        """Refuse what ranks that train together have alike, and warn of what they may have by themselves."""
        require_alike(trees)
        for name in differing(trees):
            logger.warning(
                "the registered object %r was not the same on the run's %d ranks: rank r of %d takes the state of "
                "rank r modulo %d, and states of further ranks are lost",
                name,
                ranks,
                self._adapter.world_size,
                ranks,
            )
