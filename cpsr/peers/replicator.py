"""Keeps this rank's newest snapshots in the host memory of other nodes, and theirs in this one's, beside training."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from cpsr.checkpoint.buffers import layout_bytes
from cpsr.checkpoint.memory import (
    BLOCK_BYTES,
    PAGE_BYTES,
    SHARED_MEMORY,
    SharedMemory,
    held_state,
    held_states,
    shared_memory_left,
)
from cpsr.checkpoint.resources import available_host_bytes
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.config import PeersConfig
from cpsr.errors import CheckpointError, SaveError
from cpsr.group import Group, this_node
from cpsr.peers.placement import Member, place_within
from cpsr.peers.small import SmallStates, fingerprint, small_bytes
from cpsr.peers.transport import (
    Channel,
    Kind,
    Message,
    Sealed,
    erase,
    problem_of,
    receive_state,
    sealed,
    send_state,
)
from cpsr.peers.twins import Twins
from cpsr.state import Shard

__all__ = ["Replicator", "Tell", "replica_path"]

# Kind of the event, one sentence, iteration, level of logging.
Tell = Callable[[str, str, int | None, int], None]

SLOTS = 2  # of each owner at each holder: the older state stays whole while the newer arrives
CLOSE_SECONDS = 5.0  # beyond the timeout of a peer, within which every thread ends


def replica_path(run_id: str, owner: int, holder: int, slot: int, directory: Path = SHARED_MEMORY) -> Path:
    """Where a holder keeps a replica of an owner's state."""
    return directory / f"cpsr-{run_id}-rank-{owner:05d}-replica-{holder:05d}-{slot}"


