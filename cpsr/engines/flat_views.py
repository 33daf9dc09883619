"""1-D views of what an optimizer updates and of its state for it, made anew only where a tensor was replaced."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_

import torch

from cpsr.engines.optimizer_state import OptimizerState, Updated
from cpsr.engines.sharded import is_distributed, local
from cpsr.engines.state_tree import StateTree, StateTrees, flat_view
from cpsr.state.shard import OperatorState

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

    Making them takes tens of microseconds for each operator, on the training thread at every snapshot; looking whether
    they still are the engine's tensors takes a few.

    Args:
        state: of the optimizers.
    """

    def __init__(self, state: OptimizerState) -> None:
        self._state = state
        self._kept: dict[str, _Views] = {}
        self._sources: _Sources | None = None  # of all that are kept

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
                self._kept[name], self._sources = kept, None
        return kept.values, dict(kept.moments)

    def unchanged(self, every: Sequence[Updated], operators: Mapping[str, OperatorState]) -> bool:
        """Whether all views that were asked for are still the engine's tensors; in some hundred nanoseconds for each.

        Args:
            every: all that the optimizers update.
            operators: with views that `of` once gave: others may have asked since, and got newer ones.
        """
        if any(name not in self._kept for name in operators):
            return False
        newest = [self._kept[name].values for name in operators]
        if not all(map(is_, newest, [one.parameter.values for one in operators.values()])):
            return False
        if self._sources is None:
            self._sources = _Sources(list(self._kept.values()))
        return self._sources.unchanged(every)

    def forget(self) -> None:
        """Make all views anew: what else their operators have is not what it was."""
        self._kept.clear()
        self._sources = None

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


class _Sources:
    """The tensors of all views, in flat lists, which are compared without a call for each operator."""

    def __init__(self, kept: list[_Views]) -> None:
        distinct = list({id(views.updated.master): views for views in kept}.values())
        self._masters = [views.updated.master for views in distinct]
        self._trees = StateTrees([views.tree for views in distinct])
        placed = [pair for views in distinct for pair in zip(views.tensors, views.addresses, strict=True)]
        # Plain tensors first: they are compared without a look at what each is.
        placed.sort(key=lambda pair: is_distributed(pair[0]))
        self._addresses = [address for _, address in placed]
        self._plain = [tensor for tensor, _ in placed if not is_distributed(tensor)]
        self._split = [tensor for tensor, _ in placed[len(self._plain) :]]
        self._strides = [views.layout[1] for views in distinct]

    def unchanged(self, every: Sequence[Updated]) -> bool:
        """See `FlatViews.unchanged`."""
        return (
            len(every) == len(self._masters)
            and all(map(is_, [one.master for one in every], self._masters))
            and self._trees.same([one.optimizer.state.get(one.master) for one in every])
            and self._now_at() == self._addresses
            and [master.stride() for master in self._masters] == self._strides
        )

    def _now_at(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._plain] + [local(tensor).data_ptr() for tensor in self._split]


def _flat(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`flat_view`, also of what stands for a tensor that is still absent."""
    return tensor if tensor.dim() == 1 and tensor.stride() == (0,) else flat_view(tensor, name)
