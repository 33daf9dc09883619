"""Replacing a committed checkpoint: until the new one of its iteration is committed, the old one stays beside it."""

from pathlib import Path

from cpsr.checkpoint.files import remove_tree, sync_directory
from cpsr.checkpoint.manifest import COMMIT
from cpsr.checkpoint.verify import is_there

__all__ = ["replace", "settle_replacements"]

_REPLACED = "replaced-"  # before the name of a checkpoint, while a newer state of its iteration is being saved


def replace(step: Path, *, fsync: bool) -> None:
    """Move a checkpoint out of the way of the one that is to replace it."""
    step.rename(step.with_name(f"{_REPLACED}{step.name}"))
    if fsync:
        sync_directory(step.parent)


def settle_replacements(checkpoints: Path, *, fsync: bool) -> None:
    """Remove replaced checkpoints whose successor was committed, and put others back."""
    for old in checkpoints.glob(f"{_REPLACED}*"):
        step = old.with_name(old.name.removeprefix(_REPLACED))
        if is_there(step / COMMIT):
            remove_tree(old, first=COMMIT, fsync=fsync)
            continue
        if step.is_dir():
            remove_tree(step, first=COMMIT, fsync=fsync)
        old.rename(step)
        if fsync:
            sync_directory(checkpoints)