class Replicator:
    """One rank's replication, in threads of its own: to each holder of its state, and from each owner of a replica.

    Nothing here makes training wait, and nothing ends it: a rank that cannot be reached any more, or does not answer
    in time, gets and sends no more replicas, which is told once. Where snapshots come faster than the network takes
    them, each holder gets the newest whenever it has the one before.

    Opening it is a collective of all ranks, and so is closing it in good order. It may be opened before the run is
    restored: what earlier lives left stays until newer states take its place, or `remove_stale`. It is opened after
    this machine's ranks have taken the memory for their own snapshots: replicas are as many as the rest is enough for.

    Where the ranks of a data-parallel group own the same weights and moments (no ZeRO), a holder of that group is sent
    the small state alone, of the kind `small`: with the holder's own snapshot it makes the owner's. That they do is
    looked up in every checkpoint that is committed; where they do not, whole states travel from then on. At ZeRO-1 and
    2 all of a rank's state travels. In fp32 its weights need not by the paper's rule, but then a holder would have to
    copy the owner's slice out of its own parameters at the very iteration, and training would wait for that.

    Args:
        run_id: identity of the run.
        memory: this rank's shared memory.
        group: the ranks.
        data_parallel_ranks: this rank's data-parallel group, itself included.
        template: the shard whose keys, shapes and dtypes every snapshot has.
        config: how many replicas, and how they travel.
        tell: records an event; called from several threads.
        checkpoints: the run's directory of them, where all ranks see it.

    Attributes:
        placement: who holds what.
        nodes: machine of each rank.
    """

    def __init__(
        self,
        run_id: str,
        memory: SharedMemory,
        group: Group,
        data_parallel_ranks: Sequence[int],
        template: Shard,
        config: PeersConfig,
        tell: Tell,
        *,
        checkpoints: Path,
    ) -> None:
        self._run_id, self._rank = run_id, group.rank
        self._directory = memory.path("").parent
        self._tell = tell
        self._twins = Twins(checkpoints)
        members = _gathered(group, this_node(), min(data_parallel_ranks), template, self._twins)
        self.nodes = [member.node for member in members]
        self.placement = place_within(members, config.replicas, self._room_bytes(group), SLOTS)
        if self.placement.shortfall is not None and group.rank == 0:
            alone = len(set(self.nodes)) == 1
            tell("replicas", self.placement.shortfall, None, logging.DEBUG if alone else logging.WARNING)
        self._groups = self._connected(config.timeout_seconds)
        holders, owners = self.placement.holders[group.rank], self.placement.held_by(group.rank)
        own = members[group.rank]
        self._takes_small: set[int] = set()
        if own.bytes_within < own.bytes_beyond:
            self._takes_small = {holder for holder in holders if members[holder].group == own.group}
        self._small = self._small_states(memory, template)
        limit = config.rate_limit_bytes_per_second
        share = None if limit is None or not holders else limit / len(holders)
        self._outgoing = [
            _Outgoing(self._channel(holder, config), share, tell, partial(self._is_twin, holder)) for holder in holders
        ]
        self._incoming = [
            _Incoming(
                self._channel(owner, config),
                run_id,
                [replica_path(run_id, owner, group.rank, slot, self._directory) for slot in range(SLOTS)],
                tell,
            )
            for owner in owners
        ]
        self._wait_seconds = config.timeout_seconds + CLOSE_SECONDS

    def offer(self, file: Path, snapshot: Snapshot) -> None:
        """Replicate a whole snapshot that was sealed in this file; returns soon, from any thread.

        Whatever overwrites the file later need not wait: the replica is then dropped.
        """
        if not self._outgoing:
            return
        try:
            whole = sealed(file, snapshot.iteration)
            small = None
            if self._small is not None and self._takes_small:
                small = sealed(self._small.seal(snapshot), snapshot.iteration, small=True)
        except (SaveError, OSError) as error:
            told = f"the snapshot of iteration {snapshot.iteration} is not replicated: {error}"
            self._tell("not replicated", told, snapshot.iteration, logging.WARNING)
            return
        for outgoing in self._outgoing:
            outgoing.offer(small if small is not None and outgoing.peer in self._takes_small else whole)

    def forget_after(self, iteration: int) -> None:
        """Replicas of later iterations count no more, from when the holders have heard it: the run has gone back."""
        if self._small is not None:
            self._small.forget_after(iteration)
        for outgoing in self._outgoing:
            outgoing.forget_after(iteration)

    def remove_stale(self) -> None:
        """Remove what earlier lives, placed in another way, left on this machine; once a restart needs it no more."""
        self._remove_all_but(self.placement.held_by(self._rank))

    def _remove_all_but(self, owners: Sequence[int]) -> None:
        """Of the replicas on this machine, those that no rank of it holds, and this rank's but those of `owners`."""
        local = {rank for rank, node in enumerate(self.nodes) if node == self.nodes[self._rank]}
        for path in self._directory.glob(f"cpsr-{self._run_id}-rank-*-replica-*"):
            owner, holder = int(path.name.split("-")[-4]), int(path.name.split("-")[-2])
            if holder not in local or (holder == self._rank and owner not in owners):
                path.unlink(missing_ok=True)

    def close(self, *, remove: bool, together: bool = True) -> None:
        """End replication.

        Args:
            remove: the replicas that this rank holds are removed; else they stay for the next life.
            together: all ranks close, so that what is under way may end; else nobody is waited for.
        """
        for outgoing in self._outgoing:
            outgoing.end(told=together)
        ended = [outgoing.join(self._wait_seconds if together else CLOSE_SECONDS) for outgoing in self._outgoing]
        if together:
            ended += [incoming.join(self._wait_seconds) for incoming in self._incoming]
        for incoming in self._incoming:
            incoming.stop()
            incoming.join(CLOSE_SECONDS)
        if together and all(ended) and dist.is_initialized():  # with a dead peer, leaving a group would wait for it
            for group in self._groups.values():
                dist.destroy_process_group(group)
        if self._small is not None:
            self._small.close(remove=remove)
        if remove:
            self._remove_all_but(())

    def _connected(self, timeout_seconds: float) -> dict[int, dist.ProcessGroup]:
        """A group of two for each rank that this one sends to or receives from.

        Of two, and not one of all: gloo answers a timeout by closing every connection of its group.
        """
        pairs = {(min(pair), max(pair)) for pair in self._pairs()}
        groups = {}
        for pair in sorted(pairs):  # every rank takes part in the making of every group, in the same order
            made = dist.new_group(list(pair), timeout=timedelta(seconds=timeout_seconds), backend="gloo")
            if self._rank in pair:
                groups[sum(pair) - self._rank] = made
        return groups

    def _pairs(self) -> Iterable[tuple[int, int]]:
        return ((owner, holder) for owner, held in enumerate(self.placement.holders) for holder in held)

    def _small_states(self, memory: SharedMemory, template: Shard) -> SmallStates | None:
        if not self._takes_small:
            return None
        try:
            return SmallStates(memory, template)
        except OSError as error:
            told = f"whole states travel where buffers and scalars were enough, which have no place here: {error}"
            self._tell("replicas", told, None, logging.WARNING)
            return None

    def _is_twin(self, holder: int) -> bool:
        """Whether a small state is of use to that rank; by each holder's thread before it sends one."""
        words = self._twins.words(self._rank, holder)
        if words is None or words[0] == words[1]:
            return True
        if holder in self._takes_small:
            self._takes_small.remove(holder)
            told = (
                f"ranks {self._rank} and {holder} are of one data-parallel group and have committed different weights "
                f"or moments: rank {holder} is sent whole states of this rank from the next snapshot on. Where they "
                "train one model, it has come apart: look for a step that is not averaged over them"
            )
            self._tell("not alike", told, None, logging.WARNING)
        return False

    def _room_bytes(self, group: Group) -> dict[str, int]:
        """What each machine can give to replicas, with what those of an earlier life take already."""
        replicas = self._directory.glob(f"cpsr-{self._run_id}-rank-*-replica-*")
        taken = sum(path.lstat().st_blocks * BLOCK_BYTES for path in replicas)
        room = min(available_host_bytes(), shared_memory_left(self._directory)) + taken
        rooms: dict[str, int] = {}
        for node, told in zip(self.nodes, group.gather(room), strict=True):
            rooms[node] = min(rooms.get(node, told), told)
        return rooms

    def _channel(self, peer: int, config: PeersConfig) -> Channel:
        return Channel(self._groups[peer], peer, config.chunk_bytes, config.timeout_seconds)


