"""Ranks that own the same weights and moments: whether they do, and what each has beside them, buffers and scalars."""

import json
import logging
from dataclasses import replace
from pathlib import Path

from cpsr.checkpoint.arena import Sealed
from cpsr.checkpoint.assemble import wanted_of
from cpsr.checkpoint.buffers import HostBuffer, slab_size
from cpsr.checkpoint.catalogue import newest_checkpoint
from cpsr.checkpoint.manifest import RankManifest, slab_name
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_states import OpenState, fill
from cpsr.errors import CheckpointError
from cpsr.state.shard import Shard

__all__ = ["SmallStates", "committed_words"]

logger = logging.getLogger(__name__)

FILES = 2  # taken in turn: one is sent while the next is sealed


class SmallStates:
    """Small states of this rank in shared memory, each in the place of the one before the last.

    Args:
        memory: this rank's shared memory.
        template: the shard whose buffers every snapshot has.

    Raises:
        OSError: shared memory is not there, or is too small.
    """

    def __init__(self, memory: SharedMemory, template: Shard) -> None:
        others = Shard({}, template.others)
        whole, buffer = slab_size(template), slab_size(others)
        size = replace(buffer, header_bytes=whole.header_bytes)  # it names the parts of the whole
        files = memory.files([f"small-{number}" for number in range(FILES)], size)
        self._files = [(file, HostBuffer(others, pinned=False, memory=file)) for file in files]

    def seal(self, whole: Sealed) -> Sealed:
        """Copy a snapshot's buffers and scalars into a file, with hashes of the weights and moments that go with them.

        By the hashes a restart verifies that other ranks' weights and moments are the same.

        Raises:
            CheckpointError: the snapshot is not there any more, or damaged.
            SaveError, OSError: shared memory is full.
        """
        (file, buffer), iteration = self._files[0], whole.iteration
        self._files.reverse()
        file.unseal()
        small = buffer.shard_at(iteration)
        with OpenState(whole.described()) as slab:
            fill([slab], wanted_of(small), whole.path)
            scalars, parts = slab.scalars(), slab.state.parts
        whole.described()  # after all was read
        file.seal("small", small, iteration, scalars, owned=json.dumps(parts))
        return Sealed.at(file.path, iteration)

    def close(self, *, remove: bool) -> None:
        """Let the files go; see `MemoryFile.close`."""
        for file, _ in self._files:
            file.close(remove=remove)


def committed_words(checkpoints: Path, *ranks: int) -> list[str] | None:
    """A hash of each rank's weights and moments in the newest committed checkpoint; None where nothing is known.

    Whether the ranks of a data-parallel group hold the same depends on the training loop, which is not visible here:
    without a wrapper that averages gradients each rank trains a model of its own. The manifests have the hashes, and
    nothing else is read.

    Args:
        checkpoints: the run's directory of them.
        ranks: to compare.
    """
    try:
        newest = newest_checkpoint(checkpoints)
        return None if newest is None else [_word(newest.record(rank)) for rank in ranks]
    except (OSError, CheckpointError, KeyError) as error:
        # Retention deletes meanwhile, or the disk refuses; damage is the next restart's to find.
        logger.debug("whether ranks hold the same cannot be read from %s: %r", checkpoints, error)
        return None


def _word(record: RankManifest) -> str:
    """Hashes of the operators where the manifest has them all, as those of replicated ranks do; else of the files."""
    hashes = [record.operators[name].xxh3_128 for name in sorted(record.operators)]
    if hashes and None not in hashes:
        return " ".join(map(str, hashes))
    extra = slab_name(record.rank, "extra", record.save)
    return " ".join(file.xxh3_128 for name, file in sorted(record.files.items()) if name != extra)
