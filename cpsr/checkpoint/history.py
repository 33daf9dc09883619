"""The committed checkpoints of one rank as the series that a predictor reads: memory-mapped, piece by piece."""

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from cpsr.checkpoint.catalogue import CheckpointInfo, scan
from cpsr.checkpoint.manifest import OperatorRecord, RankManifest, file_name
from cpsr.checkpoint.verify import DamagedFileError, check_file, open_tensors, read_manifest, read_rank_manifest
from cpsr.errors import CheckpointError
from cpsr.predictor.protocol import HistoryEntry

__all__ = ["DiskHistory"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Checkpoint:
    entry: HistoryEntry
    manifest: RankManifest
    file: Any  # safetensors' open file: it maps the weights, nothing is read before it is asked for
    partial: bool


class DiskHistory:
    """`cpsr.predictor.protocol.History` over full, thinned and partial checkpoints.

    Opening reads each weights file once to check its hash; what is damaged, or cannot be
    read now, is left out with a log line. Time and
    learning rate of an entry are `cumulative_learning_rate` and `learning_rate` of its scalars.

    Args:
        store_directory: `CheckpointStore.directory`.
        rank: whose part is read.
        before: only checkpoints of earlier iterations; None is all.
        since: only checkpoints of this and later iterations.
        checked: iterations of checkpoints whose hash this process has checked before; they are not read again for it.
        partial: False leaves partial checkpoints out: then every operator of every rank was taken with its entry.

    Attributes:
        excluded: iteration -> why that checkpoint is left out.

    Raises:
        ValueError: `store_directory` is the run's directory and not its `checkpoints`.
    """

    def __init__(
        self,
        store_directory: Path,
        rank: int,
        before: int | None = None,
        since: int = 0,
        checked: Collection[int] = (),
        *,
        partial: bool = True,
    ) -> None:
        if (store_directory / "checkpoints").is_dir():
            raise ValueError(f"{store_directory} is the run's directory; the history reads its 'checkpoints'")
        self.excluded: dict[int, str] = {}
        self._checked = checked
        end = math.inf if before is None else before
        catalogue = scan(store_directory)
        for problem in [*catalogue.problems, *catalogue.unreadable]:
            if problem.iteration is not None and since <= problem.iteration < end:
                self._exclude(problem.iteration, f"{problem.file}: {problem.what}")
        self._checkpoints: list[_Checkpoint] = []
        for info in catalogue.checkpoints:
            if since <= info.iteration < end and (partial or not info.partial):
                self._add(info, rank)
        self._operators = self._common_operators()

    @property
    def entries(self) -> Sequence[HistoryEntry]:
        """Ascending in iteration, without repeats."""
        return [checkpoint.entry for checkpoint in self._checkpoints]

    @property
    def partial_iterations(self) -> Sequence[int]:
        """Entries that are partial checkpoints, on any rank: the same on all that hold the same entries."""
        return [item.entry.iteration for item in self._checkpoints if item.partial]

    @property
    def operators(self) -> Sequence[str]:
        """Operators that every entry holds with the newest entry's shape and split."""
        return list(self._operators)

    def numel(self, operator: str) -> int:
        """Elements of the operator's slice on this rank."""
        return self._operators[operator].numel

    def taken_at(self, operator: str, entry: int) -> int:
        """Iteration at which the operator was taken in that entry."""
        return self._checkpoints[entry].manifest.operators[operator].iteration

    def read(self, operator: str, entry: int, start: int, stop: int) -> torch.Tensor:
        """Weights `[start, stop)` of the operator in that entry: 1-D float32; a view of the file where it is float32.

        Raises:
            IndexError: the range is not within the slice.
        """
        if not 0 <= start <= stop <= self.numel(operator):
            raise IndexError(f"{operator} has {self.numel(operator)} elements, asked for [{start}, {stop})")
        if start == stop:
            return torch.empty(0)
        piece: torch.Tensor = self._checkpoints[entry].file.get_slice(f"param/{operator}")[start:stop]
        return piece.float()

    def keep(self, iterations: Collection[int]) -> None:
        """Leave out every other checkpoint: ranks must predict from the same ones."""
        for checkpoint in self._checkpoints:
            if checkpoint.entry.iteration not in iterations:
                self._exclude(checkpoint.entry.iteration, "it does not belong here, or another rank cannot read it")
                checkpoint.file.__exit__(None, None, None)
        self._checkpoints = [item for item in self._checkpoints if item.entry.iteration in iterations]
        self._operators = self._common_operators()

    def close(self) -> None:
        """Unmap the files."""
        for checkpoint in self._checkpoints:
            checkpoint.file.__exit__(None, None, None)
        self._checkpoints = []

    def _add(self, info: CheckpointInfo, rank: int) -> None:
        try:
            manifest = read_manifest(info.directory)
            if rank >= manifest.world_size:
                self._exclude(info.iteration, f"was saved by {manifest.world_size} ranks, this is rank {rank}")
                return
            record = read_rank_manifest(info.directory, manifest, rank)
            name = file_name(rank, "params")
            path = info.directory / name
            if name not in record.files:
                raise DamagedFileError(path, "is not listed in its manifest")
            if info.iteration not in self._checked:
                check_file(path, record.files[name])
            file: Any = open_tensors(path)
            absent = {f"param/{operator}" for operator in record.operators} - set(file.keys())
            if absent:
                raise DamagedFileError(path, f"lacks {min(absent)}, which its manifest lists")
        except (CheckpointError, SafetensorError, OSError) as error:
            self._exclude(info.iteration, str(error))
            return
        entry = _entry(record)
        if isinstance(entry, str):
            self._exclude(info.iteration, entry)
            return
        self._checkpoints.append(_Checkpoint(entry, record, file, info.partial))

    def _exclude(self, iteration: int, reason: str) -> None:
        self.excluded[iteration] = reason
        _log.warning("checkpoint %d is left out of the prediction: %s", iteration, reason)

    def _common_operators(self) -> dict[str, OperatorRecord]:
        if not self._checkpoints:
            return {}
        newest = self._checkpoints[-1].manifest.operators
        common = {
            name: operator
            for name, operator in newest.items()
            if all(_same_slice(operator, checkpoint.manifest.operators.get(name)) for checkpoint in self._checkpoints)
        }
        known = {name for checkpoint in self._checkpoints for name in checkpoint.manifest.operators}
        if left_out := sorted(known - common.keys()):
            _log.warning("operators that are new, gone or changed in shape cannot be predicted: %s", left_out)
        return common


def _same_slice(operator: OperatorRecord, other: OperatorRecord | None) -> bool:
    if other is None:
        return False
    return (operator.global_shape, operator.offset, operator.numel) == (other.global_shape, other.offset, other.numel)


def _entry(record: RankManifest) -> HistoryEntry | str:
    """The entry, or what its scalars lack."""
    scalars = record.scalars if isinstance(record.scalars, dict) else {}
    numbers: list[float] = []
    for key in ("cumulative_learning_rate", "learning_rate"):
        value = scalars.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"its scalars hold no finite {key!r} (found {value!r})"
        numbers.append(float(value))
    return HistoryEntry(record.iteration, numbers[0], numbers[1])
