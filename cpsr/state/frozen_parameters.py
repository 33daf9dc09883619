"""Parameters outside the optimizer: nothing of CPSR copies them, as long as nobody writes into them.

A *settled* one is known by the hash of its bytes. A snapshot holds the hash, and a checkpoint refers to the file that
has these bytes. One that was written to since it was settled has *moved*: every snapshot then holds its values, among
the small state, until it has rested for a whole interval between two checkpoints.

Torch counts changes in place, so that looking for them costs a comparison of integers. It does not count what is
written through `.data`. At every checkpoint the writer's thread therefore compares a sum over all bits, on a GPU at the
speed of its memory, or the hash, on the host.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash

from cpsr.state.shard import bytes_of, integers_of

__all__ = ["FrozenPlace", "FrozenWeights", "hash_of", "word_of"]

_PIECE_BYTES = 64 << 20  # from a device to the host at a time


class FrozenPlace(NamedTuple):
    """Where a rank's part of a parameter lies.

    Attributes:
        global_shape: of the whole parameter.
        offset: index of the part's first element in the flattened whole.
        block: its shape, where it is no range of the flattened whole; see `cpsr.state.shard.ParamSlice`.
    """

    global_shape: tuple[int, ...]
    offset: int = 0
    block: tuple[int, ...] | None = None


class _Mark(NamedTuple):
    """Changes when a parameter is written to, or replaced."""

    version: int
    address: int


def _mark_of(tensor: torch.Tensor) -> _Mark:
    return _Mark(0 if tensor.is_inference() else tensor._version, tensor.data_ptr())


@dataclass(frozen=True)
class _Settled:
    """A parameter with known bytes: its mark, their hash, and on a device their sum."""

    mark: _Mark
    xxh3_128: str
    bits: int | None


class FrozenWeights:
    """What a rank keeps of the parameters outside the optimizer, and which of them have moved.

    `state` belongs to the training thread. The writer's thread may settle parameters meanwhile.

    Args:
        tensors: gives the engine's views by name (`EngineAdapter.frozen`).

    Attributes:
        on_moved: called with the parameters that have moved for the first time since all were settled.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._source = tensors
        self._tensors = dict(tensors())
        self._settled: dict[str, _Settled] = {}  # replaced as a whole, never changed
        self._told: frozenset[str] = frozenset()
        self._last: dict[str, _Mark] = {}  # of those that had moved at the last checkpoint
        self._resting: dict[str, _Mark] = {}  # of those that have not moved again since the one before
        self._word: tuple[tuple[str, ...], dict[str, _Settled], str] = ((), {}, "")
        self.on_moved: Callable[[Mapping[str, torch.Tensor]], None] = lambda _: None

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The engine's views, by name."""
        return self._tensors

    @property
    def hashes(self) -> dict[str, str]:
        """xxh3-128 of the settled parameters, by name."""
        return {name: one.xxh3_128 for name, one in self._settled.items() if name in self._tensors}

    def settle(self, *, anew: bool = False) -> None:
        """Hash every parameter that is not known to be as it was; reads all of them once in a life.

        Args:
            anew: hash all, since they may have been written to in any way.
        """
        self._tensors = dict(self._source())
        known = {} if anew else self._settled
        self._settled = {
            name: known[name] if name in known and known[name].mark == _mark_of(tensor) else _settled(tensor)
            for name, tensor in self._tensors.items()
        }
        self._told, self._last, self._resting = frozenset(), {}, {}

    def settle_as(self, hashes: Mapping[str, str]) -> None:
        """Take note that these parameters have bytes of these hashes now."""
        found = {name: _settled(self._tensors[name], xxh3_128) for name, xxh3_128 in hashes.items()}
        self._settled = {**self._settled, **found}

    def settle_rested(self, hashes: Mapping[str, str]) -> None:
        """Take note that `resting` parameters had bytes of these hashes; from any thread.

        Those that were written to meanwhile count as moved.
        """
        resting, found = self._resting, {}
        for name, xxh3_128 in hashes.items():
            if name in resting:
                found[name] = _Settled(resting[name], xxh3_128, _sum_of_bits(self._tensors[name]))
        self._settled = {**self._settled, **found}

    def forget(self, names: Collection[str]) -> None:
        """The bytes of these parameters are not known any more."""
        self._settled = {name: one for name, one in self._settled.items() if name not in names}

    def moved(self) -> list[str]:
        """Names of the parameters that are not settled, or were written to since."""
        settled = self._settled
        return [
            name
            for name, tensor in self._tensors.items()
            if name not in settled or settled[name].mark != _mark_of(tensor)
        ]

    def present(self, names: Iterable[str]) -> dict[str, str]:
        """xxh3-128 of these parameters as they are now; reads those that are not settled."""
        self._tensors = dict(self._source())
        stale = [name for name in self.moved() if name in set(names)]
        self.settle_as({name: hash_of(self._tensors[name]) for name in stale})
        return {name: self._settled[name].xxh3_128 for name in names}

    def state(self, *, whole: bool) -> dict[str, Any]:
        """What a snapshot holds of them: `word`, of those that are settled; `moved`, the values of the others.

        Args:
            whole: for a checkpoint; a snapshot in memory does not see that a parameter was replaced by another one.
        """
        if not self._tensors:
            return {}
        if whole:
            self._tensors = dict(self._source())
        moved = self.moved()
        if not self._told.issuperset(moved):
            self._told = self._told.union(moved)
            self.on_moved({name: self._tensors[name] for name in moved})
        if whole:
            marks = {name: _mark_of(self._tensors[name]) for name in moved}
            self._resting = {name: mark for name, mark in marks.items() if self._last.get(name) == mark}
            self._last = marks
        return {"word": self.word_without(tuple(moved)), "moved": {name: self._tensors[name] for name in moved}}

    def resting(self, names: Collection[str]) -> list[str]:
        """Those of these moved parameters that have rested since the checkpoint before the last; from any thread."""
        resting = self._resting
        return [name for name in names if name in resting and resting[name] == _mark_of(self._tensors[name])]

    def altered(self, names: Collection[str]) -> list[str]:
        """Those of these settled parameters that were changed unseen; reads all of them, from any thread.

        They count as moved from now on.
        """
        settled = self._settled
        found = [
            name
            for name in names
            if name in settled
            and settled[name].mark == _mark_of(self._tensors[name])
            and not _is_as_settled(self._tensors[name], settled[name])
        ]
        self.forget(found)
        return found

    def word_without(self, moved: tuple[str, ...]) -> str:
        """One hash of the settled parameters but these; from any thread."""
        before, settled, word = self._word
        if settled is not self._settled or before != moved:
            settled, left_out = self._settled, set(moved)
            kept = {name: one for name, one in self.hashes.items() if name not in left_out}
            word = word_of(kept)
            self._word = moved, settled, word
        return word


