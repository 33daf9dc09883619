"""Whether ranks hold the same weights and moments, as the newest committed checkpoint of the run says."""

import logging
from pathlib import Path

from cpsr.checkpoint.manifest import COMMIT, file_name, step_iteration
from cpsr.checkpoint.verify import read_manifest, read_rank_manifest
from cpsr.errors import CheckpointError

__all__ = ["Twins"]

logger = logging.getLogger(__name__)


class Twins:
    """Compares what ranks have committed; reads nothing but manifests.

    Ranks of a data-parallel group are kept alike by those who train them, which is not seen here: without a wrapper
    that averages gradients each trains a model of its own. Checkpoints of all ranks lie on the disk with their hashes.

    Args:
        checkpoints: the run's directory of them.
    """

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints

    def words(self, *ranks: int) -> list[str] | None:
        """One word for the weights and moments of each rank, equal where they are; None where nothing is known."""
        try:
            return self._words(ranks)
        except (OSError, CheckpointError, KeyError) as error:
            # Retention deletes meanwhile, or the disk refuses; damage is the next restart's to find.
            logger.debug("whether ranks hold the same cannot be read from %s: %r", self._checkpoints, error)
            return None

    def _words(self, ranks: tuple[int, ...]) -> list[str] | None:
        steps = [(step_iteration(path.name), path) for path in self._checkpoints.iterdir()]
        for _, directory in sorted((iteration, path) for iteration, path in steps if iteration is not None)[::-1]:
            manifest = read_manifest(directory) if (directory / COMMIT).exists() else None
            if manifest is None or manifest.partial:
                continue
            files = [read_rank_manifest(directory, manifest, rank).files for rank in ranks]
            return [
                " ".join(file[file_name(rank, kind)].xxh3_128 for kind in ("params", "moments"))
                for rank, file in zip(ranks, files, strict=True)
            ]
        return None
