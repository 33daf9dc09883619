"""Sparse checkpoints: of a mixture's experts only some are written, and the others are carried along as they were.

Experts have files of their own, named after the iteration at which they were saved::

    rank-00000.params.safetensors                       what every token passes, of this checkpoint
    rank-00000.experts-0000000100.params.safetensors    experts of this checkpoint, 100
    rank-00000.experts-0000000080.params.safetensors    a link to what checkpoint 80 wrote, for those not saved since

A file is carried as long as one expert in it was not saved again, so that every checkpoint holds every operator: it
verifies, loads and goes by itself. In its manifest each operator says at which iteration it was taken, which names the
file; the same operator in an older file is out of date.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from cpsr.checkpoint.manifest import FileRecord, OperatorRecord, RankManifest, file_name
from cpsr.checkpoint.partial import put_into
from cpsr.errors import SaveError
from cpsr.state import Shard

__all__ = ["CarriedExperts", "Sparse", "expert_files"]

# Checkpoints looked in for experts to carry, newest first; retention never removes the newest two.
_REMEMBERED_PLACES = 8


@dataclass(frozen=True)
class Sparse:
    """Which of a rank's operators are experts' parameters, and which of these a checkpoint saves.

    Attributes:
        experts: names of operators.
        saved: some or all of them.
        copied: of all of them, those that a snapshot in host memory that holds all takes from the device, `saved` among
            them; the others it takes over from the snapshot before. None: all.

    Raises:
        ValueError: something is to be saved that is no expert's parameter, or is not copied.
    """

    experts: frozenset[str]
    saved: frozenset[str]
    copied: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if not self.saved <= self.experts:
            raise ValueError(f"no expert's parameter: {min(self.saved - self.experts)}")
        if self.copied is not None and not self.saved <= self.copied <= self.experts:
            wrong = (self.saved - self.copied) | (self.copied - self.experts)
            raise ValueError(f"to be saved and not copied, or copied and no expert's parameter: {min(wrong)}")

    @property
    def carried(self) -> frozenset[str]:
        """Experts' parameters that are not written."""
        return self.experts - self.saved

    @property
    def taken_over(self) -> frozenset[str]:
        """Experts' parameters that are not copied from the device."""
        return frozenset() if self.copied is None else self.experts - self.copied

    def written(self, shard: Shard) -> Shard:
        """The shard without what is carried; views of the same memory."""
        carried = self.carried
        return Shard({name: one for name, one in shard.operators.items() if name not in carried}, shard.others)

    def saved_experts(self, shard: Shard) -> Shard:
        """The experts that are written, without buffers; views of the same memory."""
        return Shard({name: one for name, one in shard.operators.items() if name in self.saved})

    def without_experts(self, shard: Shard) -> Shard:
        """What every checkpoint holds anew; views of the same memory."""
        return Shard({name: one for name, one in shard.operators.items() if name not in self.experts}, shard.others)


class CarriedExperts:
    """The experts that this rank saved in earlier checkpoints, and where they lie.

    Only what was written in this attempt of this life is carried: nothing of a state that was given up since, and
    nothing of an earlier life, whose first checkpoint therefore saves all experts.
    """

    def __init__(self) -> None:
        self._places: deque[tuple[Path, RankManifest]] = deque(maxlen=_REMEMBERED_PLACES)

    def note(self, directory: Path, manifest: RankManifest) -> None:
        """This rank's part of a checkpoint is durable there."""
        self._places.append((directory, manifest))

    def newest(self, attempt: tuple[int, int]) -> dict[str, OperatorRecord]:
        """What this rank's manifest said when it last wrote a part in this attempt; nothing before."""
        if not self._places or (self._places[-1][1].life, self._places[-1][1].attempt) != attempt:
            return {}
        return self._places[-1][1].operators

    def put_into(
        self, directory: Path, attempt: tuple[int, int], operators: Collection[str], *, fsync: bool
    ) -> tuple[dict[str, FileRecord], dict[str, OperatorRecord]]:
        """Give operators that are not saved now a name in another checkpoint; the caller forces the directory.

        Args:
            directory: of the checkpoint.
            attempt: life and attempt; experts of any other are not carried.
            operators: to carry.
            fsync: force a copy to the disk, where there can be no link.

        Returns:
            The files' records, and those of the operators, at the iterations at which they were taken.

        Raises:
            SaveError: one of the operators was not written since the run went on, or a copy differs.
            OSError: the file system refused.
        """
        if not operators:
            return {}, {}
        for source, written in reversed(self._places):
            if (written.life, written.attempt) != attempt:
                break
            known = {name: written.operators[name] for name in operators if name in written.operators}
            records = {name: one for name, one in known.items() if one.saved_by is None}  # else it is not here
            if len(records) < len(operators):
                break
            ages = sorted({one.iteration for one in records.values()})
            files = {name: written.files[name] for age in ages for name in expert_files(written.rank, age)}
            if put_into(directory, source, files, fsync=fsync):
                return files, records
            # It was abandoned, or retention was there.
        raise SaveError(
            f"{directory}: {len(operators)} parameters of experts that are not saved now were not saved since the run "
            f"went on either (the first is {min(operators)}); the next checkpoint must save all experts"
        )


def expert_files(rank: int, taken_at: int) -> list[str]:
    """Names of the files with a rank's experts of one iteration."""
    return [file_name(rank, "params", taken_at), file_name(rank, "moments", taken_at)]