def hash_of(tensor: torch.Tensor) -> str:
    """xxh3-128 of a tensor's dtype, shape and elements, in hexadecimal."""
    state = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for piece in torch.split(bytes_of(tensor), _PIECE_BYTES):
        state.update(piece.cpu().numpy().data)
    return str(state.hexdigest())


def word_of(hashes: Mapping[str, str]) -> str:
    """One hash for parameters with these hashes."""
    return str(xxhash.xxh3_128_hexdigest(json.dumps(sorted(hashes.items())).encode()))


def _settled(tensor: torch.Tensor, xxh3_128: str | None = None) -> _Settled:
    mark = _mark_of(tensor)  # before: what is written meanwhile counts as moved
    return _Settled(mark, hash_of(tensor) if xxh3_128 is None else xxh3_128, _sum_of_bits(tensor))


def _is_as_settled(tensor: torch.Tensor, settled: _Settled) -> bool:
    """Whether it has the bytes that it was settled with, or was written to meanwhile in a way that torch counts."""
    same = hash_of(tensor) == settled.xxh3_128 if settled.bits is None else _sum_of_bits(tensor) == settled.bits
    return same or _mark_of(tensor) != settled.mark


def _sum_of_bits(tensor: torch.Tensor) -> int | None:
    """Sum of the elements as integers of their size; None on the host, where a hash is as fast."""
    if tensor.device.type == "cpu":
        return None
    return int(integers_of(tensor.contiguous().reshape(-1)).sum(dtype=torch.int64))
