"""Random generators, and numbers of samplers, that a loader keeps in attributes, containers and closures."""

import copy
import random
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Sampler

from cpsr.errors import RecoveryError
from cpsr.state.loader_kinds import Calls, samplers_of
from cpsr.state.user_objects import GENERATORS, Stateful, stateful

__all__ = [
    "data_generators",
    "named_together",
    "objects_in",
    "order_generators",
    "restore_states",
    "states_of",
    "without_state",
]

_DEPTH_MAX = 5
_OBJECTS_MAX = 2000
ITEMS_MAX = 64  # of a container, that are looked into
_CLOSED: tuple[type[Any], ...] = (types.ModuleType, type, str, bytes, int, float, complex)
_CLOSED += (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, numpy.ndarray)
_OURS = ("cpsr.recovery", "cpsr.life", "cpsr.engines")


class _Counts:
    """Numbers that a sampler of the user changes in its attributes, as its passes; the others are settings.

    Also of one that has a state: that may be of a place within a pass, and these are those of its beginning.

    Args:
        sampler: has them.
        in_state: whether a state of the loader holds them.
    """

    def __init__(self, sampler: Any, *, in_state: bool) -> None:
        self._sampler, self._begun = sampler, self._numbers(sampler)
        self.in_state = in_state

    @staticmethod
    def _numbers(sampler: Any) -> dict[str, Any]:
        told = "epoch" if hasattr(sampler, "set_epoch") else None
        return {name: one for name, one in vars(sampler).items() if type(one) in (bool, int, float) and name != told}

    def state_dict(self) -> dict[str, Any]:
        return {name: one for name, one in self._numbers(self._sampler).items() if self._begun.get(name) != one}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self._sampler).update(self._begun | state)


def _counts(loader: Iterable[Any]) -> Iterator[tuple[str, Stateful]]:
    roots = [] if isinstance(loader, Calls) else samplers_of(loader)
    dataset = [loader.dataset] if isinstance(loader, DataLoader) else []

    def is_wanted(one: Any) -> bool:
        own = str(type(one).__module__).split(".")[0] not in ("builtins", "torch", "torchdata", "accelerate", "cpsr")
        deals = isinstance(one, Sampler) or any(one is root for root in roots)
        return own and deals and hasattr(one, "__dict__")

    for name, one in objects_in([(type(root).__name__, root) for root in roots], is_wanted, without=dataset):
        in_state = hasattr(one, "state_dict") and any(one is root for root in roots)
        yield f"numbers of {name}", _Counts(one, in_state=in_state)


def order_generators(loader: Iterable[Any]) -> dict[str, Stateful]:
    """Generators that a pass draws its order from, by their place: those of the loader and its samplers.

    Also the counts of samplers, which are as much a part of what decides the order.
    """
    of_data = {id(one) for _, one in objects_in(_data_roots(loader), _is_generator)}
    roots: list[tuple[str, Any]] = []
    if not isinstance(loader, Calls):
        own = getattr(loader, "generator", None)
        roots = [("generator", own)] + [(type(one).__name__, one) for one in samplers_of(loader)]
    drawn = {name: stateful(name, one) for name, one in objects_in(roots, _is_generator) if id(one) not in of_data}
    return drawn | dict(_counts(loader))


def without_state(drawn: dict[str, Stateful]) -> dict[str, Stateful]:
    """Of `order_generators`, those whose state no loader saves."""
    return {name: one for name, one in drawn.items() if not (isinstance(one, _Counts) and one.in_state)}


def data_generators(loader: Iterable[Any]) -> dict[str, Stateful]:
    """Generators that are drawn from when a batch is loaded: those of the data set, of collate_fn, of a function."""
    return {name: stateful(name, one) for name, one in objects_in(_data_roots(loader), _is_generator)}


def _data_roots(loader: Iterable[Any]) -> list[tuple[str, Any]]:
    if isinstance(loader, Calls):
        return [("function", loader.draw)]
    if isinstance(loader, DataLoader):
        return [("dataset", loader.dataset), ("collate_fn", loader.collate_fn)]
    return []


def _is_generator(one: Any) -> bool:
    shared = random._inst, numpy.random.mtrand._rand, torch.default_generator
    return isinstance(one, GENERATORS) and all(one is not other for other in shared)


def states_of(generators: dict[str, Stateful]) -> dict[str, Any]:
    """The state of each, by name."""
    return {name: one.state_dict() for name, one in generators.items()}


def restore_states(generators: dict[str, Stateful], states: dict[str, Any]) -> None:
    """Put back what `states_of` returned.

    Raises:
        RecoveryError: these are other generators.
    """
    if generators.keys() != states.keys():
        raise RecoveryError(
            f"the data loader has the random generators {named_together(generators)}, and had {named_together(states)} "
            "when the position was saved: shuffle with the same sampler and generator as the run did "
            "(accelerate makes one on several ranks alone, and none with use_seedable_sampler=True)"
        )
    for name, state in copy.deepcopy(states).items():
        generators[name].load_state_dict(state)


def named_together(generators: Iterable[str]) -> str:
    """Their names, for messages."""
    return ", ".join(sorted(generators)) or "none"


def objects_in(
    roots: Iterable[tuple[str, Any]], wanted: Callable[[Any], bool], without: Iterable[Any] = ()
) -> Iterator[tuple[str, Any]]:
    """Objects in attributes and containers, nearest first, each once."""
    kept = list(without)  # alive: ids stay their own
    seen, layer, left = {id(one) for one in kept}, list(roots), _OBJECTS_MAX
    for _ in range(_DEPTH_MAX):
        following: list[tuple[str, Any]] = []
        for name, one in layer:
            if id(one) in seen or one is None or left <= 0:
                continue
            seen.add(id(one))
            kept.append(one)
            left -= 1
            if wanted(one):
                yield name, one
            if not isinstance(one, (*_CLOSED, *GENERATORS)) and not type(one).__module__.startswith(_OURS):
                following += _inside(name, one)
        layer = following


def _inside(name: str, one: Any) -> list[tuple[str, Any]]:
    if isinstance(one, dict):
        return [(f"{name}[{key!r}]", value) for key, value in list(one.items())[:ITEMS_MAX]]
    if isinstance(one, list | tuple):
        return [(f"{name}[{index}]", value) for index, value in enumerate(one[:ITEMS_MAX])]
    if isinstance(one, types.MethodType):
        return [(name, one.__self__), (name, one.__func__)]
    if isinstance(one, partial):
        return [(name, one.func), (name, one.args), (name, one.keywords)]
    if isinstance(one, types.FunctionType):
        named = {key: one.__globals__[key] for key in one.__code__.co_names if key in one.__globals__}
        cells = zip(one.__code__.co_freevars, one.__closure__ or (), strict=True)
        return [*named.items(), *((key, cell.cell_contents) for key, cell in cells if cell != types.CellType())]
    return [(f"{name}.{key}", value) for key, value in getattr(one, "__dict__", {}).items()]
