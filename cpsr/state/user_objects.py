"""User objects that are saved with every checkpoint, and what is the user's own code."""

import random
import sys
import sysconfig
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy
import torch

from cpsr.errors import ConfigError
from cpsr.state.codec import same

__all__ = ["GENERATORS", "Stateful", "is_users", "is_users_file", "stateful"]

_CPSR = Path(__file__).resolve().parents[1]
GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)


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
    if isinstance(given, dict):
        return _Dictionary(given)
    if isinstance(given, numpy.random.Generator):
        bits: Any = given.bit_generator
        return _Generator(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(given, random.Random):
        return _Generator(given.getstate, given.setstate)
    if isinstance(given, torch.Generator | numpy.random.RandomState):
        return _Generator(given.get_state, given.set_state)
    raise ConfigError(
        f"register('{name}', ...): {type(given).__name__} has no state_dict and load_state_dict. Give it both, or keep "
        "its numbers in a dictionary and register that; generators of torch, NumPy and Python are taken as they are. "
        "Of several parts, as the module and the optimizer of a second engine, register each: "
        f"register('{name}.model', module)"
    )


def is_users(code: Any) -> bool:
    """Whether a class or function is the user's own: of no installed package, and no part of Python."""
    module = sys.modules.get(str(getattr(code, "__module__", None)))
    path = getattr(module, "__file__", None)
    return getattr(code, "__module__", None) == "__main__" or (path is not None and is_users_file(path))


@lru_cache(maxsize=4096)
def is_users_file(path: str) -> bool:
    """The same of a file."""
    if path.startswith("<"):
        return False
    found = Path(path).resolve()
    if found.is_relative_to(_CPSR) or {"site-packages", "dist-packages"} & set(found.parts):
        return False
    return not any(found.is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


class _Generator:
    """Adapter of a random generator.

    Args:
        read: gives its state.
        write: restores it.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self._read, self._write = read, write

    def state_dict(self) -> Any:
        return self._read()

    def load_state_dict(self, state: Any) -> None:
        self._write(state)


class _Dictionary:
    """Adapter of a dictionary. What is in it is restored in its place, to which the script may refer."""

    def __init__(self, content: dict[Any, Any]) -> None:
        self._content = content

    def state_dict(self) -> dict[Any, Any]:
        return dict(self._content)

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        _Filling().fill(self._content, state)


class _Filling:
    """Puts values into present objects of the same kind, into each once: what is one object now may have been two."""

    def __init__(self) -> None:
        self._filled: set[int] = set()

    def fill(self, current: dict[Any, Any], state: Mapping[Any, Any]) -> None:
        before = dict(current)
        current.clear()
        for key, value in state.items():
            current[key] = self._into(before.get(key), value)

    def _into(self, current: Any, value: Any) -> Any:
        if _is_tensor(current) and _is_tensor(value):
            return self._into_tensor(current, value)
        if type(value) is not type(current) or not isinstance(value, dict | list | numpy.ndarray):
            return value
        if not self._is_first(id(current)):
            return current if same(current, value) else value
        if isinstance(value, dict):
            self.fill(current, value)
        elif isinstance(value, list):
            current[:] = [self._into(old, new) for old, new in zip_longest(current[: len(value)], value)]
        elif (value.shape, value.dtype, True) == (current.shape, current.dtype, current.flags.writeable):
            current[...] = value
        else:
            return value
        return current

    def _into_tensor(self, current: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if current.shape != value.shape or current.dtype != value.dtype:
            return value.to(current.device)
        if not self._is_first(current.data_ptr()):
            return current if same(current, value) else value.to(current.device)
        with torch.no_grad():
            return current.copy_(value)

    def _is_first(self, place: int) -> bool:
        first = place not in self._filled
        self._filled.add(place)
        return first


def _is_tensor(given: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(given, torch.Tensor)
