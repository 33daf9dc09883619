"""The small state of optimizers on another number of ranks, made of what one rank of the old number saved.

Its numbers, as step counts, go to a tensor by the parameter's name. A flat tensor of ZeRO holds other parameters on
another number of ranks; it takes the numbers of its parameter group, which are the same for all tensors of the group.
"""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cpsr.engines.optimizer_state import Updated
from cpsr.engines.restored_entry import group_sizes, named, optimizers_of
from cpsr.engines.sharded import is_distributed, local
from cpsr.engines.state_tree import Form
from cpsr.errors import UnsupportedEngineError
from cpsr.state.codec import same

__all__ = ["resharded_optimizer", "shared_scalars"]


class _Entry:
    """What one rank saved for one tensor that was updated there."""

    def __init__(self, saved: dict[str, Any], numbers: dict[str, Any], index: int) -> None:
        self.name: str = saved["names"][index]
        self.form: Form | None = json.loads(saved["forms"][saved["of"][index]])
        self.numbers = numbers
        self.rest: dict[str, torch.Tensor] = saved["rest"].get(str(index), {})
        self.stride: list[int] | None = saved["strides"].get(str(index))


class _Entries:
    """What one rank saved for all tensors, by name and by parameter group."""

    def __init__(self, scalars: dict[str, Any]) -> None:
        saved, counts = _saved(scalars), scalars["optimizer_steps"]
        entries = [_Entry(saved, numbers, index) for index, numbers in enumerate(counts)]
        self._by_name = {one.name: one for one in entries if one.name}
        self._by_group: dict[tuple[int, int], list[_Entry]] = {}
        following = iter(entries)
        for place, sizes in enumerate(saved["groups"]):
            for group, size in enumerate(sizes):
                self._by_group[place, group] = [next(following) for _ in range(size)]

    def numbers(self) -> list[list[str]]:
        """Of each parameter group, every set of numbers that a tensor in it has."""
        return [
            sorted({json.dumps(one.numbers, sort_keys=True) for one in entries}) for entries in self._by_group.values()
        ]

    def of(self, updated: Updated, optimizer: int, group: int) -> _Entry:
        """What a tensor of this job takes.

        Args:
            updated: the tensor.
            optimizer: number of its optimizer.
            group: number of its parameter group in that.

        Raises:
            UnsupportedEngineError: the tensors of its group have taken different steps.
        """
        if updated.name in self._by_name:
            return self._by_name[updated.name]
        of_group = self._by_group.get((optimizer, group), [])
        if not of_group:
            raise UnsupportedEngineError(
                f"parameter group {group} of {updated.kind} had no state on the rank that {named(updated)} would take "
                "it from. Nothing was changed; go on with as many ranks as the run had"
            )
        first = of_group[0]
        for other in of_group[1:]:
            if not same([first.numbers, _paths(first.form)], [other.numbers, _paths(other.form)]):
                raise UnsupportedEngineError(
                    f"the tensors in parameter group {group} of {updated.kind} have taken different steps, so that "
                    f"{named(updated)}, which holds parts of several, has no step count. Nothing was changed; go on "
                    "with as many ranks as the run had"
                )
        return first


