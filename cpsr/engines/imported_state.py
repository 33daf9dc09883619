"""An engine's small state, made of what another tool's checkpoint tells by the names of parameters."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cpsr.engines.restored_entry import Updated, named, optimizers_of
from cpsr.errors import UnsupportedEngineError
from cpsr.state.codec import same

__all__ = ["IMPORTED", "imported_optimizer"]

IMPORTED = "imported"  # key in the engine's scalars, whose value is described below
_KEPT = "Nothing was changed; build the optimizer as it was where the checkpoint was saved"


def imported_optimizer(
    imported: Mapping[str, Any],
    every: Sequence[Updated],
    names: Mapping[int, Sequence[str]],
    kept: Sequence[Collection[str]],
) -> dict[str, Any]:
    """`optimizer_steps` and `param_groups` of this rank, in the form without `optimizer_state`.

    Args:
        imported: `numbers`: parameter -> what its state holds beside tensors; `groups`: the values of each parameter
            group; `group_of`: parameter -> its group, empty where the groups are known by their order alone.
        every: all that is updated on this rank, in the engine's order.
        names: by the id of a master, the parameters that this rank has in it.
        kept: for each of `every`, the keys of the numbers that its optimizer keeps.

    Raises:
        UnsupportedEngineError: the optimizer keeps other numbers, has other groups, or one flat tensor holds parameters
            that have taken different steps; the message names the first difference.
    """
    groups = [group for one in optimizers_of(every) for group in one.param_groups]
    members: dict[int, list[str]] = {id(group): [] for group in groups}
    for one in every:
        members[id(one.group)] += names.get(id(one.master), ())
    numbers = [
        _numbers(imported["numbers"], one, names.get(id(one.master), ()), keys)
        for one, keys in zip(every, kept, strict=True)
    ]
    values = [_group(imported, index, members[id(group)], len(groups)) for index, group in enumerate(groups)]
    return {"optimizer_steps": numbers, "param_groups": values}


def _numbers(
    known: Mapping[str, Mapping[str, Any]], one: Updated, names: Sequence[str], keys: Collection[str]
) -> dict[str, Any]:
    """Of one tensor; padding alone takes what all parameters have in common."""
    absent = [name for name in names if name not in known]
    if absent:
        raise UnsupportedEngineError(f"no state of {one.kind} was imported for {absent[0]}. {_KEPT}")
    found = [dict(known[name]) for name in names or known]
    for name, other in zip(names or known, found, strict=True):
        if not same(found[0], other):
            raise UnsupportedEngineError(
                f"{name} has {other}, where parameters before it have {found[0]}: {named(one)} holds all of them, and "
                f"{one.kind} keeps one of each number for it. {_KEPT}"
            )
    if found[0].keys() != set(keys):
        raise UnsupportedEngineError(
            f"{one.kind} keeps the numbers {sorted(keys)} for {named(one)}, {sorted(found[0])} were imported. {_KEPT}"
        )
    return found[0]


def _group(imported: Mapping[str, Any], index: int, members: Sequence[str], count: int) -> dict[str, Any]:
    groups, group_of = imported["groups"], imported["group_of"]
    places = sorted({group_of[name] for name in members if name in group_of})
    if len(places) > 1:
        first, second = (next(name for name in members if group_of.get(name) == place) for place in places[:2])
        raise UnsupportedEngineError(
            f"parameter group {index} has {first} and {second}, which were in groups of different settings. {_KEPT}"
        )
    if places:
        return dict(groups[places[0]])
    if len(groups) != count:
        raise UnsupportedEngineError(
            f"{len(groups)} parameter groups were imported and this optimizer has {count}, and nothing tells which of "
            f"them group {index} is. {_KEPT}"
        )
    return dict(groups[index])
