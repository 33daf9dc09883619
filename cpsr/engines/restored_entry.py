"""The state of one tensor, made in a fresh optimizer from what a checkpoint says of it."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cpsr.engines.optimizer_probe import Expected, Leaf
from cpsr.engines.sharded import is_distributed, local, split_as
from cpsr.engines.state_tree import Form, StateTree, dtype_of, flat_view, number_of, place_of, put_together
from cpsr.errors import UnsupportedEngineError

__all__ = ["Known", "RestoredEntry", "Updated", "earlier_form", "group_sizes", "named", "optimizers_of"]
__all__ += ["require_same_optimizers"]


@dataclass(frozen=True)
class Updated:
    """One tensor that an optimizer updates.

    Attributes:
        optimizer: torch's.
        group: the parameter group of `master`.
        master: the key into the optimizer's state.
        name: of the parameter; empty for a flat tensor of many.
    """

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    master: torch.Tensor
    name: str = ""

    @property
    def whole(self) -> bool:
        """Whether it is one parameter, so that all its state is that operator's."""
        return bool(self.name)

    @property
    def kind(self) -> str:
        """Name of the optimizer's class."""
        return type(self.optimizer).__name__


class Known:
    """What is known of one tensor.

    Args:
        updated: the tensor.
        expected: what the optimizer will keep for it.

    Attributes:
        updated, expected: as given.
        tree: its state as last looked at.
        room: memory for state that is about to be restored, by path.
    """

    def __init__(self, updated: Updated, expected: Expected) -> None:
        self.updated, self.expected = updated, expected
        self.room: dict[str, torch.Tensor] = {}
        self._nothing: dict[str, torch.Tensor] = {}
        self.look()

    def look(self) -> None:
        """Take the present state apart."""
        updated = self.updated
        self.tree = StateTree(updated.optimizer.state.get(updated.master), updated.master.device, updated.kind)

    def has_place(self, path: str) -> bool:
        """Whether the buffers of snapshots have a place for the state's tensor at this path."""
        leaf, held = self.expected.leaves.get(path), self.tree.tensors[path]
        return leaf is not None and leaf.holds(held) and (leaf.per_element or self.updated.whole)

    def without_place(self) -> dict[str, torch.Tensor]:
        """The other tensors of the state, `(numel,)` in the order of their memory: they go with the small state.

        Raises:
            UnsupportedEngineError: one is no block of memory; the message names it.
        """
        of = f"of {named(self.updated)}"
        return {
            path: flat_view(tensor, f"{path} {of}")
            for path, tensor in self.tree.tensors.items()
            if not self.has_place(path)
        }

    def room_for(self, path: str, leaf: Leaf) -> torch.Tensor:
        """Zeros to be overwritten, which then become the state."""
        if path not in self.room:
            room = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=leaf.device).zero_()
            self.room[path] = split_as(self.updated.master, room) if leaf.split else room
        return self.room[path]

    def nothing_for(self, path: str, leaf: Leaf) -> torch.Tensor:
        """Zeros of the tensor's size, `(numel,)`, that take no memory."""
        if path not in self._nothing:
            zero = torch.zeros(1, dtype=leaf.dtype, device=leaf.device)
            self._nothing[path] = zero.expand(math.prod(leaf.shape))
        return self._nothing[path]


class RestoredEntry:
    """The state of one tensor, made of what was brought for it; `put` gives it to the optimizer.

    Args:
        known: what is known of it.
        numbers: as saved.
        more: tensors that came with the numbers.
        form: of the state; None where there was none.

    Raises:
        UnsupportedEngineError: a tensor is missing, or does not fit; nothing was changed.
    """

    def __init__(self, known: Known, numbers: dict[str, Any], more: dict[str, torch.Tensor], form: Form | None) -> None:
        self._known, self._numbers, self._more = known, numbers, more
        self._device = known.updated.master.device
        self._filled: list[tuple[torch.Tensor, Any]] = []  # tensors of the optimizer, and what comes into them
        self._state: Any = None if form is None else put_together(form, self._tensor, self._number)

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

    def _tensor(self, path: str, form: Form) -> torch.Tensor:
        kind, of = self._known.updated.kind, named(self._known.updated)
        dtype, shape, stride = dtype_of(form), tuple(form[2]), tuple(form[3])
        own = self._known.tree.tensors.get(path)
        brought = self._known.room.get(path, own)
        if path in self._more:
            brought = self._more[path].to(place_of(form, self._device), copy=True).as_strided(shape, stride)
            brought = split_as(self._known.updated.master, brought) if form[4] == "split" else brought
        if brought is None and not math.prod(shape) and path in self._known.expected.leaves:
            brought = self._known.room_for(path, self._known.expected.leaves[path])  # nothing is to be brought
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
        own, value = self._known.tree.scalar(path), self._numbers[path]
        scalar = form[0] == "scalar" and isinstance(own, torch.Tensor)
        if scalar and (own.dtype, own.device) == (dtype_of(form), place_of(form, self._device)):
            # Where it is: a CUDA graph may read it there.
            self._filled.append((own, torch.tensor(value, dtype=own.dtype, device="cpu")))
            return own
        return number_of(form, value, self._device)


def _layout(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


def earlier_form(known: Known, numbers: dict[str, Any]) -> Form | None:
    """The form of what imports and earlier versions saved: all tensors, as after the first step, and `numbers`."""
    held, expected = local(known.updated.master), known.expected
    items = []
    for key, form in expected.form[2] if expected.form is not None else ():
        if form[0] == "tensor":
            items.append([key, ["tensor", form[1], list(held.shape), list(held.stride()), form[4]]])
        elif key in numbers:
            items.append([key, form])
    return ["dict", False, items] if items else None


def require_same_optimizers(every: Sequence[Updated], saved: dict[str, Any]) -> None:
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
        if len(found) != len(sizes):
            raise UnsupportedEngineError(
                f"the saved {kind} has {len(sizes)} parameter groups and this one {len(found)}; build the optimizer "
                "as it was"
            )
        for index, (then, now) in enumerate(zip(sizes, found, strict=True)):
            if then != now:
                raise UnsupportedEngineError(
                    f"parameter group {index} of {kind} had {then} parameters when saved and has {now} now; build the "
                    "optimizer as it was"
                )
    for then, updated in zip(saved["names"], every, strict=False):
        if then != updated.name:
            raise UnsupportedEngineError(
                f"the state was saved for {then or 'a flat tensor'} where {updated.kind} now has {named(updated)}; "
                "give it the parameters in the order in which it had them"
            )


def optimizers_of(every: Sequence[Updated]) -> list[torch.optim.Optimizer]:
    """The optimizers, each once, in their order."""
    return list({id(one.optimizer): one.optimizer for one in every}.values())


def group_sizes(every: Sequence[Updated], optimizer: torch.optim.Optimizer) -> list[int]:
    """How many tensors are updated in each of the optimizer's groups; engines may keep the groups empty."""
    counts = Counter(id(one.group) for one in every)
    return [counts[id(group)] for group in optimizer.param_groups]


def named(updated: Updated) -> str:
    """The parameter, for messages."""
    return updated.name or f"a flat tensor of {updated.master.numel()} elements"
