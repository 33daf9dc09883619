"""1-D views of what an optimizer updates and of its state for it, made anew only where a tensor was replaced."""

from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from cpsr.engines import optimizer_state
from cpsr.engines.sharded import is_distributed, local

__all__ = ["FlatViews"]

_ALL = slice(None)


@dataclass(frozen=True)
class _Views:
    """Views, and what they were made of; `addresses` are of the master and its moments, in this order."""

    master: torch.Tensor
    owned: slice
    layout: tuple[tuple[int, ...], tuple[int, ...]]
    entries: int
    sources: dict[str, torch.Tensor]
    addresses: list[int]
    values: torch.Tensor
    moments: dict[str, torch.Tensor]

    def of(self, master: torch.Tensor, owned: slice, state: dict[str, Any]) -> bool:
        """Whether these are what would be made now.

        An address is of the same memory as before: the views keep that from being freed and given to another tensor.
        """
        return (
            self.master is master
            and self.owned == owned
            and self.entries == _entries(state)
            and self.layout == (tuple(master.shape), master.stride())
            and all(state.get(key) is source for key, source in self.sources.items())
            and self.addresses == [local(tensor).data_ptr() for tensor in (master, *self.sources.values())]
        )


class FlatViews:
    """The views of every operator that was asked for, by its name.

    Making them takes tens of microseconds for each operator, on the training thread at every snapshot; looking whether
    they still are the engine's tensors takes a few.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Views] = {}
        self._sources: _Sources | None = None  # of all that are kept

    def of(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        master: torch.Tensor,
        owned: slice = _ALL,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Weights and moments of one operator; moments that are still absent are created.

        Args:
            name: of the operator.
            optimizer: the torch optimizer that updates `master`.
            group: the parameter group of `master`.
            master: the tensor that the optimizer updates.
            owned: the operator's elements in the flattened `master`.

        Returns:
            Views `(numel,)` into the engine's tensors; the moments by the optimizer's own key.

        Raises:
            UnsupportedEngineError: see `optimizer_state.moments` and `optimizer_state.flat_view`.
        """
        state = optimizer.state[master]
        kept = self._kept.get(name)
        if kept is None or not kept.of(master, owned, state):
            kept = self._kept[name] = _made(name, optimizer, group, master, owned)
            self._sources = None
        return kept.values, dict(kept.moments)

    def unchanged(self, optimizer: torch.optim.Optimizer, masters: list[torch.Tensor]) -> bool:
        """Whether all views that were asked for are still the engine's tensors; in some hundred nanoseconds for each.

        Args:
            optimizer: the torch optimizer that updates `masters`.
            masters: all that it updates.
        """
        if self._sources is None:
            self._sources = _Sources(optimizer, list(self._kept.values()))
        return self._sources.unchanged(optimizer, masters)


class _Sources:
    """The tensors of all views, in flat lists, which are compared without a call for each operator."""

    def __init__(self, optimizer: torch.optim.Optimizer, kept: list[_Views]) -> None:
        distinct = list({id(views.master): views for views in kept}.values())
        self._masters = [views.master for views in distinct]
        self._states = [optimizer.state[master] for master in self._masters]
        self._entries = [len(state) for state in self._states]
        places = [
            (state, key, source)
            for state, views in zip(self._states, distinct, strict=True)
            for key, source in views.sources.items()
        ]
        self._places = [(state, key) for state, key, _ in places]
        self._moments = [source for _, _, source in places]
        tensors = [tensor for views in distinct for tensor in (views.master, *views.sources.values())]
        addresses = [address for views in distinct for address in views.addresses]
        pairs = list(zip(tensors, addresses, strict=True))
        # Apart, so that those of plain tensors are compared without a look at what each is.
        self._tensors = [tensor for tensor in tensors if not is_distributed(tensor)]
        self._distributed = [tensor for tensor in tensors if is_distributed(tensor)]
        self._addresses = [address for tensor, address in pairs if not is_distributed(tensor)]
        self._addresses += [address for tensor, address in pairs if is_distributed(tensor)]
        self._layouts = [views.layout[1] for views in distinct]
        # None stands for a tensor that the next step creates.
        self._complete = all(value is not None for state in self._states for value in state.values())

    def unchanged(self, optimizer: torch.optim.Optimizer, masters: list[torch.Tensor]) -> bool:
        """See `FlatViews.unchanged`."""
        state = optimizer.state
        return (
            self._complete
            and len(masters) == len(self._masters)
            and all(map(is_, masters, self._masters))
            and all(map(is_, [state[master] for master in masters], self._states))
            and [len(one) for one in self._states] == self._entries
            and all(map(is_, [one.get(key) for one, key in self._places], self._moments))
            and self._now_at() == self._addresses
            and [master.stride() for master in self._masters] == self._layouts
        )

    def _now_at(self) -> list[int]:
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        return addresses + [local(tensor).data_ptr() for tensor in self._distributed]


def _made(
    name: str, optimizer: torch.optim.Optimizer, group: dict[str, Any], master: torch.Tensor, owned: slice
) -> _Views:
    sources = optimizer_state.moments(optimizer, group, master)
    return _Views(
        master,
        owned,
        (tuple(master.shape), master.stride()),
        _entries(optimizer.state[master]),
        sources,
        [local(tensor).data_ptr() for tensor in (master, *sources.values())],
        optimizer_state.flat_view(master, name)[owned],
        {key: optimizer_state.flat_view(value, f"{key} of {name}")[owned] for key, value in sources.items()},
    )


def _entries(state: dict[str, Any]) -> int:
    """How many there are; None stands for a tensor that the next step creates."""
    return sum(value is not None for value in state.values())
