"""Tokens that experts have lost because they were restored from older snapshots than the rest."""

from dataclasses import replace

from cpsr.experts.saving import ExpertSaving
from cpsr.journal import Beginning
from cpsr.ranks.group import Group
from cpsr.restart.restore import Restored

__all__ = ["with_lost_tokens"]


def with_lost_tokens(restored: Restored, experts: ExpertSaving | None, group: Group) -> Restored:
    """Add the tokens that experts have lost to the guard's measurements; a collective.

    Args:
        restored: the state from which the life continues.
        experts: counts the tokens; None if no checkpoint leaves experts out.
        group: all ranks.
    """
    if experts is None or restored.scalars is None:
        return restored
    experts.load_state_dict(restored.scalars.experts)
    if group.all(not restored.taken_at):
        return restored
    checkpoint, units, ages = restored.scalars.iteration, experts.units, dict[str, int]()
    for name in restored.taken_at.keys() & units.keys():
        ages[units[name]] = min(restored.taken_at[name], ages.get(units[name], checkpoint))
    lost = experts.restored(ages, checkpoint, predicted=restored.beginning is not Beginning.OLDER_EXPERTS)
    return replace(restored, guard={**restored.guard, "lost_tokens": lost})
