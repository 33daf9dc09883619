"""The one reader: fills ranges of tensors from the slabs that hold them; each byte comes from one slab, verified.

A *slab* is anything that holds pieces: a file of a checkpoint, a state in shared memory, a small state that was read.
A restart at the same or at another number of ranks, a prediction's history and an export differ in which slabs they
name, and in what they want.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cpsr.checkpoint.ranges import MissingRanges, WantedRange
from cpsr.errors import RunMismatchError
from cpsr.state.shard import OperatorState, Shard

__all__ = ["Piece", "Slab", "Wanted", "assemble", "pieces_of", "wanted_of"]


@dataclass(frozen=True)
class Piece:
    """A range, or a block, of one tensor.

    Attributes:
        shape: of the whole tensor, before it was split over ranks.
        dtype: of its elements, as `torch.float32`.
        start: the piece's first element in the flattened whole.
        numel: its elements.
        block: its shape, where it is no range of the flattened whole; see `cpsr.state.shard.ParamSlice`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    numel: int
    block: tuple[int, ...] | None = None

    def is_cut_as(self, other: "Piece") -> bool:
        """Whether both are ranges of one tensor, or the same block of it: other blocks are not taken apart."""
        if self.block is None or other.block is None:
            return self.block is other.block
        return (self.block, self.start, self.numel) == (other.block, other.start, other.numel)

    def __str__(self) -> str:
        part = "" if self.numel == math.prod(self.shape) else f", elements {self.start} to {self.start + self.numel}"
        if self.block is not None:
            part = f", a block of shape {self.block} that begins at element {self.start}"
        return f"{str(self.dtype).removeprefix('torch.')} of shape {self.shape}{part}"


class Slab(Protocol):
    """Pieces that lie in one place."""

    @property
    def rank(self) -> int:
        """That saved them."""

    @property
    def pieces(self) -> Mapping[str, Piece]:
        """By the tensor's key, as `param/h.0.weight`; see `cpsr.state.shard.Shard.all_tensors`."""

    def read(self, wanted: Sequence[WantedRange]) -> int:
        """Copy ranges of its tensors to their targets, verified; returns the bytes that were read.

        Raises:
            CheckpointCorruptError: what is there is damaged; the targets hold anything.
            UnreadableFileError: it cannot be read now; likewise.
        """


@dataclass(frozen=True)
class Wanted:
    """A tensor that is to be filled.

    Attributes:
        piece: which part of which whole it is.
        target: as many elements, of that dtype, wherever and however they lie.
    """

    piece: Piece
    target: torch.Tensor


def pieces_of(operator: OperatorState) -> Iterator[tuple[str, Piece, torch.Tensor]]:
    """The tensors of an operator: key, piece, values. Moments of another size than the parameter's are whole."""
    one = operator.parameter
    yield f"param/{operator.name}", _like(operator, one.values), one.values
    for moment, values in operator.moments.items():
        piece = _like(operator, values) if values.numel() == one.numel else _whole(values)
        yield f"moment/{moment}/{operator.name}", piece, values


def wanted_of(into: Shard) -> dict[str, Wanted]:
    """All tensors of a shard but frozen ones, by key."""
    found = {key: Wanted(piece, values) for one in into.operators.values() for key, piece, values in pieces_of(one)}
    return found | {f"other/{name}": Wanted(_whole(values), values) for name, values in into.others.items()}


def _like(operator: OperatorState, values: torch.Tensor) -> Piece:
    one = operator.parameter
    return Piece(one.global_shape, values.dtype, one.offset, one.numel, one.block)


def _whole(values: torch.Tensor) -> Piece:
    return Piece(tuple(values.shape), values.dtype, 0, values.numel())


_OTHER_MODEL = "use the model and the optimizer that it was saved from, or another run_dir"


