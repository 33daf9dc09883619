"""The state of optimizers, made in fresh ones from what a checkpoint says of it; also on another number of ranks.

On another number of ranks the numbers, as step counts, go to a tensor by the parameter's name. A flat tensor of ZeRO
then holds other parameters; it takes the numbers of its parameter group, which are the same for all tensors of a group.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cpsr.engines.distributed_tensors import is_distributed, local, split_as
from cpsr.engines.optimizer_entry import Form, dtype_of, flat_view, number_of, place_of, put_together, tree_from
from cpsr.engines.optimizer_state import OptimizerState
from cpsr.engines.updated_tensor import Known, Updated, group_sizes, optimizers_of
from cpsr.errors import UnsupportedEngineError
from cpsr.state.codec import same

__all__ = ["reshard_optimizers", "restore_optimizers", "shared_scalars"]


def restore_optimizers(state: OptimizerState, every: Sequence[Updated], scalars: dict[str, Any]) -> None:
    """Give the optimizers the state that was saved; its tensors are in `state.views(..., to_fill=True)`.

    Args:
        state: of the optimizers.
        every: all that they update, in the order in which it was saved.
        scalars: as `OptimizerState.scalars` gave them.

    Raises:
        UnsupportedEngineError: of other optimizers, groups or parameters, or a tensor was not brought; the message
            names the first difference. Nothing was changed.
    """
    saved, counts = scalars["optimizer_state"], scalars["optimizer_steps"]
    _require_same_optimizers(every, saved)
    if len(counts) != len(every):
        raise UnsupportedEngineError(
            f"the saved optimizer state covers {len(counts)} tensors and this optimizer updates {len(every)}; build "
            "the engine as it was"
        )
    made = []
    for index, updated in enumerate(every):
        form = json.loads(saved["forms"][saved["of"][index]])
        made.append(_RestoredEntry(state.known(updated), counts[index], saved["rest"].get(str(index), {}), form))
    for index, one in enumerate(made):
        one.put()
        _lay_out(every[index], saved["strides"].get(str(index)))
    state.load_outside(every, saved)


def _lay_out(updated: Updated, stride: list[int] | None) -> None:
    """Read the weights, which were restored in the order of their memory, in the order in which they were saved."""
    master = updated.master
    if not updated.whole or (stride is None and master.is_contiguous()) or list(master.stride()) == stride:
        return
    with torch.no_grad():
        order = torch.empty(master.shape, device="meta").stride() if stride is None else stride
        master.data = flat_view(master, updated.name).as_strided(master.shape, order)


class _RestoredEntry:
    """The state of one tensor, made of what was brought for it; `put` gives it to the optimizer.

    Args:
        known: what is known of it.
        numbers: as saved.
        more: tensors and trees that came with the numbers.
        form: of the state; None where there was none.

    Raises:
        UnsupportedEngineError: a tensor is missing, or does not fit; nothing was changed.
    """

    def __init__(self, known: Known, numbers: dict[str, Any], more: dict[str, Any], form: Form | None) -> None:
        self._known, self._numbers, self._more = known, numbers, more
        self._device = known.updated.master.device
        self._filled: list[tuple[torch.Tensor, Any]] = []  # tensors of the optimizer, and what comes into them
        self._state: Any = None if form is None else put_together(form, self._item)

    def put(self) -> None:
        """Nothing of what the optimizer had for the tensor stays, but the tensors that are filled."""
        updated = self._known.updated
        with torch.no_grad():
            for own, value in self._filled:
                own.copy_(value)
        entry, state = updated.optimizer.state.get(updated.master), self._state
        if state is None:
            updated.optimizer.state.pop(updated.master, None)
        elif isinstance(entry, dict) and type(entry) is type(state):
            entry.clear()
            entry.update(state)
        else:
            updated.optimizer.state[updated.master] = state

    def _item(self, path: str, form: Form) -> Any:
        if form[0] == "tensor":
            return self._tensor(path, form)
        return tree_from(self._more[path], self._device) if form[0] == "tree" else self._number(path, form)

    def _tensor(self, path: str, form: Form) -> torch.Tensor:
        kind, of = self._known.updated.kind, str(self._known.updated)
        dtype, shape, stride = dtype_of(form), tuple(form[2]), tuple(form[3])
        own = self._known.state.tensors.get(path)
        brought = self._known.room.get(path, own)
        if path in self._more:
            brought = self._more[path].to(place_of(form, self._device), copy=True).as_strided(shape, stride)
            brought = split_as(self._known.updated.master, brought) if form[4] == "split" else brought
        if brought is None and not math.prod(shape) and path in self._known.leaves:
            brought = self._known.room_for(path)  # nothing is to be brought
        if brought is None:
            raise UnsupportedEngineError(
                f"{kind} had {path} of shape {shape} for {of}, and no memory was made for it before it was loaded "
                "(shard(to_fill=True)); the checkpoint is as it was"
            )
        held, split = local(brought), form[4] == "split"
        if (held.dtype, held.numel(), is_distributed(brought)) != (dtype, math.prod(shape), split):
            raise UnsupportedEngineError(
                f"{path} of {of} was {form[1]} of shape {shape} when saved, and is {held.dtype} of shape "
                f"{tuple(held.shape)} now; build {kind} as it was"
            )
        if own is not None and _layout(local(own)) == (dtype, shape, stride):
            if brought is not own:
                self._filled.append((own, brought))
            return own
        held = held.as_strided(shape, stride)  # the elements in the order of the memory, as saved
        return split_as(self._known.updated.master, held) if split else held

    def _number(self, path: str, form: Form) -> Any:
        own, value = self._known.state.scalar(path), self._numbers[path]
        scalar = form[0] == "scalar" and isinstance(own, torch.Tensor)
        if scalar and (own.dtype, own.device) == (dtype_of(form), place_of(form, self._device)):
            # Where it is: a CUDA graph may read it there.
            self._filled.append((own, torch.tensor(value, dtype=own.dtype, device="cpu")))
            return own
        return number_of(form, value, self._device)


def _layout(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


def _require_same_optimizers(every: Sequence[Updated], saved: dict[str, Any]) -> None:
    """Compare classes, groups and parameters with those that were saved.

    Raises:
        UnsupportedEngineError: the message names the first difference.
    """
    optimizers = optimizers_of(every)
    classes = [type(one).__name__ for one in optimizers]
    if saved["classes"] != classes:
        raise UnsupportedEngineError(
            f"the state is of {' and '.join(saved['classes'])}, and the optimizer is {' and '.join(classes)} now; "
            "build the optimizer as it was"
        )
    for optimizer, sizes in zip(optimizers, saved["groups"], strict=True):
        found, kind = group_sizes(every, optimizer), type(optimizer).__name__
        if found != sizes:
            raise UnsupportedEngineError(
                f"the saved {kind} has {len(sizes)} parameter groups and this one {len(found)}, of {sizes} and {found} "
                "parameters; build the optimizer as it was"
            )
    for then, updated in zip(saved["names"], every, strict=False):
        if then != updated.name:
            raise UnsupportedEngineError(
                f"the state was saved for {then or 'a flat tensor'} where {updated.kind} now has {updated}; "
                "give it the parameters in the order in which it had them"
            )


@dataclass(frozen=True)
class _Entry:
    """What one rank saved for one tensor that was updated there; `name` is empty for a flat tensor."""

    name: str
    form: Form | None
    numbers: dict[str, Any]
    rest: dict[str, Any]
    stride: list[int] | None


def _entries(scalars: dict[str, Any]) -> dict[tuple[int, int], list[_Entry]]:
    """What one rank saved, by the numbers of optimizer and parameter group."""
    saved = scalars["optimizer_state"]
    forms = [json.loads(saved["forms"][place]) for place in saved["of"]]
    every = (
        _Entry(saved["names"][i], forms[i], numbers, saved["rest"].get(str(i), {}), saved["strides"].get(str(i)))
        for i, numbers in enumerate(scalars["optimizer_steps"])
    )
    places = [(place, group, size) for place, sizes in enumerate(saved["groups"]) for group, size in enumerate(sizes)]
    return {(place, group): list(itertools.islice(every, size)) for place, group, size in places}


def _shared_by(of_group: list[_Entry], updated: Updated) -> _Entry:
    """What a tensor takes that has parts of several parameters, or other ones than it had.

    Raises:
        UnsupportedEngineError: the tensors of its group have taken different steps, or there were none.
    """
    if not of_group:
        raise UnsupportedEngineError(
            f"the parameter group of {updated} had no state on the rank that it would take it from. Nothing was "
            "changed; go on with as many ranks as the run had"
        )
    first = of_group[0]
    if not all(
        same([first.numbers, _without_shapes(first.form)], [one.numbers, _without_shapes(one.form)])
        for one in of_group[1:]
    ):
        raise UnsupportedEngineError(
            f"the tensors in a parameter group of {updated.kind} have taken different steps, so that {updated}, which "
            "holds parts of several, has no step count. Nothing was changed; go on with as many ranks as the run had"
        )
    return of_group[0]


def reshard_optimizers(scalars: dict[str, Any], every: Sequence[Updated]) -> dict[str, Any]:
    """`OptimizerState.scalars` for this rank.

    Args:
        scalars: the engine's, of one rank of another number; what matters of it is the same on all of them (see
            `shared_scalars`).
        every: all that is updated on this rank, in the engine's order.

    Raises:
        UnsupportedEngineError: other optimizers or groups, or state that is no function of single elements in a tensor
            that is split; the message names it.
    """
    saved, optimizers = scalars["optimizer_state"], optimizers_of(every)
    entries, classes = _entries(scalars), [type(one).__name__ for one in optimizers]
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
    named = {one.name: one for of_group in entries.values() for one in of_group if one.name}
    forms: dict[str, int] = {}
    of, numbers, strides, rest = [], [], {}, {}
    for index, updated in enumerate(every):
        entry = named.get(updated.name) or _shared_by(entries[places[id(updated.group)]], updated)
        of.append(forms.setdefault(json.dumps(_fitted(entry, updated)), len(forms)))
        numbers.append(entry.numbers)
        if entry.rest:
            rest[str(index)] = entry.rest
        if entry.stride is not None and entry.name == updated.name:
            strides[str(index)] = entry.stride
    made = {"forms": list(forms), "of": of, "names": [one.name for one in every], "rest": rest, "groups": groups}
    return {"optimizer_steps": numbers, "optimizer_state": {**saved, **made, "strides": strides}}


def shared_scalars(scalars: dict[str, Any]) -> dict[str, Any]:
    """The part of an engine's `scalars()` that is the same on all ranks of a run, for a comparison."""
    saved = scalars["optimizer_state"]
    rest = {key: value for key, value in scalars.items() if key not in ("optimizer_state", "optimizer_steps")}
    numbers = [
        sorted({json.dumps(one.numbers, sort_keys=True) for one in of_group}) for of_group in _entries(scalars).values()
    ]
    return {**rest, "classes": saved["classes"], "numbers": numbers, "outside": saved["outside"]}


def _fitted(entry: _Entry, updated: Updated) -> Form | None:
    """The form of the state with the shapes that it has on this rank."""
    form, master, named = entry.form, updated.master, entry.name == updated.name and updated.whole
    if form is None or (named and not is_distributed(master)):
        return form
    tensors = [one for _, one in form[2] if one[0] == "tensor"]
    split = all(one[4] == "split" for one in tensors)
    if entry.rest or not (split if is_distributed(master) else len({math.prod(one[2]) for one in tensors}) < 2):
        raise UnsupportedEngineError(
            f"{updated.kind} keeps state that is not per element for {updated}, which is split over ranks: it "
            "cannot be dealt to another number of ranks. Nothing was changed; go on with as many ranks as the run had"
        )
    shape, stride = list(local(master).shape), list(local(master).stride())
    items = [[key, [*one[:2], shape, stride, one[4]] if one[0] == "tensor" else one] for key, one in form[2]]
    return [*form[:2], items]


def _without_shapes(form: Form | None) -> Form | None:
    return None if form is None else [[key, [*one[:2], one[4]] if one[0] == "tensor" else one] for key, one in form[2]]
