"""Collectives among the ranks of one job, beside the training group and without pickle."""

import ctypes
import itertools
import json
import logging
import operator
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from cpsr.errors import UnevenRanksError

__all__ = [
    "NODE_VARIABLE",
    "Attendance",
    "Group",
    "SideGroup",
    "group_name",
    "pair_groups",
    "this_node",
]

logger = logging.getLogger(__name__)

_numbers = itertools.count()


def group_name() -> str:
    """A new name for a group; equal on all ranks, which all ask for their names in the same order."""
    # The store is new whenever the ranks start: torch's default group, whose name never changes, relies on that too.
    return f"cpsr-{next(_numbers)}"


class SideGroup:
    """A gloo group of some ranks of the job, for CPU tensors; only its members take part in making it.

    `torch.distributed.new_group` is of no use here. If the default group is bound to a device, as DeepSpeed binds it,
    then ranks outside of the new group split the communicator of that device, which hangs; and barriers go through the
    device. This group takes nothing from the default group but its store of addresses.

    Collectives and messages return torch's `Work`; waiting for it raises RuntimeError if a rank is gone, or late. After
    a timeout gloo closes all connections of the group. A group that is not closed lives as long as the process: the
    destructor of a broken one waits for the other ranks, and so would the end of the process.

    Args:
        name: unique, and the same on every member; see `group_name`.
        ranks: the members, in ascending order; this rank among them.
        timeout_seconds: for connecting, and for whatever waits without a timeout of its own.

    Attributes:
        store: of addresses; free for other keys.

    Raises:
        RuntimeError: a member did not come in time.
    """

    def __init__(self, name: str, ranks: Sequence[int], timeout_seconds: float) -> None:
        self._ranks = list(ranks)
        self.store = PrefixStore(f"{name}/", _get_default_store())
        gloo = dist.ProcessGroupGloo(
            self.store,
            self._ranks.index(dist.get_rank()),
            len(self._ranks),
            timedelta(seconds=timeout_seconds),
        )
        # torch's stubs give a backend none of its collectives; they are those of a process group.
        self._gloo: dist.ProcessGroup | None = cast(dist.ProcessGroup, gloo)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))  # a module's reference would end with the interpreter

    @property
    def _open(self) -> dist.ProcessGroup:
        assert self._gloo is not None, "the group is closed"
        return self._gloo

    def close(self) -> None:
        """Leave the group, once all its members have done what they do in it; a second call has no effect."""
        if self._gloo is not None:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._gloo))
        self._gloo = None

    def all_reduce(self, values: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> dist.Work:
        """Begin to reduce a CPU tensor over the members, in place."""
        return self._open.allreduce([values], operation)

    def all_gather(self, parts: list[torch.Tensor], values: torch.Tensor) -> dist.Work:
        """Begin to copy the CPU tensor of each member, all of one shape and dtype, into `parts`."""
        return self._open.allgather(parts, values)

    def broadcast(self, values: torch.Tensor) -> dist.Work:
        """Begin to copy the first member's CPU tensor into those of all others, of its shape and dtype."""
        return self._open.broadcast(values, 0)

    def barrier(self) -> dist.Work:
        """Begin to wait for every member."""
        return self._open.barrier()

    def send(self, values: torch.Tensor, rank: int, tag: int = 0) -> dist.Work:
        """Begin to send a CPU tensor to a member."""
        return self._open.send([values], self._ranks.index(rank), tag)

    def receive(self, values: torch.Tensor, rank: int, tag: int = 0) -> dist.Work:
        """Begin to receive into a CPU tensor what a member sends with that tag, of the same shape and dtype."""
        return self._open.recv([values], self._ranks.index(rank), tag)


def pair_groups(rank: int, pairs: Iterable[tuple[int, int]], timeout_seconds: float) -> dict[int, SideGroup]:
    """A group of two with each rank that this one is in a pair with, by that rank.

    Of two, and not one of all: gloo answers a timeout by closing every connection of its group.

    Args:
        rank: this one.
        pairs: the same on every rank, also on one that is in none of them; in any order, each also more than once.
        timeout_seconds: see `SideGroup`.

    Raises:
        RuntimeError: a rank did not come in time.
    """
    name = group_name()
    own = {(min(pair), max(pair)) for pair in pairs if rank in pair}
    groups = {}
    for low, high in sorted(own):  # in the same order on all ranks, so that none waits for one that waits
        groups[low + high - rank] = SideGroup(f"{name}-{low}-{high}", (low, high), timeout_seconds)
    return groups


# A pass that has ended on a rank may be followed by another one, after an evaluation on this rank. This long the
# others wait for its next batch, once they need it for a step.
NEXT_PASS_SECONDS = 20.0
MARK_SECONDS = 2.0  # for the store; training, and leaving, do not wait longer for it


@dataclass(frozen=True)
class Mark:
    """How a rank has left its loop.

    Attributes:
        iteration: its last one.
        how: its batches have ended; its `with` block has ended; an error has ended that.
        error: which.
    """

    iteration: int
    how: Literal["batches", "block", "error"]
    error: str = ""

    def clause(self, rank: int) -> str:
        """What a rank of this mark has done."""
        if self.how == "error":
            return f"rank {rank} has left its loop after iteration {self.iteration} with {self.error}"
        if self.how == "block":
            return f"rank {rank} has left the `with CPSRRecovery` block after iteration {self.iteration}"
        return f"rank {rank} has no more batches after iteration {self.iteration}"


class Attendance:
    """The marks of all ranks, in the store of torch's process group."""

    def __init__(self, store: PrefixStore, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._own: Mark | None = None
        self._iteration: int | None = None  # that this rank trains; None: all others may be at any
        self._missed: dict[int, tuple[Mark, float]] = {}  # ranks without a next batch, and since when they are missed

    @property
    def ended(self) -> Literal["no", "batches", "loop"]:
        """Whether this rank has left its loop; on any thread."""
        own = self._own
        return "no" if own is None else "batches" if own.how == "batches" else "loop"

    def train(self, iteration: int) -> None:
        """This rank trains, or has trained, this iteration: the others take part in its collectives."""
        self._iteration = iteration
        if self._own is not None:
            self._mark(None)

    def leave(self, iteration: int, error: str | None = None, *, may_return: bool = False) -> None:
        """This rank takes part in no step after `iteration`.

        Args:
            iteration: its last one.
            error: why, if not because its `with` block has ended.
            may_return: only its batches have ended.
        """
        self._iteration = iteration
        how: Literal["batches", "block", "error"] = "error" if error else "batches" if may_return else "block"
        self._mark(Mark(iteration, how, error or ""))

    def require_all(self, *, waits: bool = True) -> None:
        """Check whether the others take part in what comes; it takes a round trip to the store.

        Args:
            waits: whether this rank waits for all; else it has only ended a step, after which others may have left.

        Raises:
            UnevenRanksError: a rank will not.
        """
        marks = self._marks()
        self._missed = {rank: seen for rank, seen in self._missed.items() if marks.get(rank) == seen[0]}
        for rank, mark in marks.items():
            if (waits or mark.iteration < (self._iteration or 0)) and self._waits_in_vain(rank, mark):
                raise self.error(self._rank, self._iteration, rank, mark)

    def _waits_in_vain(self, rank: int, mark: Mark) -> bool:
        if mark.how == "error":
            return True
        if self._iteration is None:
            return False
        if self._own is not None and self._own.how == "block":
            return mark.how == "block" and mark.iteration != self._iteration
        if mark.iteration >= self._iteration:
            return False
        _, since = self._missed.setdefault(rank, (mark, time.monotonic()))
        return mark.how == "block" or time.monotonic() - since > NEXT_PASS_SECONDS

    @staticmethod
    def error(own: int, iteration: int | None, rank: int, mark: Mark) -> UnevenRanksError:
        """What rank `own`, at an iteration, says of another one that it would wait for."""
        if mark.how == "error":
            return UnevenRanksError(f"{mark.clause(rank)}, and rank {own} would wait for it without end")
        return UnevenRanksError(
            f"{mark.clause(rank)}, and rank {own} is at iteration {iteration}. A checkpoint needs the "
            "state of all ranks after the same iteration, so CPSR cannot follow ranks that take different numbers of "
            "steps, also inside torch's Join. The run is as it was last saved. Give all ranks the same number of "
            "batches: DistributedSampler does, drop_last=True of the loader may be needed, too; or let all ranks leave "
            "the loop at the same step"
        )

    def _marks(self) -> dict[int, Mark]:
        others = [rank for rank in range(self._size) if rank != self._rank]
        try:
            if not self._store.add("marks", 0):
                return {}
            left = [rank for rank in others if self._store.check([str(rank)])]
            found = {rank: json.loads(self._store.get(str(rank))) for rank in left}
        except RuntimeError as error:  # its host is gone, which the collective itself finds out
            logger.debug("cannot see which ranks have left their loop: %s", error)
            return {}
        return {rank: Mark(**mark) for rank, mark in found.items() if mark is not None}

    def _mark(self, mark: Mark | None) -> None:
        if mark == self._own:
            return
        self._own = mark
        # The store may hang with its host.
        telling = threading.Thread(target=self._tell, args=(mark,), daemon=True)
        telling.start()
        telling.join(MARK_SECONDS)

    def _tell(self, mark: Mark | None) -> None:
        try:
            self._store.set(str(self._rank), json.dumps(None if mark is None else asdict(mark)))
            self._store.add("marks", 1)
        except RuntimeError as error:
            logger.debug("cannot tell the other ranks that this one leaves its loop: %s", error)


NODE_VARIABLE = "CPSR_NODE"
TIMEOUT_SECONDS = 1800.0  # torch's own for gloo
ATTENDANCE_SECONDS = 1.0  # between two looks at who has left its loop, where a rank waits
SLICE_SECONDS = 0.05  # of a wait, between which Python runs its signal handlers
# A value that fits here takes one collective, and a larger one two: a restart asks the others some fifty times. Of many
# ranks it is a smaller one.
PACKED_BYTES_MAX, PACKED_BYTES_MIN, PACKED_BYTES_OF_ALL = 4096, 512, 1 << 18
SIZE_BYTES = 8  # of it, for the size of the value


def this_node() -> str:
    """Identity of the machine that this process runs on: its host name, unless the environment gives another."""
    return os.environ.get(NODE_VARIABLE) or socket.gethostname()


class Group:
    """A gloo group of all ranks, or of this process alone where torch.distributed is not initialised.

    Every method is a collective: all ranks call it, on the training thread, in the same order. It raises
    UnevenRanksError instead of waiting for a rank that has left its training loop.

    Args:
        timeout_seconds: for connecting, and for whatever waits without a timeout of its own.

    Attributes:
        attendance: which ranks have left their loop; None: there are no others.
        nodes: the machine of each rank; see `this_node`.
    """

    def __init__(self, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._group: SideGroup | None = None
        self._broken = False
        self.attendance: Attendance | None = None
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            # A group of its own: its collectives cannot mix with, or queue behind, those of the training.
            self._group = SideGroup(group_name(), range(self.size), timeout_seconds)
            self.attendance = Attendance(PrefixStore("left/", self._group.store), self.rank, self.size)
        self._packed_bytes = min(max(PACKED_BYTES_OF_ALL // self.size, PACKED_BYTES_MIN), PACKED_BYTES_MAX)
        self.nodes: list[str] = self.gather(this_node())

    def close(self) -> None:
        """Leave the group; the training group is untouched. A group that broke is not destroyed."""
        if self._group is not None and not self._broken:
            self._group.close()
        self._group = None

    def barrier(self) -> None:
        """Wait for every rank."""
        if self._group is not None:
            self._wait(self._group.barrier())

    def reduce(self, values: torch.Tensor, how: str = "sum", timeout_seconds: float | None = None) -> torch.Tensor:
        """Reduce a CPU tensor over the ranks, in place.

        Args:
            values: any CPU tensor; the same shape on every rank.
            how: `sum`, `min` or `max`.
            timeout_seconds: how long to wait for the other ranks; None: as long as the group does.

        Raises:
            RuntimeError: a rank did not join in time, or is gone; the group cannot be used any more.
        """
        if self._group is None:
            return values
        operation = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}[how]
        self._wait(self._group.all_reduce(values, operation), timeout_seconds)
        return values

    def _wait(self, work: dist.Work, timeout_seconds: float | None = None) -> None:
        try:
            if timeout_seconds is not None:
                work.wait(timedelta(seconds=timeout_seconds))
                return
            look = time.monotonic() + ATTENDANCE_SECONDS
            while not _completes(work, SLICE_SECONDS):
                if self.attendance is not None and time.monotonic() > look:
                    self.attendance.require_all()
                    look = time.monotonic() + ATTENDANCE_SECONDS
        except (RuntimeError, UnevenRanksError):
            self._broken = True  # destroying it would wait for that rank
            raise

    def end(self, iteration: int) -> None:
        """Wait until the loop of every rank has ended.

        Args:
            iteration: the last one of this rank.

        Raises:
            UnevenRanksError: another rank has ended after another iteration.
        """
        self.barrier()
        if self.attendance is not None:
            self.attendance.require_all()
        others = {rank: last for rank, last in enumerate(self.gather(iteration)) if last != iteration}
        for rank, last in others.items():  # its mark did not arrive
            raise Attendance.error(self.rank, iteration, rank, Mark(last, "block"))

    def all(self, agreed: bool) -> bool:
        """Whether `agreed` is true on every rank."""
        return self.each([agreed])[0]

    def each(self, agreed: Sequence[bool]) -> list[bool]:
        """Which of these are true on every rank."""
        return [bool(one) for one in self.reduce(torch.tensor([*map(int, agreed)], device="cpu"), "min").tolist()]

    def sum(self, value: float) -> float:
        """The sum over the ranks, in float64."""
        return float(self.reduce(torch.tensor([value], dtype=torch.float64, device="cpu")).item())

    def broadcast(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank, once all have asked for it; what the others pass is ignored."""
        if self._group is None:
            return value
        data = json.dumps(value).encode() if self.rank == 0 else b""
        size, content = _unpacked(self.reduce(self._packed(data), "max"))  # of zeros on the other ranks
        if len(content) < size:
            rest = _padded(data, size)
            self._wait(self._group.broadcast(rest))
            content = bytes(rest.numpy())
        return json.loads(content)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank."""
        if self._group is None:
            return [value]
        data = json.dumps(value).encode()
        sizes, contents = zip(*map(_unpacked, self._gathered(self._packed(data))), strict=True)
        if any(map(operator.lt, map(len, contents), sizes)):
            parts = self._gathered(_padded(data, max(sizes)))
            contents = tuple(bytes(part[:size].numpy()) for part, size in zip(parts, sizes, strict=True))
        return [json.loads(content) for content in contents]

    def _packed(self, data: bytes) -> torch.Tensor:
        """Size and beginning of some data in a uint8 tensor."""
        size = self._packed_bytes
        return _padded((len(data).to_bytes(SIZE_BYTES, "little") + data)[:size], size)

    def _gathered(self, values: torch.Tensor) -> list[torch.Tensor]:
        assert self._group is not None
        parts = [torch.empty_like(values) for _ in range(self.size)]
        self._wait(self._group.all_gather(parts, values))
        return parts

    def pass_on(self, data: bytes, *, to: int, back: int) -> bytes:
        """Send bytes to one rank, and return what another one sends to this one; of all ranks together."""
        sizes = self.gather(len(data))
        if self._group is None:
            return data
        received = torch.empty(sizes[back], dtype=torch.uint8, device="cpu")
        sending = self._group.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to)
        try:
            for work in (self._group.receive(received, back), sending):
                work.wait()  # not in slices: gloo would close the connection after the first
        except RuntimeError:
            self._broken = True
            raise
        return bytes(received.numpy())

    def gather_present(self, value: Any) -> list[Any]:
        """As `gather`, without the ranks whose value is None."""
        return [present for present in self.gather(value) if present is not None]


def _completes(work: dist.Work, seconds: float) -> bool:
    """Whether a collective completes within this time.

    Raises:
        RuntimeError: it has failed.
    """
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:  # failed, or it takes longer
        if not work.is_completed():
            return False
        work.wait()
    return True


def _unpacked(packed: torch.Tensor) -> tuple[int, bytes]:
    """The size of some data, and its beginning."""
    content = packed.numpy().tobytes()
    size = int.from_bytes(content[:SIZE_BYTES], "little")
    return size, content[SIZE_BYTES : SIZE_BYTES + size]


def _padded(data: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
