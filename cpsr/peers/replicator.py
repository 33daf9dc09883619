"""Keeps this rank's newest snapshots in the host memory of other nodes, and theirs in this one's, beside training."""

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from cpsr.checkpoint.arena import Arena, Sealed
from cpsr.checkpoint.buffers import slab_size
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_states import REPLICAS
from cpsr.checkpoint.saved import fingerprint
from cpsr.checkpoint.writer import yield_to_training
from cpsr.errors import CheckpointError, SaveError
from cpsr.peers.partial import Sending
from cpsr.peers.peer import Peer, answer
from cpsr.peers.placement import Member, place_within
from cpsr.peers.small_states import SmallStates
from cpsr.peers.transport import PEER_SECONDS, Channel, Kind, Message
from cpsr.ranks.group import Group, pair_groups
from cpsr.state.shard import Shard

if TYPE_CHECKING:  # loaded when a run opens, by what the job uses
    from cpsr.experts.in_memory import InMemory

__all__ = ["Outgoing", "Replicator"]

SLOTS = 2  # of each owner at each holder: the older state stays whole while the newer arrives
CLOSE_SECONDS = 5.0  # beyond the timeout of a peer, within which every thread ends

# Kind of the event, one sentence, iteration, level of logging; called from several threads.
Report = Callable[[str, str, int | None, int], None]


