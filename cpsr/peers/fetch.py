"""At a restart: states that a rank needs and another machine holds are brought to its own."""

from collections.abc import Sequence

from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.memory_states import MemoryState
from cpsr.checkpoint.tiers import Entry, Source
from cpsr.errors import CheckpointError
from cpsr.peers.peer import Peer, answer
from cpsr.peers.transport import PEER_SECONDS, Channel
from cpsr.ranks.group import Group, SideGroup, group_name

__all__ = ["fetch"]


def fetch(arena: Arena, group: Group, nodes: Sequence[str], sources: Sequence[Source]) -> dict[Entry, MemoryState]:
    """Bring every state that lies on another machine than the rank that takes it there; a collective of all ranks.

    The copies lie in shared memory until the caller removes their files. Where the process ends before, the next life
    finds them as states of this machine.

    Args:
        arena: this machine's.
        group: the ranks.
        nodes: machine of each rank, by rank.
        sources: what was decided, by rank; the same on all ranks.

    Returns:
        What was brought for this rank, verified; nothing of what lies on its own machine.

    Raises:
        CheckpointError: a state did not arrive whole; on every rank, so that all choose another source.
    """
    transfers = [
        (_sender(nodes, entry), source.rank, entry)
        for source in sources
        for entry in source.entries
        if entry.node != nodes[source.rank]
    ]
    fetched: dict[Entry, MemoryState] = {}
    if not transfers:
        return fetched
    # Whoever waits for its turn waits for those before it.
    timeout_seconds = PEER_SECONDS * len(transfers)
    side = SideGroup(group_name(), range(group.size), timeout_seconds)
    problems = []
    for sender, receiver, entry in transfers:  # in the same order on all ranks, so that none waits for one that waits
        try:
            if group.rank == sender:
                channel = Channel(side, receiver, timeout_seconds, serves=True)
                answer(channel, arena, channel.receive())
            elif group.rank == receiver:
                slab = Peer(Channel(side, sender, timeout_seconds), arena, receiver).open(entry)
                fetched[entry] = slab.state
        except (RuntimeError, OSError, CheckpointError) as error:
            problems.append(f"rank {group.rank}, {entry.name} from {entry.node}: {error}")
    gathered = [problem for part in group.gather(problems) for problem in part]
    if gathered:
        for state in fetched.values():
            state.path.unlink()
        raise CheckpointError("states of other machines did not arrive: " + "; ".join(gathered))
    side.close()
    return fetched


def _sender(nodes: Sequence[str], entry: Entry) -> int:
    """A rank on the machine that holds the state; several of them share the work by the rank whose state it is."""
    there = [rank for rank, node in enumerate(nodes) if node == entry.node]
    return there[entry.rank % len(there)]
