"""1-D views of what an optimizer updates and of its state for it, made anew only where a tensor was replaced."""

from dataclasses import dataclass

import torch

from cpsr.engines.optimizer_state import OptimizerState, Updated
from cpsr.engines.sharded import local
from cpsr.engines.state_tree import StateTree, flat_view

__all__ = ["FlatViews"]

_ALL = slice(None)


@dataclass(frozen=True)
class _Views:
    """Views, and what they were made of; `addresses` are of the master and the state's tensors."""

    updated: Updated
    owned: slice
    tree: StateTree
    tensors: list[torch.Tensor]
    addresses: list[int]
    layout: tuple[tuple[int, ...], tuple[int, ...]]
    values: torch.Tensor
    moments: dict[str, torch.Tensor]

    def of(self, updated: Updated, owned: slice, tree: StateTree) -> bool:
        """Whether these are what would be made now.

        An address is of the same memory as before: the views keep that from being freed and given to another tensor.
        """
        return (
            self.updated.master is updated.master
            and self.owned == owned
            and self.tree is tree
            and self.addresses == [local(tensor).data_ptr() for tensor in self.tensors]
            and self.layout == (tuple(updated.master.shape), updated.master.stride())
        )


class FlatViews:
    """The views of every operator that was asked for, by its name.

    Making them takes tens of microseconds for each operator, on the training thread at every snapshot; to see that they
    still are the engine's tensors takes a few.

    Args:
        state: of the optimizers.
    """

    def __init__(self, state: OptimizerState) -> None:
        self._state = state
        self._kept: dict[str, _Views] = {}

    def of(
        self, name: str, updated: Updated, owned: slice = _ALL, *, to_fill: bool = False
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Weights and optimizer state of one operator.

        Args:
            name: of the operator.
            updated: the tensor that the optimizer updates.
            owned: the operator's elements in that tensor, flattened, where it is of several operators.
            to_fill: see `OptimizerState.tensors`; such views are made anew each time.

        Returns:
            1-D views into the engine's tensors: the weights `(numel,)`, and the state by path, in the order of its own
            memory.

        Raises:
            UnsupportedEngineError: see `OptimizerState.tree` and `flat_view`.
        """
        tree = self._state.tree(updated)
        kept = self._kept.get(name)
        if to_fill or kept is None or not kept.of(updated, owned, tree):
            kept = self._made(name, updated, owned, tree, to_fill=to_fill)
            if not to_fill:
                self._kept[name] = kept
        return kept.values, dict(kept.moments)

    def _made(self, name: str, updated: Updated, owned: slice, tree: StateTree, *, to_fill: bool) -> _Views:
        found = self._state.tensors(updated, to_fill=to_fill)
        part = _ALL if updated.whole else owned
        tensors = [updated.master, *tree.tensors.values()]
        return _Views(
            updated,
            owned,
            tree,
            tensors,
            [local(tensor).data_ptr() for tensor in tensors],
            (tuple(updated.master.shape), updated.master.stride()),
            flat_view(updated.master, name)[owned],
            {path: _flat(one, f"{path} of {name}")[part] for path, one in found.items()},
        )


def _flat(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`flat_view`, also of what stands for a tensor that is still absent."""
    return tensor if tensor.dim() == 1 and tensor.stride() == (0,) else flat_view(tensor, name)
