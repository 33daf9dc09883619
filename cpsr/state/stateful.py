"""User objects that are saved with every checkpoint."""

import random
from collections.abc import Callable
from typing import Any, Protocol

import numpy
import torch

from cpsr.errors import ConfigError

__all__ = ["Stateful", "stateful"]


class Stateful(Protocol):
    """An object with its state as plain data."""

    def state_dict(self) -> Any:
        """Plain data and tensors."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore what `state_dict` returned."""


def stateful(name: str, given: Any) -> Stateful:
    """Adapt an object to `state_dict` and `load_state_dict`.

    Args:
        name: of the object, for the message.
        given: has both; or a random generator of torch, NumPy or Python; or a dictionary, whose content is the state.

    Raises:
        ConfigError: it is none of these.
    """
    if hasattr(given, "state_dict") and hasattr(given, "load_state_dict"):
        found: Stateful = given
        return found
    for kind, adapter in _ADAPTERS:
        if isinstance(given, kind):
            return adapter(given)
    raise ConfigError(
        f"register('{name}', ...): {type(given).__name__} has no state_dict and load_state_dict. Give it both, or keep "
        "its numbers in a dictionary and register that; generators of torch, NumPy and Python are taken as they are"
    )


class _TorchGenerator:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> torch.Tensor:
        return self._generator.get_state()

    def load_state_dict(self, state: torch.Tensor) -> None:
        self._generator.set_state(state)


class _NumPyGenerator:
    def __init__(self, generator: numpy.random.Generator) -> None:
        self._bits = generator.bit_generator

    def state_dict(self) -> Any:
        return self._bits.state

    def load_state_dict(self, state: Any) -> None:
        self._bits.state = state


class _NumPyRandomState:
    def __init__(self, generator: numpy.random.RandomState) -> None:
        self._generator = generator

    def state_dict(self) -> Any:
        return self._generator.get_state()

    def load_state_dict(self, state: Any) -> None:
        self._generator.set_state(state)


class _PythonRandom:
    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def state_dict(self) -> Any:
        return self._generator.getstate()

    def load_state_dict(self, state: Any) -> None:
        self._generator.setstate(state)


class _Dictionary:
    """Adapter of a dictionary; tensors are copied into the present ones, which may be on a device."""

    def __init__(self, content: dict[Any, Any]) -> None:
        self._content = content

    def state_dict(self) -> dict[Any, Any]:
        return dict(self._content)

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        before = dict(self._content)
        self._content.clear()
        for key, value in state.items():
            self._content[key] = _into(before.get(key), value)


def _into(current: Any, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not isinstance(current, torch.Tensor):
        return value
    if current.shape != value.shape or current.dtype != value.dtype:
        return value.to(current.device)
    with torch.no_grad():
        return current.copy_(value)


_ADAPTERS: list[tuple[type[Any], Callable[[Any], Stateful]]] = [
    (torch.Generator, _TorchGenerator),
    (numpy.random.Generator, _NumPyGenerator),
    (numpy.random.RandomState, _NumPyRandomState),
    (random.Random, _PythonRandom),
    (dict, _Dictionary),
]
