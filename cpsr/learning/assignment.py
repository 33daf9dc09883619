"""Assigns the operators that a data-parallel group replicates: each rank learns from a part of them."""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cpsr.checkpoint.catalogue import newest_whole
from cpsr.checkpoint.loading import load_branch
from cpsr.checkpoint.manifest import Manifest
from cpsr.errors import CheckpointError
from cpsr.predictor.assignment import SHARED_BRANCH, Learned
from cpsr.ranks.group import Group
from cpsr.state.shard import Shard

__all__ = ["OperatorAssignment", "owners"]

logger = logging.getLogger(__name__)


class OperatorAssignment:
    """Divides replicated operators among their ranks, so that each rank learns from a part (a `Share`).

    Operators are replicated where every rank of the data-parallel group has the same slice of each (ZeRO-0, DDP).
    Elsewhere every rank learns from all of its own. A rank reads what the others have learned from their checkpoints,
    so that it never waits for a rank that is slow, stopped or gone.
    """

    def __init__(self) -> None:
        self._rank = 0
        self._owners: dict[str, int] = {}
        self._members: tuple[int, ...] = ()
        self._store_directory = Path()
        self._warned: set[int] = set()

    def open(self, group: Group, shard: Shard, data_parallel_ranks: Sequence[int], store_directory: Path) -> None:
        """Find the replicated operators; a collective. Before it, and without any, a rank learns from all of its own.

        Args:
            group: all ranks.
            shard: of this rank.
            data_parallel_ranks: the group of this rank, itself included.
            store_directory: the run's `checkpoints`.
        """
        self._rank, self._store_directory = group.rank, store_directory
        members = tuple(sorted(data_parallel_ranks))
        gathered = group.gather(_identity(shard, members))
        if len(members) > 1 and shard.operators and all(gathered[member] == gathered[group.rank] for member in members):
            self._members, self._owners = members, owners(shard, members)

    @property
    def is_shared(self) -> bool:
        """Whether other ranks learn from some of this rank's operators."""
        return bool(self._members)

    def is_mine(self, operator: str) -> bool:
        """Whether this rank learns from that operator."""
        return self._owners.get(operator, self._rank) == self._rank

    def learned(self, iteration: int) -> Iterator[Learned | None]:
        """What each rank had learned of its operators, as of the newest checkpoint from that iteration on.

        Retention may have thinned the checkpoint of that iteration while its history was being hashed.
        """
        try:
            newest = newest_whole(self._store_directory, since=iteration)
        except (CheckpointError, OSError) as error:
            logger.warning("cannot read what the ranks have learned: %s", error)
            return
        if newest is None:
            logger.warning("cannot read what the ranks have learned: checkpoint %d was removed", iteration)
            return
        for member in self._members:
            yield self._learned_by(member, *newest)

    def _learned_by(self, member: int, directory: Path, manifest: Manifest) -> Learned | None:
        if member not in manifest.ranks:  # fewer ranks saved it than there are now
            return None
        try:
            found = Learned.from_state(load_branch(directory, manifest, member, ("learned", *SHARED_BRANCH)))
        except (CheckpointError, ValueError) as error:
            if member not in self._warned:
                self._warned.add(member)
                logger.warning(
                    "cannot read what rank %d has learned of its operators; the predictor trains without it (logged "
                    "once): %s",
                    member,
                    error,
                )
            return None
        mine = {name: motion for name, motion in found.operators.items() if self._owners.get(name) == member}
        return Learned(found.seen, found.left_out, mine)


def owners(shard: Shard, members: Sequence[int]) -> dict[str, int]:
    """Operator -> the rank that learns from it: about as many bytes of weights for each, the same on every rank.

    The largest operators are assigned first, each to the rank with the fewest bytes so far. No rank gets more than 4/3
    of the busiest rank's bytes in the best division (Graham 1969).

    Args:
        shard: the same on each of them.
        members: ascending, at least 1.
    """
    sizes = {name: operator.parameter.values.nbytes for name, operator in shard.operators.items()}
    loads = dict.fromkeys(members, 0)
    owner: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner[name] = min(members, key=lambda member: (loads[member], member))
        loads[owner[name]] += sizes[name]
    return owner


def _identity(shard: Shard, members: Sequence[int]) -> str:
    """A digest that is equal on ranks of one group with the same slices."""
    slices: Mapping[str, Sequence[object]] = {
        name: [operator.parameter.global_shape, operator.parameter.offset, operator.parameter.numel]
        for name, operator in sorted(shard.operators.items())
    }
    return hashlib.sha256(json.dumps([members, slices]).encode()).hexdigest()
