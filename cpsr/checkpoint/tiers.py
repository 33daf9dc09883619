"""The ladder: from which state every rank comes back, decided by one rule over what all ranks can reach."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from cpsr.checkpoint.memory import Kind

__all__ = ["Decision", "Entry", "Source", "decide"]

Tier = Literal["disk", "memory", "departure", "predicted"]


@dataclass(frozen=True)
class Entry:
    """A whole state outside the committed checkpoints, verified by the rank that reports it.

    Attributes:
        rank: the rank whose state it is.
        iteration: iteration at which it was taken.
        kind: `snapshot`, with all scalars; `mixed`, the same with experts that are older than the rest; `departure`,
            the tensors alone; `small`, all but weights and moments.
        node: the machine whose memory holds it.
        name: of its file there.
        owned: one word for the weights and moments that it holds (`snapshot`, `mixed`) or belongs to (`small`); empty
            where nobody needs to compare them.
    """

    rank: int
    iteration: int
    kind: Kind
    node: str
    name: str
    owned: str = ""


@dataclass(frozen=True)
class Source:
    """Where one rank's state comes from.

    Attributes:
        rank: the rank that takes it.
        tier: `disk`: the committed checkpoint; `memory`: a snapshot in host memory; `departure`: what a rank left
            when the group broke; `predicted`: nothing of it is left.
        iteration: of the state; for `predicted` the one that is predicted.
        entry: what is read, None from the disk and where it is predicted.
        small: the rank's own buffers and scalars, where `entry` is another rank's and only its weights and moments,
            which are the same bit for bit, are taken.
    """

    rank: int
    tier: Tier
    iteration: int
    entry: Entry | None = None
    small: Entry | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All that is read."""
        return tuple(entry for entry in (self.entry, self.small) if entry is not None)


@dataclass(frozen=True)
class Decision:
    """What all ranks do.

    Attributes:
        exact: sources of the newest state that every rank has with its scalars; from the disk, from memory, or empty
            where there is none at all.
        departed: sources of a newer state of which some rank's tensors, or all of them, were left; else empty.
        mixed: sources of a newer state in memory that every rank has with its scalars, of which some rank has experts
            that are older than the rest; else empty.
    """

    exact: tuple[Source, ...]
    departed: tuple[Source, ...] = ()
    mixed: tuple[Source, ...] = ()

    @property
    def nearest(self) -> tuple[Source, ...]:
        """Sources of the newest state that nothing has to be predicted for."""
        return self.mixed or self.exact

    @property
    def nearest_iteration(self) -> int | None:
        """Where `nearest` continues."""
        return self.nearest[0].iteration if self.nearest else None

    @property
    def exact_iteration(self) -> int | None:
        """Where `exact` continues."""
        return self.exact[0].iteration if self.exact else None

    @property
    def departed_iteration(self) -> int | None:
        """Where `departed` continues."""
        return self.departed[0].iteration if self.departed else None

    @property
    def complete(self) -> bool:
        """Whether every rank's tensors at the later iteration were left, so that nothing has to be predicted."""
        return bool(self.departed) and all(source.tier != "predicted" for source in self.departed)


def decide(
    nodes: Sequence[str],
    entries: Sequence[Entry],
    checkpoint_iteration: int | None,
    failure_iteration: int | None,
    *,
    alike: Sequence[int],
    remote: bool = False,
    stale: bool = False,
) -> Decision:
    """The sources of all ranks; the same on every rank that is given the same.

    A state counts for a rank where it lies on the rank's own machine, or anywhere if it can be fetched. So do its small
    state and another rank's snapshot together, where they belong to the same weights and moments, bit for bit. Nothing
    older than the checkpoint is chosen, and no rank ever gets another iteration than the others.

    Args:
        nodes: machine of each rank, by rank.
        entries: of all ranks.
        checkpoint_iteration: c, the newest checkpoint that all ranks have loaded; None without one.
        failure_iteration: f, the last step that every rank had finished; None where nothing was lost.
        alike: by rank, a label of what it holds: what one rank has left does for all with its label. Without ZeRO all
            have the same one, or in a pipeline all of a stage.
        remote: whether a state can be fetched from another machine.
        stale: whether the checkpoint has experts that are older than it is: then a state of the same iteration goes
            before it, also one with older experts: what the disk has of an expert, memory has as new or newer.
    """
    reach = _Reach(nodes, entries, alike=alike, remote=remote)
    newest = -1 if checkpoint_iteration is None else checkpoint_iteration - stale
    exact = reach.everywhere(newest, ("snapshot",))
    mixed = reach.everywhere(exact[0].iteration if exact else newest, ("snapshot", "mixed"))
    if not exact and checkpoint_iteration is not None:
        exact = tuple(Source(rank, "disk", checkpoint_iteration) for rank in range(len(nodes)))
    # Of the small state not all was left: the rest comes from the checkpoint, so that there must be one.
    if checkpoint_iteration is None or failure_iteration is None:
        return Decision(exact, mixed=mixed)
    return Decision(exact, reach.departed(max(exact[0].iteration, failure_iteration - 1)), mixed)


