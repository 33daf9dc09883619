"""The recovery ladder: one rule chooses the source of each rank's state among those that all ranks can reach."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from operator import attrgetter
from typing import Literal

from cpsr.checkpoint.memory_states import HeldPart, Kind, belong_together

__all__ = ["Decision", "Entry", "Source", "decide", "wholes"]

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
        parts: of weights and moments that it holds, lacks (`snapshot`) or belongs to (`small`); empty where it lacks
            none, and nobody compares them.
        older: whether it holds experts of an earlier iteration.
        last: iteration of the newest part; of a window the one after which the state is whole.
    """

    rank: int
    iteration: int
    kind: Kind
    node: str
    name: str
    parts: tuple[HeldPart, ...] = ()
    older: bool = False
    last: int = -1

    def __post_init__(self) -> None:  # from JSON
        object.__setattr__(self, "parts", tuple(HeldPart(*part) for part in self.parts))

    @property
    def is_whole(self) -> bool:
        """Whether it lacks nothing of what it is."""
        return all(part.word for part in self.parts)


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
        more: states of other ranks, with parts that `entry` lacks.
    """

    rank: int
    tier: Tier
    iteration: int
    entry: Entry | None = None
    small: Entry | None = None
    more: tuple[Entry, ...] = ()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All states to read, in the order of `load_states`."""
        return tuple(entry for entry in (self.entry, *self.more, self.small) if entry is not None)

    @property
    def own(self) -> Entry | None:
        """The one with the small state."""
        return self.small or self.entry

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


def wholes(nodes: Sequence[str], entries: Sequence[Entry]) -> list[Source]:
    """Each snapshot and each dump that is whole, by itself or with what others hold, as a source of its rank."""
    reach = _Reach(nodes, entries, alike=range(len(nodes)))
    whole = [(entry, reach.given(entry, entry.node)) for entry in entries if entry.kind in ("snapshot", "departure")]
    return [
        Source(entry.rank, "memory", entry.iteration, entry, more=more) for entry, more in whole if more is not None
    ]


_ORDER = attrgetter("rank", "iteration", "kind", "node", "name", "parts", "older", "last")


class _Reach:
    """The states that ranks can read, as `decide` is given them."""

    def __init__(self, nodes: Sequence[str], entries: Sequence[Entry], *, alike: Sequence[int]) -> None:
        self._nodes = nodes
        self._alike = alike
        self._states_at = {entry.iteration for entry in entries}
        # The first of each kind and group, everywhere and near a rank: nobody looks through the states of all ranks for
        # each rank. Sorted, so that the order of the reports does not matter.
        self._first: dict[tuple[object, ...], Entry] = {}
        self._own: dict[tuple[int, int], list[Entry]] = {}  # snapshots by rank and iteration
        self._with_part: dict[tuple[int, str, str | None], list[tuple[Entry, HeldPart]]] = {}
        for entry in sorted(entries, key=_ORDER):
            for group in self._groups(entry):
                for near in product((entry.rank, None), (entry.node, None)):
                    self._first.setdefault((entry.iteration, entry.kind, group, *near), entry)
            if entry.kind != "snapshot":
                continue
            self._own.setdefault((entry.rank, entry.iteration), []).append(entry)
            for part in entry.parts:
                for node in (entry.node, None) if part.word else ():
                    self._with_part.setdefault((entry.iteration, part.name, node), []).append((entry, part))

    def _groups(self, entry: Entry) -> Iterator[tuple[str, int | str]]:
        """By what a state is looked for: whose it is, what it holds, and which ranks it can serve."""
        if entry.kind != "small" or entry.parts:
            yield "of", entry.rank
        if not entry.older and entry.is_whole:
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
        """A rank's own snapshot, with what it lacks; or its small state with the weights and moments of other ranks."""
        # Scalars differ between ranks (data, random states): another rank's would give this rank the wrong data.
        node = self._nodes[rank]
        for own in sorted(self._own.get((rank, iteration), ()), key=lambda entry: entry.node != node):
            if (more := self.given(own, node)) is not None:
                return Source(rank, "memory", iteration, own, more=more)
        small = self._nearest(rank, iteration, "small", ("of", rank))
        if small is None or not (tensors := self.given(small, node)):
            return None
        return Source(rank, "memory", iteration, tensors[0], small, tensors[1:])

    def given(self, own: Entry, node: str) -> tuple[Entry, ...] | None:
        """Snapshots with all parts that a state lacks, as few and as near as may be; None where there are none."""
        chosen: list[Entry] = []
        belongs = cache(lambda entry: belong_together(own.parts, entry.parts))
        for part in own.parts:
            if part.word and own.kind != "small":
                continue
            for near in (node, None):
                there = self._with_part.get((own.iteration, part.name, near), ())
                found = [entry for entry, other in there if part.is_given_by(other) and belongs(entry)]
                if found:
                    chosen += [] if any(entry in chosen for entry in found) else found[:1]
                    break
            else:
                return None
        return tuple(chosen)

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