def _gathered(group: Group, node: str, label: int, template: Shard, twins: Twins) -> list[Member]:
    """What the placement must know of every rank."""
    whole = PAGE_BYTES + layout_bytes(template)
    owned = [fingerprint(template), twins.words(group.rank)]
    said = group.gather([node, label, whole, small_bytes(template), owned])
    alike: dict[int, bool] = {}
    for _, label_of_one, _, _, owned_by_one in said:
        first = next(owned for _, other, _, _, owned in said if other == label_of_one)
        alike[label_of_one] = alike.get(label_of_one, True) and owned_by_one == first
    return [Member(node, label, small if alike[label] else whole, whole) for node, label, whole, small, _ in said]


class _Outgoing:
    """To one holder: the newest state that was offered, whenever the one before has been sent."""

    def __init__(
        self, channel: Channel, bytes_per_second: float | None, tell: Tell, is_twin: Callable[[], bool]
    ) -> None:
        self._channel = channel
        self._is_twin = is_twin
        self.peer = channel.peer
        self._bytes_per_second = bytes_per_second
        self._tell = tell
        self._orders: deque[Sealed | Message | None] = deque()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._overtaken = False
        name = f"cpsr-replica-to-{channel.peer}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def offer(self, state: Sealed) -> None:
        with self._changed:
            while self._orders and isinstance(self._orders[-1], Sealed):
                self._orders.pop()
            self._orders.append(state)
            self._changed.notify()

    def forget_after(self, iteration: int) -> None:
        with self._changed:
            self._orders = deque(order for order in self._orders if order is None or order.iteration <= iteration)
            self._orders.append(Message(Kind.FORGET, iteration))
            self._changed.notify()

    def end(self, *, told: bool) -> None:
        """Send nothing more but what is to be forgotten, or nothing at all."""
        with self._changed:
            self._stop.set()
            kept = [order for order in self._orders if isinstance(order, Message)] if told else []
            self._orders = deque([*kept, Message(Kind.END) if told else None])
            self._changed.notify()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end; whether it came."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._follow(self._next()):
                pass
        except (RuntimeError, OSError) as error:
            self._tell(
                "replication ended",
                f"rank {self.peer} gets no more replicas of this rank's state in this life ({_brief(error)}); "
                "training goes on, other replicas are not affected",
                None,
                logging.WARNING,
            )

    def _next(self) -> Sealed | Message | None:
        with self._changed:
            while not self._orders:
                self._changed.wait()
            return self._orders.popleft()

    def _follow(self, order: Sealed | Message | None) -> bool:
        """Do what was asked for; False after the end."""
        if order is None:
            return False
        if isinstance(order, Message):
            self._channel.send(order)
            return order.kind is not Kind.END
        if order.small and not self._is_twin():
            return True
        sent = send_state(self._channel, order, self._stop, self._bytes_per_second)
        if not sent and not self._stop.is_set() and not self._overtaken:
            self._overtaken = True
            self._tell(
                "replica dropped",
                f"the snapshot of iteration {order.iteration} was overwritten before rank {self.peer} had it: "
                "snapshots come faster than the network takes them, and only some are replicated. Not told again",
                order.iteration,
                logging.WARNING,
            )
        return True


