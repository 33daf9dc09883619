"""Which of the operators that all ranks of a data-parallel group hold each of them takes to learn from."""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cpsr.checkpoint.catalogue import newest_whole
from cpsr.checkpoint.loading import load_branch
from cpsr.checkpoint.manifest import Manifest
from cpsr.errors import CheckpointError
from cpsr.group import Group
from cpsr.predictor.sharing import SHARED_BRANCH, Learned
from cpsr.state import Shard

__all__ = ["Sharing", "owners"]

logger = logging.getLogger(__name__)


class Sharing:
    """Shares replicated operators out over the ranks that hold them (a `cpsr.predictor.sharing.Share`).

    They are replicated where every rank of the data-parallel group holds the same slice of every operator (ZeRO-0,
    DDP); elsewhere nothing is shared. What the others have learned is read from the checkpoints that they wrote: no
    rank waits for another, whether that one is slow, stopped or gone.
    """

    def __init__(self) -> None:
        self._rank = 0
        self._owners: dict[str, int] = {}
        self._members: tuple[int, ...] = ()
        self._store_directory = Path()
        self._said: set[int] = set()

    def open(self, group: Group, shard: Shard, data_parallel_ranks: Sequence[int], store_directory: Path) -> None:
        """Find out what is replicated; a collective. Before, and where nothing is, all operators are this rank's own.

        Args:
            group: all ranks.
            shard: what this rank holds.
            data_parallel_ranks: this rank's group, itself included.
            store_directory: the run's `checkpoints`.
        """
        self._rank, self._store_directory = group.rank, store_directory
        members = tuple(sorted(data_parallel_ranks))
        told = group.gather(_identity(shard, members))
        if len(members) > 1 and shard.operators and all(told[member] == told[group.rank] for member in members):
            self._members, self._owners = members, owners(shard, members)

    @property
    def is_shared(self) -> bool:
        """Whether other ranks take some of this rank's operators."""
        return bool(self._members)

    def is_mine(self, operator: str) -> bool:
        """Whether this rank takes that operator."""
        return self._owners.get(operator, self._rank) == self._rank

    def learned(self, iteration: int) -> Iterator[Learned | None]:
        """What every rank had learned of its operators when the newest checkpoint from that iteration on was saved.

        That very one may have been thinned while its history was hashed, and tells nothing then.
        """
        try:
            newest = newest_whole(self._store_directory, since=iteration)
        except (CheckpointError, OSError) as error:
            logger.warning("what the ranks have learned cannot be had: %s", error)
            return
        if newest is None:
            logger.warning("what the ranks have learned cannot be had: checkpoint %d is gone", iteration)
            return
        for member in self._members:
            yield self._learned_by(member, *newest)

    def _learned_by(self, member: int, directory: Path, manifest: Manifest) -> Learned | None:
        try:
            found = Learned.from_state(load_branch(directory, manifest, member, ("learned", *SHARED_BRANCH)))
        except (CheckpointError, ValueError) as error:
            if member not in self._said:
                self._said.add(member)
                logger.warning(
                    "what rank %d has learned of its share of the operators cannot be had; training of the predictor "
                    "goes on without it (said once): %s",
                    member,
                    error,
                )
            return None
        mine = {name: motion for name, motion in found.operators.items() if self._owners.get(name) == member}
        return Learned(found.seen, found.left_out, mine)


def owners(shard: Shard, members: Sequence[int]) -> dict[str, int]:
    """Operator -> the rank that takes it: about as many bytes of weights for each, and the same on every rank.

    The largest operators are given out first, each to whoever has the least so far: no rank has more than 4/3 of what
    the fairest division would leave the busiest (Graham 1969).

    Args:
        shard: what each of them holds.
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
    """The same for the ranks of one group that hold the same slices."""
    slices: Mapping[str, Sequence[object]] = {
        name: [operator.parameter.global_shape, operator.parameter.offset, operator.parameter.numel]
        for name, operator in sorted(shard.operators.items())
    }
    return hashlib.sha256(json.dumps([members, slices]).encode()).hexdigest()
