"""The numbers of ranks that a run has had."""

from dataclasses import dataclass
from itertools import pairwise

from cpsr.journal.reader import JournalReader

__all__ = ["Size", "sizes"]


@dataclass(frozen=True, slots=True)
class Size:
    """A number of ranks.

    Attributes:
        ranks: their number.
        since_iteration: where they began to train.
        life: the first one with them.
        since_unix_seconds: the start of that life.
    """

    ranks: int
    since_iteration: int
    life: int
    since_unix_seconds: float


def sizes(reader: JournalReader) -> list[Size]:
    """Each number of ranks in turn, oldest first; the last one is the present one.

    Lives of earlier versions, of which the number is not recorded, are left out, and so is one that has not begun to
    train yet.

    Raises:
        JournalError: the journal cannot be read.
    """
    seconds, found = reader.seconds_of_lives(), list[Size]()
    for life in reader.lives():
        since = life.restored_iteration
        if since is None and seconds.get(life.life):
            since = 0  # from scratch
        if life.ranks is not None and since is not None:
            found.append(Size(life.ranks, since, life.life, life.started_unix_seconds))
    return found[:1] + [after for before, after in pairwise(found) if before.ranks != after.ranks]
