"""The recovery ladder: one rule chooses the source of each rank's state among those that all ranks can reach."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import product
from typing import Literal

from cpsr.checkpoint.memory_states import Kind

__all__ = ["Decision", "Entry", "Source", "decide"]

Tier = Literal["disk", "memory", "departure", "predicted"]


@dataclass(frozen=True)
class Entry:
    """A whole state outside the committed checkpoints, verified by the rank that reports it.

    Attributes:
        rank: the rank whose state it is.
        iteration: iteration at which it was taken.
        kind: `snapshot`, with all scalars; `departure`, the tensors alone; `small`, all but weights and moments;
            `window`, to be replayed from that iteration on.
        node: the machine whose memory holds it.
        name: of its file there.
        owned: hash of the weights and moments that it holds (`snapshot`) or belongs to (`small`); empty where nobody
            compares them.
        older: whether it holds experts of an earlier iteration.
        last: iteration of the newest part; of a window the one after which the state is whole.
    """

    rank: int
    iteration: int
    kind: Kind
    node: str
    name: str
    owned: str = ""
    older: bool = False
    last: int = -1


@dataclass(frozen=True)
class Source:
    """Where one rank's state comes from.

    Attributes:
        rank: the rank that takes it.
        tier: `disk`: the committed checkpoint; `memory`: a snapshot in host memory; `departure`: an emergency dump;
            `predicted`: no state is left.
        iteration: of the state; for `predicted` the one that is predicted.
        entry: the state to read, None from the disk and where it is predicted.
        small: the rank's own buffers and scalars, where `entry` is another rank's state. Of that only weights and
            moments are taken, which are equal bit for bit.
    """

    rank: int
    tier: Tier
    iteration: int
    entry: Entry | None = None
    small: Entry | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All states to read."""
        return tuple(entry for entry in (self.entry, self.small) if entry is not None)

    @property
    def older(self) -> bool:
        """Whether some of them has experts of an earlier iteration."""
        return any(entry.older for entry in self.entries)


@dataclass(frozen=True)
class Decision:
    """The sources of all ranks.

    Attributes:
        exact: sources of the newest state that every rank has with its scalars; from the disk, from memory, or empty
            where there is none.
        departed: sources of a newer state that some or all ranks dumped; else empty.
    """

    exact: tuple[Source, ...]
    departed: tuple[Source, ...] = ()

    @property
    def exact_iteration(self) -> int | None:
        """Where `exact` continues."""
        return self.exact[0].iteration if self.exact else None

    @property
    def complete(self) -> bool:
        """Whether every rank dumped its tensors at the later iteration, so that nothing must be predicted."""
        return bool(self.departed) and all(source.tier != "predicted" for source in self.departed)

    def failure_after(self, published_iteration: int) -> int:
        """The last step that every rank took part in: as published, or a later one that a rank has completed.

        A rank completes a step only with every other rank's part of it. A killed rank may have published less: its
        device was ahead of its last look at it.
        """
        return max(published_iteration, self.departed[0].iteration if self.departed else 0)


def decide(
    nodes: Sequence[str],
    entries: Sequence[Entry],
    checkpoint_iteration: int | None,
    published_iteration: int | None,
    *,
    alike: Sequence[int],
    stale: bool = False,
) -> Decision:
    """The sources of all ranks; equal on every rank for equal arguments.

    A rank can use a state on any machine: it is fetched from another one. It can also combine its small state with
    another rank's snapshot, if their weights and moments are equal bit for bit. Nothing older than the checkpoint is
    chosen, and all ranks get the same iteration.

    Args:
        nodes: machine of each rank, by rank.
        entries: of all ranks.
        checkpoint_iteration: c, the newest checkpoint that all ranks have loaded; None without one.
        published_iteration: the newest step that every rank had published; None where none is known. Dumps of later
            steps count, however much later.
        alike: by rank, a label of what it holds: an emergency dump of one rank serves all with its label. Without ZeRO
            all have the same one, or in a pipeline all of a stage.
        stale: whether the checkpoint has experts older than itself: a state of the same iteration is then
            preferred.
    """
    reach = _Reach(nodes, entries, alike=alike)
    newest = -1 if checkpoint_iteration is None else checkpoint_iteration - stale
    exact = reach.everywhere(newest)
    if not exact and checkpoint_iteration is not None:
        exact = tuple(Source(rank, "disk", checkpoint_iteration) for rank in range(len(nodes)))
    # A dump holds no complete small state: the rest comes from the checkpoint, so there must be one.
    if checkpoint_iteration is None or published_iteration is None:
        return Decision(exact)
    return Decision(exact, reach.departed(max(exact[0].iteration, published_iteration - 1)))