class Outgoing:
    """Puts the newest state that was offered into a holder's memory, whenever that has the one before; in a thread.

    Args:
        channel: to the holder.
        arena: of this machine.
        rank: this one.
        report: records an event.
        form: what the holder gets of a state.
        experts: select among those of a snapshot that its link does not take whole; None: all are sent.

    Attributes:
        kept: iteration of the state that the holder keeps until another one is complete on all machines.
        on_replica: called with the seconds from the offer of a state until the holder had it.
    """

    def __init__(
        self,
        channel: Channel,
        arena: Arena,
        rank: int,
        report: Report,
        form: Callable[[Sealed], Sealed],
        experts: "InMemory | None" = None,
    ) -> None:
        self._channel, self._rank = channel, rank
        self._report, self._form = report, form
        self.on_replica: Callable[[float], None] = lambda seconds: None
        self.peer = channel.peer
        self._names = _slots(arena, rank, self.peer)
        self._sorted = False  # the next to be overwritten first
        self._holds: dict[str, int] = {}  # iteration of what lies there, of this branch of the life
        self.kept: int | None = None
        self._offered: tuple[Sealed, float] | None = None  # the state that waits, and since when
        self._newest: Sealed | None = None  # of all that were offered since the run last went back
        self._arrived: Sealed | None = None
        self._changed, self._stop = threading.Condition(), threading.Event()
        self._place, self._sending_of = Peer(channel, arena, rank, self._stop), Sending(experts)
        self._announced = self._sending = False
        self._reported: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"cpsr-replica-to-{self.peer}", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a state is being sent, or waits; not once the link has failed."""
        # In this order: a state that is taken meanwhile is seen as being sent.
        return (self._offered is not None or self._sending) and self._thread.is_alive()

    def has_arrived(self, iteration: int) -> bool:
        """Whether the newest state that was offered is of this iteration, and the holder has all of it."""
        newest = self._newest
        return newest is not None and newest is self._arrived and newest.iteration == iteration

    def offer(self, state: Sealed) -> None:
        """Send this state next, in place of one that waits."""
        with self._changed:
            self._offered, self._newest = (state, time.monotonic()), state
            self._changed.notify()

    def forget(self) -> None:
        """Nothing that was offered counts any more, and what waits is not sent."""
        with self._changed:
            self._offered = self._newest = self.kept = None
            self._holds = {}

    def end(self, *, announced: bool) -> None:
        """Send nothing more, but that this is the end where it is announced."""
        with self._changed:
            self._announced = announced
            self._stop.set()
            self._changed.notify()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end; whether it came."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        yield_to_training()
        try:
            while (offered := self._next()) is not None:
                self._send(*offered)
            if self._announced:
                self._channel.send(Message(Kind.END))
        except (RuntimeError, OSError, CheckpointError) as error:
            message = (
                f"rank {self.peer} gets no more replicas of this rank's state in this life ({_brief(error)}); training "
                "goes on, other replicas are not affected"
            )
            self._report("replication ended", message, None, logging.WARNING)

    def _next(self) -> tuple[Sealed, float] | None:
        """What is to be sent now, and since when it waits; None at the end."""
        with self._changed:
            self._sending = False
            self._changed.wait_for(lambda: self._offered is not None or self._stop.is_set())
            if self._stop.is_set():
                return None
            self._sending = True
            offered, self._offered = self._offered, None
            return offered

    def _send(self, state: Sealed, offered_at: float) -> None:
        """Send a state; one that cannot be read or kept is dropped."""
        if not self._sorted:  # once: what is there of the life before
            ages = {one.name: (one.life, one.branch, one.iteration) for one in self._place.list(self._rank)}
            self._names.sort(key=lambda name: ages.get(name, (-1, -1, -1)))
            newest = {ages[name][-1]: name for name in self._names if name in ages}  # of each iteration
            self._holds = {name: iteration for iteration, name in newest.items()}
            self._sorted = True
        name = next(name for name in self._names if self.kept is None or self._holds.get(name) != self.kept)
        self._holds.pop(name, None)
        try:
            image = self._sending_of.image(name, self._form(state))
            started = time.monotonic()
            self._place.put(name, image)
            self._sending_of.arrived(name, time.monotonic() - started)
        except (CheckpointError, SaveError, OSError) as error:
            why = re.sub(r"\d+", "", str(error))
            if not self._stop.is_set() and why not in self._reported:
                self._reported.add(why)
                message = (
                    f"rank {self.peer} has no replica of iteration {state.iteration}, but of an older one: {error}. "
                    "Further ones that fail so are not reported"
                )
                self._report("replica dropped", message, state.iteration, logging.WARNING)
            return
        if self._names[0] == name:
            self._names.reverse()
        with self._changed:
            if self._newest is not None:  # else the run has gone back
                self._holds = {one: at for one, at in self._holds.items() if at != state.iteration}
                self._holds[name] = state.iteration
        self._arrived = state
        self.on_replica(time.monotonic() - offered_at)


class Incoming:
    """Serves this machine's memory to one owner; in a thread of its own.

    Args:
        channel: from the owner.
        arena: of this machine.
        report: records an event.
    """

    def __init__(self, channel: Channel, arena: Arena, report: Report) -> None:
        self._channel, self._arena, self._report, self.peer = channel, arena, report, channel.peer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"cpsr-replica-from-{channel.peer}", daemon=True)
        self._thread.start()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end; whether it came."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Take nothing more; what is arriving may still end."""
        self._stop.set()

    def _run(self) -> None:
        yield_to_training()
        try:
            while (asked := self._channel.receive_unless(self._stop)) is not None and asked.kind is not Kind.END:
                answer(self._channel, self._arena, asked)
        except RuntimeError as error:
            message = (
                f"this rank takes no more replicas of rank {self.peer}'s state in this life ({_brief(error)}); "
                "those that it holds stay, training goes on, other replicas are not affected"
            )
            self._report("replication ended", message, None, logging.WARNING)


def _brief(error: Exception) -> str:
    """The first sentence of an error: gloo adds advice for whoever debugs training."""
    return str(error).partition(". ")[0]