def resharded_optimizer(scalars: dict[str, Any], every: Sequence[Updated]) -> dict[str, Any]:
    """`OptimizerState.scalars` for this rank.

    Args:
        scalars: the engine's, of one rank of another number; what matters of it is the same on all of them (see
            `shared_scalars`).
        every: all that is updated on this rank, in the engine's order.

    Raises:
        UnsupportedEngineError: other optimizers or groups, or state that is no function of single elements in a tensor
            that is split; the message names it.
    """
    saved, optimizers = _saved(scalars), optimizers_of(every)
    entries, classes = _Entries(scalars), [type(one).__name__ for one in optimizers]
    groups = [group_sizes(every, one) for one in optimizers]
    if saved["classes"] != classes or list(map(len, saved["groups"])) != list(map(len, groups)):
        raise UnsupportedEngineError(
            f"the state is of {' and '.join(saved['classes'])} with {list(map(len, saved['groups']))} parameter "
            f"groups, the optimizer is {' and '.join(classes)} with {list(map(len, groups))} now; build it as it was"
        )
    places = {
        id(group): (place, number)
        for place, one in enumerate(optimizers)
        for number, group in enumerate(one.param_groups)
    }
    forms: dict[str, int] = {}
    of, numbers, strides = [], [], {}
    for index, updated in enumerate(every):
        entry = entries.of(updated, *places[id(updated.group)])
        of.append(forms.setdefault(json.dumps(_fitted(entry, updated)), len(forms)))
        numbers.append(entry.numbers)
        if entry.stride is not None and entry.name == updated.name:
            strides[str(index)] = entry.stride
    made = {"forms": list(forms), "of": of, "names": [one.name for one in every], "rest": {}, "groups": groups}
    return {"optimizer_steps": numbers, "optimizer_state": {**saved, **made, "strides": strides}}


def shared_scalars(scalars: dict[str, Any]) -> dict[str, Any]:
    """The part of an engine's `scalars()` that is the same on all ranks of a run, for a comparison."""
    saved = _saved(scalars)
    rest = {key: value for key, value in scalars.items() if key not in ("optimizer_state", "optimizer_steps")}
    return {**rest, "classes": saved["classes"], "numbers": _Entries(scalars).numbers(), "outside": saved["outside"]}


def _saved(scalars: dict[str, Any]) -> dict[str, Any]:
    saved: dict[str, Any] | None = scalars.get("optimizer_state")
    if saved is None:
        raise UnsupportedEngineError(
            "an earlier version saved the optimizer's state, without what another number of ranks needs. Nothing was "
            "changed; start once with as many ranks as the run had, until a checkpoint is committed"
        )
    return saved


def _fitted(entry: _Entry, updated: Updated) -> Form | None:
    """The form of the state with the shapes that it has on this rank."""
    master = updated.master
    if entry.form is None:
        return None
    if is_distributed(master):
        return _mapped(entry.form, lambda node: _split(node, updated))
    if entry.name == updated.name and updated.whole:
        return entry.form
    if entry.rest or len({math.prod(node[2]) for node in _tensors(entry.form)}) > 1:
        raise _not_per_element(updated)
    shape, stride = list(master.shape), list(master.stride())
    return _mapped(entry.form, lambda node: [node[0], node[1], shape, stride, node[4]])


def _split(node: Form, updated: Updated) -> Form:
    if node[4] != "split":
        raise _not_per_element(updated)
    held = local(updated.master)
    return [node[0], node[1], list(held.shape), list(held.stride()), node[4]]


def _not_per_element(updated: Updated) -> UnsupportedEngineError:
    return UnsupportedEngineError(
        f"{updated.kind} keeps state that is not per element for {named(updated)}, which is split over ranks: it "
        "cannot be dealt to another number of ranks. Nothing was changed; go on with as many ranks as the run had"
    )


def _mapped(form: Form, change: Callable[[Form], Form]) -> Form:
    """The form with every tensor's description changed."""
    if form[0] == "tensor":
        return change(form)
    if form[0] == "dict":
        return [form[0], form[1], [[key, _mapped(one, change)] for key, one in form[2]]]
    if form[0] in ("list", "tuple"):
        return [form[0], [_mapped(one, change) for one in form[1]]]
    return form


def _tensors(form: Form) -> list[Form]:
    found: list[Form] = []

    def note(node: Form) -> Form:
        found.append(node)
        return node

    _mapped(form, note)
    return found


def _paths(form: Form | None) -> Form | None:
    """The form without shapes."""
    return None if form is None else _mapped(form, lambda node: [node[0], node[1], node[4]])
