"""One snapshot in host memory, and what it holds of each operator."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

import torch

from cpsr.checkpoint.manifest import OperatorRecord
from cpsr.state.shard import Shard

__all__ = ["WHOLE", "Contents", "Snapshot"]


@dataclass(frozen=True)
class Contents:
    """What a snapshot holds of each operator, and where on the disk that is written.

    The default is every operator with its moments, taken now, in files of this rank. A snapshot for the disk copies all
    to host memory, and one for host memory alone what is taken now: the rest it holds as the one before.

    Attributes:
        experts: operators in files of their own, which a later checkpoint can carry.
        carried: operators from an earlier checkpoint of this attempt; all others are taken now.
        writers: operators in the files of another rank -> that rank.
        replicated: descriptions of operators that other ranks hold, too; the commit compares their hashes.
        left: operators that other ranks of this machine copy, so that this one does not; None: nothing is shared there.

    Raises:
        ValueError: the parts contradict each other.
    """

    experts: frozenset[str] = frozenset()
    carried: frozenset[str] = frozenset()
    writers: Mapping[str, int] = field(default_factory=dict)
    replicated: Mapping[str, OperatorRecord] = field(default_factory=dict)
    left: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if not self.carried <= self.experts:
            raise ValueError(f"only parameters of experts can be carried: {min(self.carried - self.experts)}")
        if not self.writers.keys() <= self.replicated.keys():
            raise ValueError("another rank can only write operators that it holds, too")
        if not (self.left or frozenset()) <= self.writers.keys():
            raise ValueError("a rank copies what it writes")

    @staticmethod
    def sparse(experts: frozenset[str], saved: frozenset[str]) -> "Contents":
        """All operators; of the experts' parameters only `saved` are taken now.

        Raises:
            ValueError: `saved` names something else than a parameter of an expert.
        """
        if not saved <= experts:
            raise ValueError(f"no expert's parameter: {min(saved - experts)}")
        return Contents(experts, experts - saved)

    @property
    def carried_here(self) -> frozenset[str]:
        """Carried operators that lie in files of this rank."""
        return self.carried - self.writers.keys()

    def written(self, shard: Shard) -> Shard:
        """The part of a shard that goes into this rank's new files; views of the same memory."""
        return _without(shard, self.carried | self.writers.keys())

    def without_experts(self, shard: Shard) -> Shard:
        """The part of a shard that every checkpoint saves again; views of the same memory."""
        return shard if not self.experts else _without(shard, self.experts)


def _without(shard: Shard, names: frozenset[str]) -> Shard:
    return Shard({name: one for name, one in shard.operators.items() if name not in names}, shard.others)


WHOLE = Contents()


_Value = TypeVar("_Value")


class _Later(Generic[_Value]):
    """An attribute that may be set to a function; that makes the value when somebody asks for it, once.

    Args:
        default: value of a new object; without one it must be given.
    """

    def __init__(self, *default: _Value | Callable[[], _Value]) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    @overload
    def __get__(self, instance: None, owner: type) -> _Value | Callable[[], _Value]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> _Value: ...

    def __get__(self, instance: object | None, owner: type) -> _Value | Callable[[], _Value]:
        if instance is None:
            if not self._default:
                raise AttributeError  # the field has no default
            return self._default[0]
        value = vars(instance)[self._name]
        if callable(value):
            value = vars(instance)[self._name] = value()
        made: _Value = value
        return made

    def __set__(self, instance: object, value: _Value | Callable[[], _Value]) -> None:
        vars(instance)[self._name] = value


@dataclass(eq=False)
class Snapshot:
    """One rank's state at one iteration, in host memory.

    Attributes:
        iteration: iteration at which it was taken.
        shard: views into one host buffer, for after `SnapshotPool.finish`; made when somebody asks for them.
        scalars: plain data, a copy of its own; likewise.
        stall_seconds: how long this snapshot has kept the training from its work so far, without the wait for steps
            that a GPU had still to compute.
        copy_seconds: how long the asynchronous copy itself took.
        overlap_seconds: from the begin of the snapshot until it had to be complete; 0 if a device cannot tell yet.
        contents: what it holds of each operator, and where on the disk that is written.
        disk: whether it is to be written; else it is for host memory alone.
        taken_at: iteration of each part that the host buffer holds once the snapshot is sealed; empty without moments.
        part_bytes: of each part of its buffer.
        carried_bytes: of the parts that its buffer does not hold, and takes from the snapshot before.
        source: buffer of the snapshot before, from which parts are carried over; None: all parts are copied.
        lacking: parts that other ranks of this machine hold of this iteration, and this one does not.
        samples: hash of a few elements of each part that ranks share, once the copy is complete.
        state_hashes: of a checkpoint, hashes of what it lacks, and from a device of all that ranks share; likewise.
        second_moments: `Shard.second_moments` of the whole shard, where something is lacking; likewise.
        sealed: whether it survives the process, once that is known; None where that has not been asked for.
        encoded: the scalars as `cpsr.state.codec.encode` gives them; None where a device has a part of them.
        place: number of its buffer in the pool.
        hashed: of its buffer, once it is sealed: address of some memory -> its length, and the hashes of its MiB.
    """

    iteration: int
    shard: _Later[Shard] = _Later()
    scalars: _Later[Any] = _Later(None)
    stall_seconds: float = 0.0
    copy_seconds: float = 0.0
    overlap_seconds: float = 0.0
    contents: Contents = field(default=WHOLE)
    disk: bool = True
    taken_at: Mapping[str, int] = field(default_factory=dict)
    part_bytes: Mapping[str, int] = field(default_factory=dict)
    carried_bytes: int = 0
    source: int | None = None
    lacking: frozenset[str] = frozenset()
    samples: _Later[Mapping[str, str]] = _Later(dict)
    state_hashes: _Later[Mapping[str, str]] = _Later(dict)
    second_moments: torch.Tensor | None = None
    sealed: "Future[bool] | None" = None
    encoded: tuple[Any, dict[str, torch.Tensor]] | None = None
    place: int = -1
    hashed: Mapping[int, tuple[int, bytes]] = field(default_factory=dict)

    @property
    def copied_parts(self) -> list[str]:
        """Parts of its buffer that are of its iteration."""
        return [part for part, at in self.taken_at.items() if at == self.iteration]

    @property
    def copied_bytes(self) -> dict[str, int]:
        """Bytes of each part that it has copied, and not taken from the snapshot before."""
        return {part: self.part_bytes.get(part, 0) for part in self.copied_parts}