class _Reach:
    """The states that ranks can read, as `decide` is given them."""

    def __init__(self, nodes: Sequence[str], entries: Sequence[Entry], *, alike: Sequence[int]) -> None:
        self._nodes = nodes
        self._alike = alike
        self._states_at = {entry.iteration for entry in entries}
        # The first of each kind and group, everywhere and near a rank: nobody looks through the states of all ranks for
        # each rank. Sorted, so that the order of the reports does not matter.
        self._first: dict[tuple[object, ...], Entry] = {}
        for entry in sorted(entries, key=astuple):
            for group in self._groups(entry):
                for near in product((entry.rank, None), (entry.node, None)):
                    self._first.setdefault((entry.iteration, entry.kind, group, *near), entry)

    def _groups(self, entry: Entry) -> Iterator[tuple[str, int | str]]:
        """By what a state is looked for: whose it is, what it holds, and which ranks it can serve."""
        if entry.kind != "small" or entry.owned:
            yield "of", entry.rank
        if entry.kind == "snapshot" and entry.owned:
            yield "owned", entry.owned
        if not entry.older:
            yield "alike", self._alike[entry.rank]

    def everywhere(self, after: int) -> tuple[Source, ...]:
        """Sources of the newest iteration after that one at which every rank has a state with its own scalars."""
        for iteration in self._iterations(after):
            for source_of in (self._whole, self._window):
                sources = [source_of(rank, iteration) for rank in range(len(self._nodes))]
                found = [source for source in sources if source is not None]
                # All replay their windows together.
                ends = {entry.last for source in found for entry in source.entries if entry.kind == "window"}
                if len(found) == len(sources) and len(ends) <= 1:
                    return tuple(found)
        return ()

    def departed(self, after: int) -> tuple[Source, ...]:
        """Sources of the later iteration that most ranks dumped; of two, of the newer."""
        best: list[Entry | None] = []
        for iteration in self._iterations(after):
            found = [self._dumped(rank, iteration) for rank in range(len(self._nodes))]
            if found.count(None) < (best or [None] * len(found)).count(None):
                best, chosen = found, iteration
        return tuple(
            Source(rank, "predicted" if entry is None else "departure", chosen, entry)
            for rank, entry in enumerate(best)
        )

    def _iterations(self, after: int) -> list[int]:
        """Of all states after this one, the newest first."""
        return sorted((iteration for iteration in self._states_at if iteration > after), reverse=True)

    def _whole(self, rank: int, iteration: int) -> Source | None:
        """A rank's own snapshot; or its small state with the weights and moments of another rank's."""
        # Scalars differ between ranks (data, random states): another rank's would give this rank the wrong data.
        own = self._nearest(rank, iteration, "snapshot", ("of", rank))
        if own is not None:
            return Source(rank, "memory", iteration, own)
        small = self._nearest(rank, iteration, "small", ("of", rank))
        if small is None:
            return None
        tensors = self._nearest(rank, iteration, "snapshot", ("owned", small.owned))
        return None if tensors is None else Source(rank, "memory", iteration, tensors, small)

    def _window(self, rank: int, iteration: int) -> Source | None:
        """A rank's own window."""
        own = self._nearest(rank, iteration, "window", ("of", rank))
        return None if own is None else Source(rank, "memory", iteration, own)

    def _dumped(self, rank: int, iteration: int) -> Entry | None:
        """A dump that serves the rank, without older experts."""
        group = "alike", self._alike[rank]
        dump = self._nearest(rank, iteration, "departure", group)
        return dump or self._nearest(rank, iteration, "snapshot", group)

    def _nearest(self, rank: int, iteration: int, kind: Kind, group: tuple[str, int | str]) -> Entry | None:
        """The state that the rank would read: its own, or one on its own machine, where there are such."""
        for near in product((rank, None), (self._nodes[rank], None)):
            entry = self._first.get((iteration, kind, group, *near))
            if entry is not None:
                return entry
        return None
