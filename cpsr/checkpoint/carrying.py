"""What a snapshot copies anew, and what it carries over from the snapshot before, which lies in another buffer."""

from collections.abc import Sequence
from dataclasses import replace

from cpsr.checkpoint.contents import Contents
from cpsr.checkpoint.host_snapshot import Snapshot
from cpsr.checkpoint.parts import Held

__all__ = ["Carrying"]


class Carrying:
    """Follows which buffer has the newest snapshot, and of which iteration each of its parts is.

    `begin` and `begun` belong to the training thread; `complete` to the one that seals, in the order of the snapshots.

    Args:
        held: what each buffer holds.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = held
        self._newest: tuple[int, Snapshot] | None = None

    def begin(self, index: int, snapshot: Snapshot, contents: Contents) -> None:
        """Note what a snapshot copies into its buffer; of everything if there is no snapshot before it.

        Raises:
            SaveError: an operator that it leaves out has no part of its own.
        """
        if self._newest is not None and self._newest[0] == index:
            self._newest = None
        if contents.uncopied and self._newest is None:
            contents = replace(contents, uncopied=frozenset())
        snapshot.contents, held = contents, self._held[index]
        copied = held.parts.besides(contents.uncopied)
        held.overwrite(copied)
        snapshot.taken_at = dict.fromkeys(copied, snapshot.iteration)
        if contents.uncopied and self._newest is not None:
            snapshot.source, before = self._newest[0], self._newest[1]
            snapshot.taken_at = {**before.taken_at, **snapshot.taken_at}

    def begun(self, index: int, snapshot: Snapshot) -> None:
        """Its copy is under way: the next one may carry over what it holds."""
        self._newest = index, snapshot

    def forget(self) -> None:
        """Carry nothing over: a snapshot failed, or the run has gone back."""
        self._newest = None

    def complete(self, index: int, snapshot: Snapshot) -> Held:
        """What the buffer holds once its copy is through: what was left out comes from the snapshot before.

        Raises:
            SaveError: that one does not hold it.
        """
        held = self._held[index]
        if not snapshot.taken_at:  # it was loaded, not copied
            snapshot.taken_at = _iterations(held, snapshot)
            held.taken_at = dict(snapshot.taken_at)
        held.fill([part for part, at in snapshot.taken_at.items() if at == snapshot.iteration], snapshot.iteration)
        if snapshot.source is not None:
            held.carry(snapshot.taken_at, self._held[snapshot.source])
        return held


def _iterations(held: Held, snapshot: Snapshot) -> dict[str, int]:
    """The oldest iteration in each part of a loaded state."""
    found = dict.fromkeys(held.parts.names, snapshot.iteration)
    for name, operator in snapshot.shard.operators.items():
        part = held.parts.of(name)
        found[part] = min(found[part], operator.iteration)
    return found
