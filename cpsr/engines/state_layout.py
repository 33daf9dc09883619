"""The state of all that optimizers update, as far as it stays the same from step to step.

Whether it still does is seen in flat lists, which are compared in C: a snapshot at every iteration leaves no time for
Python at each tensor.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress, groupby
from operator import attrgetter, is_
from typing import Any

import torch

from cpsr.engines.distributed_tensors import is_distributed, local
from cpsr.engines.updated_tensor import Known, Updated, group_sizes, optimizers_of
from cpsr.state.device_values import number

__all__ = ["StateLayout"]

_IDENTITY = attrgetter("optimizer", "group", "master", "name")
_KIND = attrgetter("dtype", "device")  # of a number


class StateLayout:
    """All state but the values of tensors and numbers; valid while `holds`.

    Args:
        every: all that is updated, in a fixed order.
        found: what is known of each, as it is now.

    Attributes:
        form: everything but numbers and what has no place in snapshots, as plain data. It is made once.
    """

    def __init__(self, every: Sequence[Updated], found: Sequence[Known]) -> None:
        self._every, self._masters = every, [one.master for one in every]
        self._owners = [
            (optimizer, [one.master for one in own]) for optimizer, own in groupby(every, lambda one: one.optimizer)
        ]
        states = [known.state for known in found]
        self._entries = [state.entry for state in states]
        self._present: list[dict[Any, Any]] = [entry for entry in self._entries if entry is not None]
        self._lengths = [*map(len, self._present)]
        self._keys, self._values = _in_turn(self._present, dict.keys), _in_turn(self._present, dict.values)
        self._numbers = _Numbers([(state.number_paths, state.entry or {}) for state in states])
        self._kept = [not one for one in self._numbers.places]
        tensors = [*self._masters, *(one for state in states for one in state.tensors.values())]
        self._tensors, self._split = tensors, any(map(is_distributed, tensors))
        # While these have the memory, nothing else gets its address.
        self._memory = [local(one) for one in tensors]
        self._addresses, self._shapes = self._present_addresses(), self._present_shapes()
        self._with_rest = [(str(index), known) for index, known in enumerate(found) if known.without_place()]
        forms = dict[str, int]()
        places = [forms.setdefault(state.key, len(forms)) for state in states]
        optimizers = self._optimizers = optimizers_of(every)
        self._groups = self._present_groups()
        # Some optimizers change the order in memory of parameters.
        strides = ((str(at), one.master.stride()) for at, one in enumerate(every) if one.whole and not _in_order(one))
        self.form = {
            "forms": list(forms),
            "of": places,
            "names": [one.name for one in every],
            "classes": [type(one).__name__ for one in optimizers],
            "groups": [group_sizes(every, one) for one in optimizers],
            "strides": {index: list(stride) for index, stride in strides},
        }

    def holds(self, every: Sequence[Updated]) -> bool:
        """Whether all of it still is the engine's: each object, its memory, and the types of numbers."""
        if every is not self._every:
            if len(every) != len(self._every):
                return False
            now, before = map(_IDENTITY, every), map(_IDENTITY, self._every)
            if not all(map(is_, chain.from_iterable(now), chain.from_iterable(before))):
                return False
        entries = chain.from_iterable(map(optimizer.state.get, masters) for optimizer, masters in self._owners)
        return (
            all(map(is_, entries, self._entries))
            and [*map(id, self._present_groups())] == [*map(id, self._groups)]
            and [*map(len, self._present)] == self._lengths
            and _in_turn(self._present, dict.keys) == self._keys
            and self._holds_values(_in_turn(self._present, dict.values))
            and self._present_addresses() == self._addresses
            and self._present_shapes() == self._shapes
        )

    def _holds_values(self, values: list[Any]) -> bool:
        kept = compress(map(is_, values, self._values), self._kept)
        return all(kept) and self._numbers.take(values)

    def _present_addresses(self) -> list[int]:
        tensors = [local(one) for one in self._tensors] if self._split else self._tensors
        return [*map(torch.Tensor.data_ptr, tensors)]

    def _present_shapes(self) -> list[Any]:
        """Those of the tensors that are updated, and the order of every tensor in memory."""
        return [*map(torch.Tensor.size, self._masters), *map(torch.Tensor.stride, self._tensors)]

    def _present_groups(self) -> list[dict[str, Any]]:
        """All of the optimizers, also those without a tensor."""
        return [*chain.from_iterable(one.param_groups for one in self._optimizers)]

    def entries_of(self, optimizer: torch.optim.Optimizer) -> int:
        """How many entries it has for these tensors."""
        of = (one.optimizer for one in self._every)
        return sum(own is optimizer and entry is not None for own, entry in zip(of, self._entries, strict=True))

    def rest(self) -> dict[str, dict[str, Any]]:
        """State without a place in the buffers, by the number of the tensor and the path."""
        return {index: known.without_place() for index, known in self._with_rest}

    def numbers(self, *, on_device: bool) -> list[dict[str, Any]]:
        """Of each tensor, by path, as they were when `holds` was asked; read now where they are tensors."""
        return self._numbers.read(on_device=on_device)