class Replicator:
    """One rank's replication, in threads of its own: to each holder of its state, and from each owner of a replica.

    Training never waits for replication, and an error here never ends it. A rank that is unreachable, or does not
    answer in time, gets and sends no more replicas; this is reported once. Where snapshots come faster than the network
    takes them, each holder gets the newest one after it has received the one before.

    Opening is a collective of all ranks, and so is closing in good order. It may be opened before the run is restored:
    states of earlier lives stay until newer ones replace them, or are removed. Open it after the ranks of this
    machine have taken the memory for their own snapshots: the rest of the memory limits the number of replicas.

    Without ZeRO the ranks of a data-parallel group hold the same weights and moments. Then a holder of that group
    receives only the small state (kind `small`). Together with the holder's own snapshot it is the owner's state. Each
    commit compares whether they do hold the same; where they do not, whole states are sent from then on. At
    ZeRO-1 and 2 the whole state of a rank is sent. By the paper's rule fp32 weights could be left out there. But a
    holder would then have to copy the owner's slice from its own parameters at that iteration, and training would wait.

    Args:
        memory: shared memory of this rank's snapshots.
        group: the ranks.
        data_parallel_ranks: this rank's data-parallel group, itself included.
        template: the shard whose keys, shapes and dtypes every snapshot has.
        replicas: how many other nodes are to have its state.
        report: records an event; called from several threads.
        alike: whether ranks that hold the same slices hold the same values, as far as commits have compared these.
        window_bytes: of a window, where these go to the peers in place of snapshots; else 0.
        bytes_to_come: shared memory that this rank will take for itself beside its buffers.
        timeout_seconds: after which a peer that sends or takes nothing is given up.
        experts: see `Outgoing`.

    Attributes:
        placement: who holds what.
        outgoing: links to the ranks that hold replicas of this one's states.
    """

    def __init__(
        self,
        memory: SharedMemory,
        group: Group,
        data_parallel_ranks: Sequence[int],
        template: Shard,
        replicas: int,
        report: Report,
        *,
        alike: bool,
        window_bytes: int = 0,
        bytes_to_come: int = 0,
        timeout_seconds: float = PEER_SECONDS,
        experts: "InMemory | None" = None,
    ) -> None:
        self._arena, self._rank, self._report = memory.arena, group.rank, report
        members = _gathered(group, min(data_parallel_ranks), template, window_bytes, alike=alike)
        self._nodes = [member.node for member in members]
        self.placement = place_within(members, replicas, self._room_bytes(group, bytes_to_come), SLOTS)
        if self.placement.shortfall is not None and group.rank == 0:
            report("replicas", self.placement.shortfall, None, logging.WARNING)
        # One for each rank that this one sends to or receives from.
        pairs = [(owner, holder) for owner, holders in enumerate(self.placement.holders) for holder in holders]
        self._groups = pair_groups(self._rank, pairs, timeout_seconds)
        holders, owners = self.placement.holders[group.rank], self.placement.owners_kept_by(group.rank)
        own = members[group.rank]
        self._takes_small: set[int] = set()
        if own.bytes_within < own.bytes_beyond:
            self._takes_small = {holder for holder in holders if members[holder].group == own.group}
        self._small = self._small_states(memory, template)
        self._forming = threading.Lock()
        self._offered: Sealed | None = None  # last
        self._formed: tuple[Sealed, Sealed] | None = None  # the last that was formed, and its small state

        def channel(peer: int, *, serves: bool) -> Channel:  # one for each thread
            return Channel(self._groups[peer], peer, timeout_seconds, serves=serves)

        self._incoming = [Incoming(channel(owner, serves=True), self._arena, report) for owner in owners]
        own_state = self._arena, self._rank, report
        self.outgoing = [
            Outgoing(channel(holder, serves=False), *own_state, partial(self._form, holder), experts)
            for holder in holders
        ]
        self._wait_seconds = timeout_seconds + CLOSE_SECONDS

    def offer(self, state: Sealed) -> None:
        """Replicate a state that was sealed here; returns soon, from any thread.

        Whatever overwrites its file later need not wait: the replica is then dropped.
        """
        with self._forming:
            self._offered = state
        for outgoing in self.outgoing:
            outgoing.offer(state)

    def send_whole(self) -> None:
        """Ranks that should hold the same do not: from now on each holder gets all of a state."""
        self._takes_small.clear()

    def forget(self) -> None:
        """The run has gone back: by their branch, what the holders have counts no more."""
        with self._forming:  # what is being sealed has the branch of before
            self._offered = self._formed = None
        for outgoing in self.outgoing:
            outgoing.forget()

    def _form(self, holder: int, state: Sealed) -> Sealed:
        """What a holder gets of a state: all, or what it lacks; by its thread, before it sends it."""
        if self._small is None or holder not in self._takes_small:
            return state
        with self._forming:
            if self._offered is not state:
                raise CheckpointError("the run has gone back")
            if self._formed is None or self._formed[0] is not state:
                self._formed = state, self._small.seal(state)
            return self._formed[1]

    def held(self, *holders: int) -> list[str]:
        """Names of the replicas that these ranks hold in this life."""
        kept = [(owner, holder) for holder in holders for owner in self.placement.owners_kept_by(holder)]
        return [name for owner, holder in kept for name in _slots(self._arena, owner, holder)]

    def close(self, *, remove: bool, together: bool = True) -> None:
        """End replication.

        Args:
            remove: the replicas that this rank holds are removed; else they stay for the next life.
            together: all ranks close, so that what is under way may end; else nobody is waited for.
        """
        for outgoing in self.outgoing:
            outgoing.end(announced=together)
        ended = [outgoing.join(self._wait_seconds if together else CLOSE_SECONDS) for outgoing in self.outgoing]
        if together:
            ended += [incoming.join(self._wait_seconds) for incoming in self._incoming]
        for incoming in self._incoming:
            incoming.stop()
            incoming.join(CLOSE_SECONDS)
        if together and all(ended):  # with a dead peer, leaving a group would wait for it
            for group in self._groups.values():
                group.close()
        if self._small is not None:
            self._small.close(remove=remove)
        for name in self.held(self._rank) if remove else ():
            self._arena.drop(name)

    def _small_states(self, memory: SharedMemory, template: Shard) -> SmallStates | None:
        if not self._takes_small:
            return None
        try:
            return SmallStates(memory, template)
        except OSError as error:
            message = f"whole states are sent where buffers and scalars were enough, which have no place here: {error}"
            self._report("replicas", message, None, logging.WARNING)
            return None

    def _room_bytes(self, group: Group, bytes_to_come: int) -> dict[str, int]:
        """What each machine can give to replicas, with what those of an earlier life take already.

        Args:
            group: the ranks.
            bytes_to_come: that this rank will take for itself.
        """
        room = self._arena.room_for(REPLICAS)
        rooms: dict[str, int] = {}
        to_come = dict.fromkeys(self._nodes, 0)
        for node, (gathered, own) in zip(self._nodes, group.gather([room, bytes_to_come]), strict=True):
            rooms[node] = min(rooms.get(node, gathered), gathered)
            to_come[node] += own
        return {node: max(0, rooms[node] - to_come[node]) for node in rooms}


def _slots(arena: Arena, owner: int, holder: int) -> list[str]:
    """Where a holder has the states of an owner: names in its machine's memory."""
    return [arena.path(owner, f"replica-{holder:05d}-{slot}").name for slot in range(SLOTS)]


def _gathered(group: Group, label: int, template: Shard, window_bytes: int, *, alike: bool) -> list[Member]:
    """What the placement must know of every rank."""
    whole = window_bytes or slab_size(template).bytes
    # Nobody else has a rank's window, or a part of it.
    small = window_bytes or slab_size(Shard({}, template.others)).bytes
    gathered = group.gather([label, whole, small, fingerprint(template.operators.values())])
    owned: dict[int, set[str]] = {}
    for label_of_one, _, _, owned_by_one in gathered:
        owned.setdefault(label_of_one, set()).add(owned_by_one)
    return [
        Member(node, label, small if alike and len(owned[label]) == 1 else whole, whole)
        for node, (label, whole, small, _) in zip(group.nodes, gathered, strict=True)
    ]
