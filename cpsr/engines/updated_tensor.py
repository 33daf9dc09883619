"""One tensor that an optimizer updates, and what is known of its state."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cpsr.engines.distributed_tensors import local, split_as
from cpsr.engines.optimizer_entry import StateEntry, flat_view, tree_of
from cpsr.engines.optimizer_layout import Leaf

__all__ = ["Known", "Updated", "group_sizes", "optimizers_of"]

_ALL = slice(None)


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

    def __str__(self) -> str:
        return self.name or f"a flat tensor of {self.master.numel()} elements"


class Known:
    """What is known of one tensor.

    Args:
        updated: the tensor.
        leaves: tensors of the state that have a place in the buffers of snapshots, by path.

    Attributes:
        updated, leaves: as given.
        state: its entry as last looked at.
        room: memory for state that is about to be restored, by path.
    """

    def __init__(self, updated: Updated, leaves: dict[str, Leaf]) -> None:
        self.updated, self.leaves = updated, leaves
        self.room: dict[str, torch.Tensor] = {}
        self._nothing: dict[str, torch.Tensor] = {}
        # By name of the operator: the entry and what else they were made of, the weights, and the state by path.
        self._views: dict[str, tuple[StateEntry | None, Any, torch.Tensor, dict[str, torch.Tensor]]] = {}
        self.look()

    def look(self) -> None:
        """Take the present state apart."""
        updated = self.updated
        self.state = StateEntry(updated.optimizer.state.get(updated.master), updated.master.device, updated.kind)

    def views(self, name: str, owned: slice, *, to_fill: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `OptimizerState.views`."""
        master = self.updated.master
        # An address is of the same memory as before: the views keep that from being freed and given to another tensor.
        made_of = local(master).data_ptr(), tuple(master.shape), master.stride(), owned
        state, made_before, values, moments = self._views.get(name, (None, None, master, {}))
        if to_fill or state is not self.state or made_before != made_of:
            part = _ALL if self.updated.whole else owned
            found = self._placed(to_fill=to_fill).items()
            moments = {path: _flat(one, f"{path} of {name}")[part] for path, one in found}
            values = flat_view(master, name)[owned]
            if not to_fill:
                self._views[name] = self.state, made_of, values, moments
        return values, dict(moments)

    def _placed(self, *, to_fill: bool) -> dict[str, torch.Tensor]:
        """The tensors that snapshots have a place for, by path: the same ones at every call."""
        own, found = self.state.tensors, {}
        for path, leaf in self.leaves.items():
            if not (leaf.per_element or self.updated.whole):
                continue
            # What is not per element may be shared by tensors, and is written only where it was saved.
            if path in own and self.has_place(path) and not (to_fill and not leaf.per_element):
                found[path] = own[path]
            elif to_fill:
                found[path] = self.room_for(path)
            else:  # zeros of the tensor's size that take no memory
                zero = torch.zeros(1, dtype=leaf.dtype, device=leaf.device)
                found[path] = self._nothing.setdefault(path, zero.expand(math.prod(leaf.shape)))
        return found

    def has_place(self, path: str) -> bool:
        """Whether the buffers of snapshots have a place for the state's tensor at this path."""
        leaf, held = self.leaves.get(path), self.state.tensors[path]
        return leaf is not None and leaf.holds(held) and (leaf.per_element or self.updated.whole)

    def without_place(self) -> dict[str, Any]:
        """What goes with the small state: other tensors, `(numel,)` in the order of their memory, and trees.

        Raises:
            UnsupportedEngineError: one is no block of memory; the message names it.
        """
        others = [(path, tensor) for path, tensor in self.state.tensors.items() if not self.has_place(path)]
        found: dict[str, Any] = {path: flat_view(one, f"{path} of {self.updated}") for path, one in others}
        device = self.updated.master.device
        return found | {path: tree_of(one, device) for path, one in self.state.trees.items()}

    def room_for(self, path: str) -> torch.Tensor:
        """Zeros to be overwritten, which then become the state."""
        if path not in self.room:
            leaf = self.leaves[path]
            room = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=leaf.device).zero_()
            self.room[path] = split_as(self.updated.master, room) if leaf.split else room
        return self.room[path]


def optimizers_of(every: Sequence[Updated]) -> list[torch.optim.Optimizer]:
    """The optimizers, each once, in their order."""
    return list({id(one.optimizer): one.optimizer for one in every}.values())


def group_sizes(every: Sequence[Updated], optimizer: torch.optim.Optimizer) -> list[int]:
    """How many tensors are updated in each of the optimizer's groups; engines may keep the groups empty."""
    counts = Counter(id(one.group) for one in every)
    return [counts[id(group)] for group in optimizer.param_groups]


def _flat(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`flat_view`, also of what stands for a tensor that is still absent."""
    return tensor if tensor.dim() == 1 and tensor.stride() == (0,) else flat_view(tensor, name)