class _Numbers:
    """The numbers among the values of all entries.

    Args:
        entries: of each tensor the paths of its numbers by their keys, and its entry.

    Attributes:
        places: of each value, whether it is one.
    """

    def __init__(self, entries: Sequence[tuple[dict[Any, str], dict[Any, Any]]]) -> None:
        self.places = [key in paths for paths, entry in entries for key in dict.keys(entry)]
        own = [[key for key in dict.keys(entry) if key in paths] for paths, entry in entries]
        self._paths = [tuple(paths[key] for key in keys) for (paths, _), keys in zip(entries, own, strict=True)]
        self._now = [entry[key] for (_, entry), keys in zip(entries, own, strict=True) for key in keys]
        self._types = [*map(type, self._now)]
        self._are_tensors = [isinstance(one, torch.Tensor) for one in self._now]
        self._kinds = [*map(_KIND, compress(self._now, self._are_tensors))]
        wide = len(self._paths[0]) if self._paths else 0
        kinds = [(kind, *_kind_of(one)) for kind, one in zip(self._types, self._now, strict=True)]
        self._alike = len(set(self._paths)) == 1 and wide > 0 and kinds == kinds[:wide] * len(self._paths)
        self._plain = all(self._are_tensors) and all(not one.is_cuda for one in self._now)

    def take(self, values: Iterable[Any]) -> bool:
        """Take those among the present values; returns whether each has the type that it had."""
        now = [*compress(values, self.places)]
        if [*map(type, now)] != self._types:
            return False
        self._now, tensors = now, [*compress(now, self._are_tensors)]
        return [*map(_KIND, tensors)] == self._kinds and not any(map(torch.Tensor.dim, tensors))

    def read(self, *, on_device: bool) -> list[dict[str, Any]]:
        """By tensor and path. One object for what is alike, as step counts are: it is then encoded once."""
        if self._plain:
            found: list[Any] = [*map(torch.Tensor.item, self._now)]
        else:
            found = [number(one, on_device=on_device) if isinstance(one, torch.Tensor) else one for one in self._now]
        if self._alike:
            first = found[: len(self._paths[0])]
            if found == first * len(self._paths) and 0.0 not in first:  # zeros may differ in their sign
                return [dict(zip(self._paths[0], first, strict=True))] * len(self._paths)
        values = iter(found)
        return [{path: next(values) for path in paths} for paths in self._paths]


def _kind_of(value: Any) -> tuple[Any, ...]:
    return (value.dtype, value.device) if isinstance(value, torch.Tensor) else ()


def _in_turn(entries: Iterable[dict[Any, Any]], part: Callable[[dict[Any, Any]], Iterable[Any]]) -> list[Any]:
    return [*chain.from_iterable(map(part, entries))]


def _in_order(updated: Updated) -> bool:
    return updated.master.is_contiguous()
