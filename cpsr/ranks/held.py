"""Which snapshots in host memory every rank holds, and which a rank may overwrite, without a vote.

A restart from memory needs one iteration of which every rank has a snapshot. All ranks take snapshots after the same
iterations, but each skips one by itself when no buffer is free, and seals the others when it can. Each says which it
holds, and up to which iteration it has sealed or skipped all of them. So of one that a rank has sealed it sees whether

- all hold it: it is common;
- some rank has passed it and does not hold it: it never becomes common, or a newer one already is;
- neither yet: it is open.

A rank overwrites neither the newest common snapshot that it sees, nor an open one that is newer. So the newest common
one that any rank has ever seen, G, is held by all. Every rank has sealed G. The first rank that drops G sees a newer
common one, against the choice of G; or it sees that another rank has passed G without it, which then has skipped G, or
dropped it first. What ranks say may be old: an older list only makes fewer common, and an older bound more open.
A checkpoint is not skipped for this: where its disk still writes those before, it may overwrite such a snapshot.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from cpsr.ranks.words import Words

__all__ = ["Held", "held_by_all"]

NONE = -1
LISTED = 6  # more than a rank has buffers in which sealed states can be open


@dataclass(frozen=True)
class Held(Words):
    """What a rank says of its snapshots, or several ranks together.

    Attributes:
        branch: how often the life has gone back: snapshots of other branches do not count.
        passed: the iteration up to which each has sealed or skipped all snapshots.
    """

    branch: int = 0
    passed: int = NONE
    first: int = NONE
    second: int = NONE
    third: int = NONE
    fourth: int = NONE
    fifth: int = NONE
    sixth: int = NONE

    @staticmethod
    def of(branch: int, passed: int, iterations: Collection[int]) -> "Held":
        """Of these sealed ones, the newest are listed."""
        newest = sorted(iterations, reverse=True)[:LISTED]
        return Held(branch, passed, *newest)

    @property
    def iterations(self) -> set[int]:
        """Those that each holds."""
        return {self.first, self.second, self.third, self.fourth, self.fifth, self.sixth} - {NONE}

    @property
    def newest(self) -> int:
        """The newest that each holds, or `NONE`."""
        return max(self.iterations, default=NONE)

    def must_stay(self, iteration: int) -> bool:
        """Whether a rank that sees this overwrites no snapshot of that iteration: it is common, or open and newer."""
        return iteration == self.newest or iteration > max(self.newest, self.passed)


def held_by_all(said: Iterable[Held | None], branch: int) -> Held:
    """What several say together; of one that has said nothing of this branch all is open."""
    ranks = [one if one is not None and one.branch == branch else Held(branch) for one in said]
    common = set.intersection(*(rank.iterations for rank in ranks))
    return Held.of(branch, min(rank.passed for rank in ranks), common)
