"""Loading by all ranks together: what is wrong on one is a problem of all."""

from collections.abc import Callable

from cpsr.checkpoint.verify import UnreadableFileError
from cpsr.errors import CheckpointError, RecoveryError, RunMismatchError
from cpsr.ranks.group import Group

__all__ = ["load_together"]


def load_together(group: Group, iteration: int, load: Callable[[], None]) -> str | None:
    """Load every rank's part of a checkpoint; a collective.

    Args:
        group: the ranks.
        iteration: of the checkpoint.
        load: loads this rank's part.

    Returns:
        What is wrong with the checkpoint on any rank.

    Raises:
        RunMismatchError: a rank's part is of another model or split over ranks; every rank raises it.
        RecoveryError: a file system cannot read a file now: the checkpoint may be whole, and continuing from an
            older one would abandon it; every rank raises it.
    """
    damage = mismatch = unreadable = None
    try:
        load()
    except RunMismatchError as error:
        mismatch = f"rank {group.rank}: {error}"
    except UnreadableFileError as error:
        unreadable = f"rank {group.rank}: {error}"
    except CheckpointError as error:
        damage = f"rank {group.rank}: {error}"
    gathered = group.gather({"damage": damage, "mismatch": mismatch, "unreadable": unreadable})
    problems = {kind: [part[kind] for part in gathered if part[kind] is not None] for kind in gathered[0]}
    if problems["mismatch"]:
        raise RunMismatchError("; ".join(problems["mismatch"]))
    if problems["unreadable"]:
        raise RecoveryError(f"checkpoint {iteration} cannot be read now. {'; '.join(problems['unreadable'])}")
    return "; ".join(problems["damage"]) or None