def assemble(slabs: Iterable[Slab], wanted: Mapping[str, Wanted], where: object, advice: str = _OTHER_MODEL) -> int:
    """Fill every wanted tensor; before the first byte is read it is known which slab gives it.

    No more is held than the targets, a slab's buffer, what a slab gives to targets on a device, and targets that are
    not contiguous while they arrive.

    Args:
        slabs: of several that hold a range, the first is read. Those after the last one that is needed are not made.
        wanted: by key.
        where: the slabs lie, for messages.
        advice: what the user can do where something is missing.

    Returns:
        The bytes that were read.

    Raises:
        RunMismatchError: no slab holds some range, or one holds another tensor of that key; nothing was changed.
        CheckpointCorruptError, UnreadableFileError: see `Slab.read`; the targets hold anything.
    """
    rests = {key: _Rest(key, one, where) for key, one in wanted.items()}
    ranks: set[int] = set()
    chosen: list[tuple[Slab, list[tuple[_Rest, _Range]]]] = []
    left = set(rests)
    for slab in slabs if left else ():
        ranks.add(slab.rank)
        keys = [key for key in min(rests, slab.pieces, key=len) if key in left and key in slab.pieces]
        found = [(rests[key], one) for key in keys for one in rests[key].take_from(slab)]
        if found:
            chosen.append((slab, found))
            left = {key for key in left if rests[key].is_open}
        if not left:
            break
    if left:
        raise rests[min(left, key=lambda key: (not key.startswith("param/"), key))].missing(ranks, advice)
    read = 0
    for slab, found in chosen:
        read += slab.read([rest.wanted_range(one) for rest, one in found])
        for rest, _ in found:
            rest.arrived()
    return read


_Range = tuple[int, int, int]  # first element in the whole and the one after the last; the first in the slab's tensor


class _Rest(MissingRanges):
    """What is still missing of one tensor, and who saved the rest of it."""

    def __init__(self, key: str, wanted: Wanted, where: object) -> None:
        super().__init__(wanted.piece.start, wanted.piece.numel)
        self._key, self._wanted, self._where = key, wanted, where
        self._saved: dict[int, int] = {}  # element after a range that was found -> rank
        self._to_come = 0
        self.is_open = True  # also one without elements, until a slab that holds it is found
        target = wanted.target
        self._direct = target.device.type == "cpu" and target.is_contiguous()
        self._flat: torch.Tensor | None = None  # of a target that is not contiguous, while its ranges arrive
        self._rooms: list[tuple[torch.Tensor, torch.Tensor]] = []  # parts of a target on a device, and host memory

    def take_from(self, slab: Slab) -> Iterator[_Range]:
        """What the slab has of it."""
        own, piece = self._wanted.piece, slab.pieces[self._key]
        if not own.is_cut_as(piece):
            return
        if (piece.shape, piece.dtype) != (own.shape, own.dtype):
            if self._key.startswith("other/"):
                return  # ranks may have buffers of their own
            raise RunMismatchError(
                f"{self._where}: rank {slab.rank} saved {self._key} as {piece}, this rank has {own}. Nothing was "
                f"changed; {_OTHER_MODEL}"
            )
        ranges = list(self.take(piece.start, piece.numel))
        if not own.numel:
            ranges = [(piece.start, piece.start)]
        for start, stop in ranges:
            self._saved[stop] = slab.rank
            self._to_come += 1
            yield start, stop, start - piece.start
        self.is_open = bool(self.left)

    def missing(self, ranks: Collection[int], advice: str) -> RunMismatchError:
        """The error where these ranks' slabs lack a part of it."""
        start, stop = self.left[0] if self.left else (0, 0)
        name, before = self._key.partition("/")[2], self._saved.get(start)
        what = f"elements {start} to {stop} of {name}" if self._saved else f"{self._key} ({self._wanted.piece})"
        who = "" if before is None else f" (rank {before} saved those before them"
        who += f", so rank {before + 1} should have)" if before is not None and before + 1 in ranks else ")" * bool(who)
        return RunMismatchError(
            f"{self._where}: no rank saved {what}, as a range of rows or as the block that this rank has{who}. Nothing "
            f"was changed; {advice}"
        )

    def wanted_range(self, one: _Range) -> WantedRange:
        """Where the elements go."""
        start, stop, there = one
        own, target = self._wanted.piece, self._wanted.target
        here = slice(start - own.start, stop - own.start) if own.numel else slice(0, 0)
        if target.is_contiguous():
            part = target.view(-1)[here]
            if self._direct:
                return WantedRange(self._key, there, part)
            room = torch.empty(part.numel(), dtype=own.dtype, device="cpu")
            self._rooms.append((part, room))
            return WantedRange(self._key, there, room)
        if self._flat is None:
            self._flat = torch.empty(own.numel, dtype=own.dtype, device="cpu")
        return WantedRange(self._key, there, self._flat[here])

    def arrived(self) -> None:
        """A slab has given what it holds; one that is not contiguous gets its values with the last range."""
        self._to_come -= 1
        with torch.no_grad():
            while self._rooms:
                part, room = self._rooms.pop()
                part.copy_(room)
            if not self._to_come and self._flat is not None:
                self._wanted.target.copy_(self._flat.view(self._wanted.target.shape))
                self._flat = None
