"""Collectives among the ranks of one job, beside the training group and without pickle."""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from cpsr.errors import UnevenRanksError
from cpsr.ranks.attendance import Attendance
from cpsr.ranks.side_group import SideGroup, group_name

__all__ = ["NODE_VARIABLE", "Ballot", "Group", "Votes", "this_node"]

NODE_VARIABLE = "CPSR_NODE"
TIMEOUT_SECONDS = 1800.0  # torch's own for gloo
ATTENDANCE_SECONDS = 1.0  # between two looks at who has left its loop, where a rank waits
# Between two looks at whether a collective is complete.
PAUSE_SECONDS = 5e-5
LONGEST_PAUSE_SECONDS = 1e-3


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
            pause, look = PAUSE_SECONDS, time.monotonic() + ATTENDANCE_SECONDS
            while not work.is_completed():
                time.sleep(pause)
                pause = min(1.2 * pause, LONGEST_PAUSE_SECONDS)
                if self.attendance is not None and time.monotonic() > look:
                    self.attendance.require_all()
                    look = time.monotonic() + ATTENDANCE_SECONDS
            work.wait()
        except (RuntimeError, UnevenRanksError):
            self._broken = True  # destroying it would wait for that rank
            raise

    def all(self, agreed: bool) -> bool:
        """Whether `agreed` is true on every rank."""
        return bool(self.reduce(torch.tensor([int(agreed)], device="cpu"), "min").item())

    def sum(self, value: float) -> float:
        """The sum over the ranks, in float64."""
        return float(self.reduce(torch.tensor([value], dtype=torch.float64, device="cpu")).item())

    def mean(self, value: float) -> float:
        """The mean over the ranks, in float64."""
        return self.sum(value) / self.size

    def broadcast(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank; what the others pass is ignored."""
        return self.gather(value if self.rank == 0 else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank."""
        if self._group is None:
            return [value]
        data = json.dumps(value).encode()
        sizes = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        sizes[self.rank] = len(data)
        self.reduce(sizes)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device="cpu")
        padded.numpy()[: len(data)] = bytearray(data)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._wait(self._group.all_gather(parts, padded))
        return [json.loads(bytes(part[:size].numpy())) for part, size in zip(parts, sizes.tolist(), strict=True)]

    def votes(self) -> "Votes":
        """A running vote of the ranks; see `Votes`."""
        return Votes(self._group, self._wait)


@dataclass(frozen=True)
class Ballot:
    """What one rank proposes at a step boundary, or all have agreed on; the largest value of each wins.

    Attributes:
        stop: a rank was asked to leave.
        interval_iterations: proposed interval; 0 proposes nothing.
        memory_interval_iterations: proposed with the interval; 0: no snapshots in memory. One rank proposes.
        blocked: a rank cannot take a snapshot in memory now.
        busy: a rank is sending a replica.
    """

    stop: bool = False
    interval_iterations: int = 0
    memory_interval_iterations: int = 0
    blocked: bool = False
    busy: bool = False


class Votes:
    """A vote without waiting: proposals at one step boundary are agreed at the next.

    The reduction of 40 bytes runs beside the following step. Every rank gets the same result at the same step, so
    that all leave together, change the intervals together, and take the same snapshots.
    """

    def __init__(self, group: SideGroup | None, wait: Callable[[dist.Work], None]) -> None:
        self._group = group
        self._wait = wait
        self._ballot = torch.zeros(5, dtype=torch.int64, device="cpu")
        self._work: dist.Work | None = None

    def exchange(self, ballot: Ballot) -> Ballot:
        """Submit this rank's proposals; returns what was agreed from the previous call."""
        if self._group is None:
            return ballot
        if self._work is not None:
            self._wait(self._work)
        stop, interval, memory_interval, blocked, busy = self._ballot.tolist()
        agreed = Ballot(bool(stop), interval, memory_interval, bool(blocked), bool(busy))
        self._ballot.copy_(torch.tensor(astuple(ballot), dtype=torch.int64, device="cpu"))
        self._work = self._group.all_reduce(self._ballot, dist.ReduceOp.MAX)
        return agreed

    def finish(self) -> None:
        """Wait for the last vote: no collective may be under way when the group closes."""
        if self._work is not None:
            self._wait(self._work)
            self._work = None
