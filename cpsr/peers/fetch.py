"""At a restart: states that a rank needs and another machine holds are brought to its own."""

import threading
from collections.abc import Sequence
from pathlib import Path

from cpsr.checkpoint.memory_states import SHARED_MEMORY, MemoryState, memory_state
from cpsr.checkpoint.tiers import Entry, Source
from cpsr.errors import CheckpointError
from cpsr.peers.transport import (
    PEER_SECONDS,
    Channel,
    Kind,
    Message,
    problem_of,
    receive_state,
    sealed,
    send_state,
)
from cpsr.ranks.group import Group, SideGroup, group_name

__all__ = ["fetch", "fetched_path"]


def fetched_path(run_id: str, receiver: int, entry: Entry, directory: Path = SHARED_MEMORY) -> Path:
    """Where the rank that takes a state of another machine finds it."""
    return directory / f"cpsr-{run_id}-rank-{entry.rank:05d}-fetched-{receiver:05d}-{entry.kind}"


def fetch(
    run_id: str,
    group: Group,
    nodes: Sequence[str],
    sources: Sequence[Source],
    directory: Path = SHARED_MEMORY,
) -> dict[Entry, MemoryState]:
    """Bring every state that lies on another machine than the rank that takes it there; a collective of all ranks.

    The copies lie in shared memory until the caller removes their files. Where the process ends before, the next life
    finds them as states of this machine.

    Args:
        run_id: identity of the run.
        group: the ranks.
        nodes: machine of each rank, by rank.
        sources: what was decided, by rank; the same on all ranks.
        directory: this machine's shared memory.

    Returns:
        What was brought for this rank, verified; nothing of what lies on its own machine.

    Raises:
        CheckpointError: a state did not arrive whole; on every rank, so that all choose another source.
    """
    transfers = _transfers(nodes, sources)
    fetched: dict[Entry, MemoryState] = {}
    if not transfers:
        return fetched
    # Whoever waits for its turn waits for those before it.
    timeout_seconds = PEER_SECONDS * len(transfers)
    side = SideGroup(group_name(), range(group.size), timeout_seconds)

    def channel(peer: int) -> Channel:
        return Channel(side, peer, timeout_seconds)

    problems = []
    for sender, receiver, entry in transfers:  # in the same order on all ranks, so that none waits for one that waits
        try:
            if group.rank == sender:
                _send(channel(receiver), directory / entry.name, entry)
            elif group.rank == receiver:
                fetched[entry] = _receive(channel(sender), fetched_path(run_id, receiver, entry, directory), entry)
        except (RuntimeError, OSError, CheckpointError) as error:
            problems.append(f"rank {group.rank}, {entry.name} from {entry.node}: {error}")
    gathered = [problem for part in group.gather(problems) for problem in part]
    if gathered:
        for state in fetched.values():
            state.path.unlink()
        raise CheckpointError("states of other machines did not arrive: " + "; ".join(gathered))
    side.close()
    return fetched


def _transfers(nodes: Sequence[str], sources: Sequence[Source]) -> list[tuple[int, int, Entry]]:
    """Sender, receiver and state of each transfer, in the same order on all ranks."""
    return [
        (_sender(nodes, entry), source.rank, entry)
        for source in sources
        for entry in source.entries
        if entry.node != nodes[source.rank]
    ]


def _sender(nodes: Sequence[str], entry: Entry) -> int:
    """A rank on the machine that holds the state; several of them share the work by the rank whose state it is."""
    there = [rank for rank, node in enumerate(nodes) if node == entry.node]
    return there[entry.rank % len(there)]


def _send(channel: Channel, path: Path, entry: Entry) -> None:
    state = memory_state(path)
    if state is None or state.iteration != entry.iteration:
        channel.send(Message(Kind.DROPPED))
        raise CheckpointError(f"{path} does not hold iteration {entry.iteration} any more")
    if not send_state(channel, sealed(path, entry.iteration), threading.Event()):
        raise CheckpointError(f"{path} was overwritten while it was sent")


def _receive(channel: Channel, path: Path, entry: Entry) -> MemoryState:
    try:
        first = channel.receive()
        if first.kind is not Kind.PIECE or not receive_state(channel, first, path):
            raise CheckpointError("it is gone there")
        problem = problem_of(path, entry.rank, entry.iteration)
        state = memory_state(path)
        if problem is not None or state is None:
            raise CheckpointError(problem or "it is gone here")
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return state