class _Incoming:
    """From one owner: its states, in two files in turn, verified after arrival."""

    def __init__(self, channel: Channel, run_id: str, paths: Sequence[Path], tell: Tell) -> None:
        self._channel = channel
        self.peer = channel.peer
        self._run_id = run_id
        self._tell = tell
        held = {
            state.path: (state.life, state.branch, state.iteration) for state in held_states(run_id, paths[0].parent)
        }
        self._paths = sorted(paths, key=lambda path: held.get(path, (-1, -1, -1)))  # the next to be overwritten first
        self._stop = threading.Event()
        name = f"cpsr-replica-from-{channel.peer}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end; whether it came."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Take nothing more; what is arriving may still end."""
        self._stop.set()

    def _run(self) -> None:
        try:
            while (message := self._channel.receive_unless(self._stop)) is not None and message.kind is not Kind.END:
                if message.kind is Kind.FORGET:
                    self._forget_after(message.iteration)
                elif message.kind is Kind.PIECE:
                    self._take(message)
        except (RuntimeError, OSError, CheckpointError) as error:
            self._tell(
                "replication ended",
                f"this rank takes no more replicas of rank {self.peer}'s state in this life ({_brief(error)}); "
                "those that it holds stay, training goes on, other replicas are not affected",
                None,
                logging.WARNING,
            )

    def _take(self, first: Message) -> None:
        path, newest = self._paths
        if not receive_state(self._channel, first, path):
            return
        problem = problem_of(path, self.peer, first.iteration)
        if problem is None:
            self._paths = [newest, path]
            return
        erase(path)
        told = f"a replica of rank {self.peer} is not kept, it did not arrive whole: {problem}"
        self._tell("replica damaged", told, first.iteration, logging.WARNING)

    def _forget_after(self, iteration: int) -> None:
        for path in self._paths:
            held = held_state(path)
            if held is not None and held.iteration > iteration:
                erase(path)


def _brief(error: Exception) -> str:
    """Its first sentence: gloo adds advice for whoever debugs training."""
    return str(error).partition(". ")[0]
