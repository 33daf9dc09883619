"""Whether ranks hold the same weights and moments, by the newest committed checkpoint of the run."""

import logging
from pathlib import Path

from cpsr.checkpoint.catalogue import newest_whole
from cpsr.checkpoint.manifest import RankManifest, file_name
from cpsr.checkpoint.verify import read_rank_manifest
from cpsr.errors import CheckpointError

__all__ = ["Twins"]

logger = logging.getLogger(__name__)


class Twins:
    """Compares what ranks have committed; reads nothing but manifests.

    Whether the ranks of a data-parallel group hold the same depends on the training loop, which is not visible here:
    without a wrapper that averages gradients each rank trains a model of its own. The manifests have the hashes.

    Args:
        checkpoints: the run's directory of them.
    """

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints

    def words(self, *ranks: int) -> list[str] | None:
        """A hash of each rank's weights and moments, equal where these are; None where nothing is known."""
        try:
            return self._words(ranks)
        except (OSError, CheckpointError, KeyError) as error:
            # Retention deletes meanwhile, or the disk refuses; damage is the next restart's to find.
            logger.debug("whether ranks hold the same cannot be read from %s: %r", self._checkpoints, error)
            return None

    def _words(self, ranks: tuple[int, ...]) -> list[str] | None:
        newest = newest_whole(self._checkpoints)
        if newest is None:
            return None
        return [_word(read_rank_manifest(*newest, rank)) for rank in ranks]


def _word(record: RankManifest) -> str:
    """Hashes of the operators where the manifest has them all, as those of replicated ranks do; else of the files."""
    hashes = [record.operators[name].xxh3_128 for name in sorted(record.operators)]
    if hashes and None not in hashes:
        return " ".join(map(str, hashes))
    extra = file_name(record.rank, "extra")
    return " ".join(file.xxh3_128 for name, file in sorted(record.files.items()) if name != extra)
