"""Which ranks hold the replicas of which rank's state.

This meets the aims of MoEtion, section 5.1 and Algorithm 2, by other steps. As printed, the formula for a rank's
data-parallel group gives one rank of every pipeline stage. The first peers of a group get everything, and the others
get nothing. Nodes are not looked at. The limit on a holder's load may leave a rank with fewer replicas than were asked
for.

What need not travel, by the same section, is in the sizes that a `Member` is given. Without ZeRO all ranks of a
data-parallel group have the same weights and moments, and only a rank's own buffers and scalars travel within it: to
another machine, which holds those as a rank of its own. A group that is on one machine has its replicas in other
groups, and travels whole. At ZeRO-1 and 2 the paper counts the parameters as replicated. That holds where they are
trained in fp32. In mixed precision what all have is the rounded copy, and the master weights are split as the moments
are. DeepSpeed's optimizer for bf16 splits them at stage 0, too. At ZeRO-3 everything travels.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

__all__ = ["Member", "Placement", "place", "place_within"]


@dataclass(frozen=True)
class Member:
    """One rank of the job, as the placement sees it.

    Attributes:
        node: identity of the machine whose memory it uses; what is lost together has the same one.
        group: label of its data-parallel group.
        bytes_within: what travels of its state to a holder of its own group; at least 1.
        bytes_beyond: the same to any other holder; at least 1.
    """

    node: str
    group: int
    bytes_within: int
    bytes_beyond: int

    def __post_init__(self) -> None:
        if min(self.bytes_within, self.bytes_beyond) < 1:
            raise ValueError(f"{self} sends nothing: a replica has a header at least")


@dataclass(frozen=True)
class Placement:
    """Who holds what.

    Attributes:
        holders: by owner, the ranks that hold its replicas: its own group's first, then ascending.
        load_bytes: by holder, what it receives for one snapshot of all ranks.
        shortfall: why there are fewer replicas than were asked for; None where there are not.
    """

    holders: tuple[tuple[int, ...], ...]
    load_bytes: tuple[int, ...]
    shortfall: str | None

    def owners_kept_by(self, holder: int) -> tuple[int, ...]:
        """Owners whose replicas that rank holds, ascending."""
        return tuple(owner for owner, holders in enumerate(self.holders) if holder in holders)


def place(members: Sequence[Member], replicas: int) -> Placement:
    """Choose the holders of every rank's replicas; a pure function, so all ranks find the same.

    In this order of importance: every rank gets `replicas` holders, or as many as there are other nodes; these lie on
    different nodes, none on the rank's own, so that a loss of so many nodes leaves a copy; as many of them as can be
    belong to its own data-parallel group; the largest load is small. It is the smallest possible where all sizes are
    equal, and otherwise exceeds the smallest possible by less than the largest size (`_Table.balance`).

    Args:
        members: all ranks, in rank order.
        replicas: how many each rank is to have on other nodes.
    """
    nodes = {member.node for member in members}
    count = min(replicas, len(nodes) - 1)
    table = _Table(members)
    table.fill(count)
    if count:
        table.balance()
    holders = tuple(
        tuple(sorted(chosen.values(), key=lambda holder: (members[holder].group != members[owner].group, holder)))
        for owner, chosen in enumerate(table.chosen)
    )
    shortfall = None
    if count < replicas and len(nodes) == 1:
        shortfall = "the job runs on one node: no other one can hold replicas of its state (peers.replicas)"
    elif count < replicas:
        shortfall = (
            f"{replicas} replicas of each rank's state are asked for and {count} possible: the job runs on "
            f"{len(nodes)} node{'s' * (len(nodes) > 1)}, and no two copies of a state lie on the same one"
        )
    return Placement(holders, tuple(table.load), shortfall)


def place_within(members: Sequence[Member], replicas: int, room_bytes: Mapping[str, int], slots: int) -> Placement:
    """The placement with as many replicas, up to those asked for, as every machine has memory for; pure, too.

    Args:
        members: all ranks, in rank order.
        replicas: how many each rank is to have on other nodes.
        room_bytes: what each node can give to replicas.
        slots: of each owner at each holder.
    """
    lacking: str | None = None
    for count in range(replicas, -1, -1):
        placement = place(members, count)
        load = dict.fromkeys(room_bytes, 0)
        for member, received in zip(members, placement.load_bytes, strict=True):
            load[member.node] += slots * received
        tight = max(load, key=lambda node: (load[node] - room_bytes[node], node))
        if load[tight] <= room_bytes[tight]:
            break
        kept = len(placement.holders[0])
        lacking = (
            f"{replicas} replicas of each rank's state are asked for, and there is memory for {kept - 1}: with {kept} "
            f"the machine {tight} would hold {load[tight]} bytes for other ranks, and {room_bytes[tight]} are to be "
            "had there beside its own snapshots. Add memory or shared memory (docker: --shm-size), or ask for fewer "
            "(peers.replicas)"
        )
    return placement if lacking is None else replace(placement, shortfall=lacking)


class _Table:
    """A placement while it is being made.

    An owner's replicas are of two kinds, and stay of their kind: those on nodes that have ranks of its group, held by
    one of these, and those on other nodes, held by any rank there.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.load = [0] * len(members)
        self.chosen: list[dict[str, int]] = [{} for _ in members]  # by owner: node -> holder
        self._owners_of: list[dict[int, None]] = [{} for _ in members]  # by holder: its owners, in the order they came
        group_nodes: dict[int, set[str]] = {}
        for member in members:
            group_nodes.setdefault(member.group, set()).add(member.node)
        self._group_nodes = group_nodes

    def fill(self, count: int) -> None:
        """Give each owner its holders: the largest owner first, each to the least loaded that may hold it."""
        members = self.members
        for owner in sorted(range(len(members)), key=lambda rank: (-members[rank].bytes_beyond, rank)):
            within = min(count, len(self._group_nodes[members[owner].group]) - 1)
            for index in range(count):
                allowed = [rank for rank in self._allowed(owner, within=index < within) if self._is_new(owner, rank)]
                # Of equally loaded ones the next after the owner: neighbours in a ring, not all of them the first.
                best = min(allowed, key=lambda rank: (self.load[rank], (rank - owner) % len(members)))
                self._put(owner, best)

    def balance(self) -> None:
        """Move replicas until the largest load is below a lower bound of it plus the largest size.

        A rank with too much looks for a shortest way to a rank below the bound, along moves that are allowed. It gives
        one replica to the next rank on that way. Whoever gives stays at the bound or above it, and whoever was below it
        never gets too much. So ways only become longer, and this ends, as preflows do in a network. Where there is no
        such way, what the ranks on all ways from there hold cannot be held elsewhere, not even in fractions. All of
        them are at the bound or above it. Their mean is a larger lower bound, and takes its place.
        """
        load, ranks = self.load, range(len(self.members))
        largest = max(self._bytes(owner, holder) for owner in ranks for holder in self.chosen[owner].values())
        bound = -(-sum(load) // len(load))
        while load[heaviest := max(ranks, key=lambda rank: (load[rank], -rank))] >= bound + largest:
            step, reached = self._way(heaviest, bound)
            if step is None:
                bound = -(-sum(load[rank] for rank in reached) // len(reached))
            else:
                self._move(*step)

    def _way(self, start: int, bound: int) -> tuple[tuple[int, int, int] | None, set[int]]:
        """First move (owner, from, to) of a shortest way to a rank below the bound, and the ranks that were reached."""
        first: dict[int, tuple[int, int, int] | None] = {start: None}
        waiting = deque([start])
        while waiting:
            holder = waiting.popleft()
            for owner in self._owners_of[holder]:
                for target in self._targets(owner, holder):
                    if target not in first:
                        first[target] = first[holder] or (owner, holder, target)
                        if self.load[target] < bound:
                            return first[target], set(first)
                        waiting.append(target)
        return None, set(first)

    def _targets(self, owner: int, holder: int) -> Iterator[int]:
        """Ranks that could hold the owner's replica in the place of that holder."""
        node = self.members[holder].node
        within = node in self._group_nodes[self.members[owner].group]
        for rank in self._allowed(owner, within=within):
            if rank != holder and (self.members[rank].node == node or self._is_new(owner, rank)):
                yield rank

    def _allowed(self, owner: int, *, within: bool) -> Iterator[int]:
        """Ranks of its group on other nodes, or all ranks of the nodes that have none of its group."""
        group, node = self.members[owner].group, self.members[owner].node
        for rank, member in enumerate(self.members):
            if (
                (member.group == group and member.node != node)
                if within
                else member.node not in self._group_nodes[group]
            ):
                yield rank

    def _is_new(self, owner: int, rank: int) -> bool:
        """Whether the owner has no replica on that rank's node."""
        return self.members[rank].node not in self.chosen[owner]

    def _bytes(self, owner: int, holder: int) -> int:
        one = self.members[owner]
        return one.bytes_within if self.members[holder].group == one.group else one.bytes_beyond

    def _put(self, owner: int, holder: int) -> None:
        self.chosen[owner][self.members[holder].node] = holder
        self._owners_of[holder][owner] = None
        self.load[holder] += self._bytes(owner, holder)

    def _move(self, owner: int, holder: int, target: int) -> None:
        del self.chosen[owner][self.members[holder].node], self._owners_of[holder][owner]
        self.load[holder] -= self._bytes(owner, holder)
        self._put(owner, target)
