"""Gloo connections among some ranks, beside the groups of the training."""

import ctypes
import itertools
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

__all__ = ["SideGroup", "group_name", "pair_groups"]

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