class _Reach:
    def __init__(self, nodes: Sequence[str], entries: Sequence[Entry], *, alike: Sequence[int], remote: bool) -> None:
        self._nodes = nodes
        # In an order of their own, so that it does not matter who reported first.
        self._entries = sorted(entries, key=astuple)
        self._alike = alike
        self._remote = remote

    def entry(self, rank: int, iteration: int, kinds: Sequence[Kind]) -> Entry | None:
        """What the rank would take: its own before another's, near before far."""
        found = [
            entry
            for entry in self._entries
            if entry.iteration == iteration
            and entry.kind in kinds
            and self._alike[entry.rank] == self._alike[rank]
            and (self._remote or entry.node == self._nodes[rank])
        ]
        return min(
            found,
            key=lambda entry: (kinds.index(entry.kind), entry.rank != rank, entry.node != self._nodes[rank]),
            default=None,
        )

    def everywhere(self, after: int, kinds: Sequence[Kind]) -> tuple[Source, ...]:
        """Sources of the newest iteration after that one at which every rank has a state with its own scalars.

        Args:
            after: that iteration.
            kinds: of states that will do, the first before the second.
        """
        for iteration in sorted({entry.iteration for entry in self._entries}, reverse=True):
            if iteration <= after:
                break
            sources = [self._whole(rank, iteration, kinds) for rank in range(len(self._nodes))]
            found = [source for source in sources if source is not None]
            if len(found) == len(sources):
                return tuple(found)
        return ()

    def _whole(self, rank: int, iteration: int, kinds: Sequence[Kind]) -> Source | None:
        """A rank's own snapshot; or its small state with the weights and moments of another rank's."""
        # Scalars differ between ranks (data, random states): another's would deal this rank another's data.
        own = self._nearest(rank, iteration, kinds, lambda entry: entry.rank == rank)
        if own is not None:
            return Source(rank, "memory", iteration, own)
        small = self._nearest(rank, iteration, ("small",), lambda entry: entry.rank == rank and entry.owned != "")
        if small is None:
            return None
        owned = small.owned
        tensors = self._nearest(rank, iteration, kinds, lambda entry: entry.owned == owned)
        return None if tensors is None else Source(rank, "memory", iteration, tensors, small)

    def _nearest(self, rank: int, iteration: int, kinds: Sequence[Kind], fits: Callable[[Entry], bool]) -> Entry | None:
        """Of the states that fit and that the rank can read, one on its own machine before one elsewhere."""
        here = self._nodes[rank]
        found = [
            entry
            for entry in self._entries
            if entry.iteration == iteration
            and entry.kind in kinds
            and (self._remote or entry.node == here)
            and fits(entry)
        ]
        return min(found, key=lambda entry: (kinds.index(entry.kind), entry.node != here), default=None)

    def departed(self, after: int) -> tuple[Source, ...]:
        """Sources of the iteration after that one at which most ranks' tensors are there; of two, of the newer."""
        ranks = range(len(self._nodes))
        kinds: tuple[Kind, ...] = ("departure", "snapshot")
        found = {
            iteration: [self.entry(rank, iteration, kinds) for rank in ranks]
            for iteration in {entry.iteration for entry in self._entries if entry.iteration > after}
        }
        counts = {iteration: sum(entry is not None for entry in own) for iteration, own in found.items()}
        if not any(counts.values()):
            return ()
        chosen = max(counts, key=lambda iteration: (counts[iteration], iteration))
        return tuple(
            Source(rank, "predicted" if entry is None else "departure", chosen, entry)
            for rank, entry in enumerate(found[chosen])
        )
