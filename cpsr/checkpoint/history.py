"""The committed checkpoints of one rank as the series that a predictor reads: memory-mapped, piece by piece."""

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from cpsr.checkpoint.catalogue import CheckpointInfo, scan
from cpsr.checkpoint.manifest import RankManifest, file_name
from cpsr.checkpoint.verify import DamagedFileError, check_in_pieces, open_tensors, read_manifest, read_rank_manifest
from cpsr.errors import CheckpointError
from cpsr.predictor.protocol import HistoryEntry

__all__ = ["DiskHistory"]

_log = logging.getLogger(__name__)


class _Slice(NamedTuple):
    global_shape: tuple[int, ...]
    offset: int
    numel: int


@dataclass(frozen=True)
class _Checkpoint:
    """What is kept of a manifest, which takes 2 kB an operator: that of all checkpoints, and slices mostly once."""

    entry: HistoryEntry
    slices: Mapping[str, _Slice]
    taken_at: Mapping[str, int]  # of the operators that were not taken with the entry
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
        opened: False opens no checkpoint yet: `open` does it piece by piece.

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
        opened: bool = True,
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
        self._rank = rank
        self._found = [
            info for info in catalogue.checkpoints if since <= info.iteration < end and (partial or not info.partial)
        ]
        self._checkpoints: list[_Checkpoint] = []
        self._operators: dict[str, _Slice] = {}
        if opened:
            for _ in self.open():
                pass

    def open(self) -> Iterator[None]:
        """Open the checkpoints, once: every `next` reads one's manifests, or 4 MiB of weights to check their hash."""
        for info in self._found:
            yield from self._add(info)
            yield
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
        checkpoint = self._checkpoints[entry]
        return checkpoint.taken_at.get(operator, checkpoint.entry.iteration)

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

    def _add(self, info: CheckpointInfo) -> Iterator[None]:
        rank = self._rank
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
                yield from check_in_pieces(path, record.files[name])
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
        taken_at = {
            name: operator.iteration
            for name, operator in record.operators.items()
            if operator.iteration != record.iteration
        }
        self._checkpoints.append(_Checkpoint(entry, self._slices(record), taken_at, file, info.partial))

    def _slices(self, record: RankManifest) -> Mapping[str, _Slice]:
        """Slices by operator: the same mapping for all checkpoints that hold the same."""
        slices = {name: _Slice(one.global_shape, one.offset, one.numel) for name, one in record.operators.items()}
        before = self._checkpoints[-1].slices if self._checkpoints else None
        return slices if before is None or before != slices else before

    def _exclude(self, iteration: int, reason: str) -> None:
        self.excluded[iteration] = reason
        _log.warning("checkpoint %d is left out of the prediction: %s", iteration, reason)

    def _common_operators(self) -> dict[str, _Slice]:
        if not self._checkpoints:
            return {}
        different = list({id(checkpoint.slices): checkpoint.slices for checkpoint in self._checkpoints}.values())
        newest = self._checkpoints[-1].slices
        common = {
            name: operator for name, operator in newest.items() if all(one.get(name) == operator for one in different)
        }
        known = {name for one in different for name in one}
        if left_out := sorted(known - common.keys()):
            _log.warning("operators that are new, gone or changed in shape cannot be predicted: %s", left_out)
        return common


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
