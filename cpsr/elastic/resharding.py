"""Loads a checkpoint that another number of ranks saved, or another tool."""

import logging
from pathlib import Path
from typing import Any

from cpsr.checkpoint.frozen_files import FrozenFiles
from cpsr.checkpoint.manifest import Manifest
from cpsr.checkpoint.resharding import load_resharded, read_small_state
from cpsr.checkpoint.verify import read_rank_manifest
from cpsr.elastic.imported import load_imported
from cpsr.elastic.small_state import differing, require_alike, small_state_of
from cpsr.engines.adapter import EngineAdapter
from cpsr.errors import RunMismatchError
from cpsr.state.shard import Shard

__all__ = ["Resharding"]

logger = logging.getLogger(__name__)


class Resharding:
    """One rank's way to load a checkpoint of another number of ranks; each rank reads what it needs by itself.

    Rank r takes the small state and the buffers of rank r modulo the old number. Rank 0 also compares the small states
    of all old ranks.

    Args:
        adapter: of this rank.
        frozen: files of its parameters outside the optimizer; None: it has none.
    """

    def __init__(self, adapter: EngineAdapter, frozen: FrozenFiles | None) -> None:
        self._adapter = adapter
        self._frozen = frozen

    def load(self, directory: Path, manifest: Manifest, into: Shard) -> dict[str, Any]:
        """Fill the views of `into` and return the small state; see `CheckpointStore.load` for what it raises."""
        self._require_dealable(directory)
        if manifest.imported:
            return load_imported(self._adapter, directory, manifest, into)
        rank, saved_by = self._adapter.rank, self._adapter.rank % manifest.world_size
        saved = read_small_state(directory, manifest, saved_by, into)
        if rank == 0:
            others = [read_small_state(directory, manifest, other) for other in range(1, manifest.world_size)]
            trees = [saved, *others]
            require_alike(trees)
            for name in differing(trees):
                logger.warning(
                    "the registered object %r was not the same on the run's %d ranks: rank r of %d takes the state of "
                    "rank r modulo %d, and states of further ranks are lost",
                    name,
                    manifest.world_size,
                    self._adapter.world_size,
                    manifest.world_size,
                )
        self._require_whole_frozen(directory, manifest, saved_by)
        found = small_state_of(rank, saved_by, saved, self._adapter.resharded)
        load_resharded(directory, manifest, into)
        if self._frozen is not None:
            self._frozen.load(directory, saved_by)
        return found

    def _require_dealable(self, directory: Path) -> None:
        if self._adapter.pipeline_stage is not None:
            raise RunMismatchError(
                f"{directory} was saved by another number of ranks, or imported, and pipeline stages are not dealt to "
                "another number yet. Nothing was changed; start with as many ranks as the run had"
            )

    def _require_whole_frozen(self, directory: Path, manifest: Manifest, saved_by: int) -> None:
        """Frozen parameters that were split are not dealt again."""
        now = {} if self._frozen is None else self._frozen.weights.tensors
        then = read_rank_manifest(directory, manifest, saved_by).frozen
        for name in sorted({*now, *then}):
            if name not in now or name not in then or tuple(now[name].shape) != then[name].shape:
                raise RunMismatchError(
                    f"{directory}: the parameter {name} outside the optimizer is not whole on each rank, or was not. "
                    "Such parts are not dealt to another number of ranks; nothing was changed; start with as many "
                    "ranks as the run had"
                )
