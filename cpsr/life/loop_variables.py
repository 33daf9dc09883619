"""Fingerprints of what a training loop keeps in variables, to compare two lives of it.

Searched are the variables of the functions that are running and of their modules, where these are the user's own: no
installed package, and no part of Python. Objects of the user's own classes are searched, too.
"""

import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash
from torch.utils.data import DataLoader, Sampler

__all__ = ["fingerprints"]

DEPTH_MAX = 6
ELEMENTS_MAX = 10_000  # of one container
SAMPLED_MAX = 1 << 20  # of one tensor
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Path)
_CPSR = Path(__file__).resolve().parents[1]


def fingerprints(saved: Iterable[Any]) -> dict[str, str]:
    """Name of a variable -> a hash of its value, of those that have one.

    Args:
        saved: modules, optimizers and other objects that are left out, because a checkpoint contains them.
    """
    search = _Search(saved)
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            search.variables(frame.f_locals, "")
        frame = frame.f_back
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path is not None and name != "__mp_main__" and _is_users(path):  # which is `__main__` once more
            search.variables(vars(module), "" if name == "__main__" else f"{name}.")
    return search.found


class _Search:
    """Hashes values; each object once, under its first name.

    Attributes:
        found: name -> hash.
    """

    def __init__(self, saved: Iterable[Any]) -> None:
        self.found: dict[str, str] = {}
        self._seen: dict[int, Any] = {}
        self._parameters: set[int] = set()
        for one in saved:
            self._seen[id(one)] = one
            if isinstance(one, torch.nn.Module):
                self._parameters |= {id(parameter) for parameter in one.parameters()}

    def variables(self, named: Mapping[str, Any], prefix: str) -> None:
        """Hash variables; those of an object of a user's own class one by one."""
        for name, value in list(named.items()):
            if name.startswith("__") or isinstance(value, types.ModuleType | type | types.FunctionType):
                continue
            self._variable(f"{prefix}{name}", value, DEPTH_MAX)

    def _variable(self, name: str, value: Any, depth: int) -> None:
        if not isinstance(value, _PLAIN):
            if id(value) in self._seen:
                return
            self._seen[id(value)] = value
        parts = self._parts(value)
        if parts is not None:
            for part, inside in parts.items() if depth else ():
                self._variable(f"{name}.{part}", inside, depth - 1)
            return
        hashed = xxhash.xxh3_64()
        try:
            known = self._feed(hashed, value, DEPTH_MAX)
        except Exception:  # noqa: BLE001 - a user's object may raise anything; it then has no fingerprint
            return
        if known:
            self.found[name] = hashed.hexdigest()

    def _parts(self, value: Any) -> dict[str, Any] | None:
        """What is hashed one by one: attributes of a user's object, parts of a loader; None: the value as a whole."""
        if isinstance(value, DataLoader):
            return {name: getattr(value, name) for name in ("dataset", "sampler", "batch_sampler", "generator")}
        if isinstance(value, torch.nn.Module):
            if not any(id(parameter) in self._parameters for parameter in value.parameters()):
                return None  # an average, a teacher: by its state
            return _attributes_of(value)
        searched = isinstance(value, Sampler) or _is_users_class(type(value))
        if searched and not hasattr(value, "state_dict") and hasattr(value, "__dict__"):
            return dict(vars(value))
        return None

    def _feed(self, hashed: Any, value: Any, depth: int) -> bool:
        """Add a value to a hash; returns whether there was anything to add."""
        state = _state_of(value)
        if state is not value:
            return depth > 0 and self._feed(hashed, state, depth)
        if isinstance(value, _PLAIN):
            hashed.update(f"{type(value).__name__}:{value!r};".encode())
            return True
        if isinstance(value, torch.Tensor):
            return self._feed_tensor(hashed, value)
        if isinstance(value, numpy.ndarray | numpy.generic):
            array = numpy.asarray(value)
            if array.dtype.hasobject:
                return False
            sampled = array.reshape(-1)[:: max(1, array.size // SAMPLED_MAX)]
            hashed.update(f"{array.dtype}{array.shape}".encode())
            hashed.update(numpy.ascontiguousarray(sampled).tobytes())
            return True
        if depth and isinstance(value, Mapping):
            return self._feed_all(hashed, "{", (part for item in value.items() for part in item), len(value), depth)
        if depth and isinstance(value, list | tuple | deque):
            return self._feed_all(hashed, "[", iter(value), len(value), depth)
        if depth and isinstance(value, set | frozenset) and all(isinstance(one, _PLAIN) for one in value):
            return self._feed_all(hashed, "(", iter(sorted(value, key=repr)), len(value), depth)
        if depth and _is_users_class(type(value)) and hasattr(value, "__dict__"):
            return self._feed_all(
                hashed, "<", (part for item in vars(value).items() for part in item), len(vars(value)), depth
            )
        return False

    def _feed_all(self, hashed: Any, opening: str, parts: Iterator[Any], count: int, depth: int) -> bool:
        hashed.update(f"{opening}{count};".encode())
        known = count == 0
        for part, _ in zip(parts, range(ELEMENTS_MAX), strict=False):
            known |= self._feed(hashed, part, depth - 1)
        return known

    def _feed_tensor(self, hashed: Any, value: torch.Tensor) -> bool:
        if id(value) in self._parameters:
            return False
        hashed.update(f"{value.dtype}{tuple(value.shape)}".encode())
        value = value.detach()
        value = getattr(value, "_local_tensor", value)  # of a DTensor
        if value.layout != torch.strided or value.is_meta:
            return False
        flat = value.reshape(-1)[:: max(1, value.numel() // SAMPLED_MAX)].cpu().contiguous()
        hashed.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        return True


def _attributes_of(trained: torch.nn.Module) -> dict[str, Any]:
    """Attributes, of the user's own classes, that are no parameters, buffers or modules."""
    found = {}
    for path, module in trained.named_modules():
        for name, value in vars(module).items() if _is_users_class(type(module)) else ():
            if not name.startswith("_") and name != "training":
                found[f"{path}.{name}" if path else name] = value
    return found


def _state_of(value: Any) -> Any:
    """The state of a generator or of an object with a `state_dict`; otherwise the value itself."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    if isinstance(value, numpy.random.RandomState):
        return value.get_state()
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        return value.state_dict()
    return value


def _is_users_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or (path is not None and _is_users(path))


@lru_cache(maxsize=4096)
def _is_users(path: str) -> bool:
    """Whether a file of Python code is the user's: no installed package, no part of Python."""
    if path.startswith("<"):
        return False
    found = Path(path).resolve()
    if found.is_relative_to(_CPSR) or {"site-packages", "dist-packages"} & set(found.parts):
        return False
    return not any(found.is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
