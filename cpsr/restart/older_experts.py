"""Experts of a checkpoint that were saved before it."""

from dataclasses import dataclass

from cpsr.checkpoint.snapshot import Snapshot
from cpsr.ranks.group import Group

__all__ = ["OlderExperts", "differing_operator", "older_experts", "older_operators"]


@dataclass(frozen=True)
class OlderExperts:
    """Older experts over all ranks' parts of one checkpoint.

    Attributes:
        parameters: how many were saved before it.
        oldest_iteration: when the oldest of them was.
    """

    parameters: int
    oldest_iteration: int


def older_operators(snapshot: Snapshot) -> dict[str, int]:
    """This rank's operators that were saved before the checkpoint that they are in -> when."""
    operators = snapshot.shard.operators
    return {name: one.iteration for name, one in operators.items() if one.iteration < snapshot.iteration}


def older_experts(snapshot: Snapshot, group: Group) -> OlderExperts | None:
    """Older experts that any rank has loaded; a collective. None where there are none."""
    ages = older_operators(snapshot).values()
    gathered = group.gather([len(ages), min(ages, default=snapshot.iteration)])
    count = sum(part[0] for part in gathered)
    return OlderExperts(count, min(part[1] for part in gathered)) if count else None


def differing_operator(snapshot: Snapshot, group: Group) -> str | None:
    """An operator of which ranks hold slices, or copies, of different iterations; a collective. None: there is none."""
    found: dict[str, set[int]] = {}
    for part in group.gather(older_operators(snapshot)):
        for name, at in part.items():
            found.setdefault(name, set()).add(at)
    own = snapshot.shard.operators
    differing = [name for name, ages in found.items() if name in own and ages != {own[name].iteration}]
    return next((name for part in group.gather(sorted(differing)[:1]) for name in part), None)
