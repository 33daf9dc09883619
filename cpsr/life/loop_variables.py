"""Fingerprints of what a training loop keeps in variables, to compare two lives of it.

Searched are the variables of the functions that are running and of their modules, where these are the user's own: no
installed package, and no part of Python. Objects of the user's own classes are searched, too.
"""

import sys
import types
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash
from torch.utils.data import DataLoader, Sampler

from cpsr.state.user_objects import GENERATORS, is_users, is_users_file, stateful

__all__ = ["fingerprints"]

DEPTH_MAX = 6
ELEMENTS_MAX = 10_000  # of one container
SAMPLED_MAX = 1 << 20  # of one tensor
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Path)


def fingerprints(saved: Iterable[Any]) -> dict[str, str]:
    """Name of a variable -> a hash of its value, of those that have one.

    Args:
        saved: modules, optimizers and other objects that are left out, because a checkpoint contains them.
    """
    search = _Search(saved)
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            search.variables(frame.f_locals, "")
        frame = frame.f_back
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path is not None and name != "__mp_main__" and is_users_file(path):  # which is `__main__` once more
            search.variables(vars(module), "" if name == "__main__" else f"{name}.")
    return search.found


class _Search:
    """Hashes values; each object once, under its first name.

    Args:
        saved: see `fingerprints`.

    Attributes:
        found: name -> hash.
    """

    def __init__(self, saved: Iterable[Any]) -> None:
        self.found: dict[str, str] = {}
        self._seen: dict[int, Any] = {id(one): one for one in saved}
        modules = [one for one in self._seen.values() if isinstance(one, torch.nn.Module)]
        self._parameters = {id(parameter) for module in modules for parameter in module.parameters()}

    def variables(self, named: Mapping[str, Any], prefix: str, depth: int = DEPTH_MAX) -> None:
        """Hash variables; those of an object of a user's own class one by one."""
        for name, value in list(named.items()):
            if name.startswith("__") or isinstance(value, types.ModuleType | type | types.FunctionType):
                continue
            if not isinstance(value, _PLAIN):
                if id(value) in self._seen:
                    continue
                self._seen[id(value)] = value
            parts = self._parts(value)
            if parts is not None:
                if depth:
                    self.variables(parts, f"{prefix}{name}.", depth - 1)
                continue
            hashed = xxhash.xxh3_64()
            try:
                known = self._feed(hashed, value, 2 * DEPTH_MAX)  # a mapping and its items are two levels
            except Exception:  # noqa: BLE001 - a user's object may raise anything; it then has no fingerprint
                known = False
            if known:
                self.found[f"{prefix}{name}"] = hashed.hexdigest()

    def _parts(self, value: Any) -> dict[str, Any] | None:
        """What is hashed one by one: attributes of a user's object, parts of a loader; None: the value as a whole."""
        if isinstance(value, DataLoader):
            return {name: getattr(value, name) for name in ("dataset", "sampler", "batch_sampler", "generator")}
        if isinstance(value, torch.nn.Module):
            if not any(id(parameter) in self._parameters for parameter in value.parameters()):
                return None  # an average, a teacher: by its state
            return {
                f"{path}.{name}" if path else name: one
                for path, module in value.named_modules()
                for name, one in (vars(module).items() if is_users(type(module)) else ())
                if not name.startswith("_") and name != "training"
            }
        searched = isinstance(value, Sampler) or is_users(type(value))
        return (
            dict(vars(value)) if searched and not hasattr(value, "state_dict") and hasattr(value, "__dict__") else None
        )

    def _feed(self, hashed: Any, value: Any, depth: int) -> bool:
        """Add a value to a hash; returns whether there was anything to add."""
        value = _state_of(value)
        if isinstance(value, _PLAIN):
            hashed.update(f"{type(value).__name__}:{value!r};".encode())
            return True
        if isinstance(value, torch.Tensor):
            if id(value) in self._parameters or value.layout != torch.strided or value.is_meta:
                return False
            value = getattr(value, "_local_tensor", value).detach()  # of a DTensor
            sampled = value.reshape(-1)[:: max(1, value.numel() // SAMPLED_MAX)].cpu().contiguous()
            hashed.update(f"{value.dtype}{tuple(value.shape)}".encode())
            hashed.update(sampled.view(torch.uint8).numpy().tobytes() if sampled.numel() else b"")
            return True
        if isinstance(value, numpy.ndarray | numpy.generic):
            array = numpy.asarray(value)
            sampled_array = numpy.ascontiguousarray(array.reshape(-1)[:: max(1, array.size // SAMPLED_MAX)])
            hashed.update(f"{array.dtype}{array.shape}".encode() + sampled_array.tobytes())
            return not array.dtype.hasobject
        if isinstance(value, set | frozenset) and all(isinstance(one, _PLAIN) for one in value):
            value = sorted(map(repr, value))
        elif is_users(type(value)) and hasattr(value, "__dict__"):
            value = vars(value)
        if not depth or not isinstance(value, Mapping | list | tuple | deque):
            return False
        parts = list(islice(value.items() if isinstance(value, Mapping) else value, ELEMENTS_MAX))
        hashed.update(f"{type(value).__name__}{len(value)};".encode())
        known = [self._feed(hashed, part, depth - 1) for part in parts]
        return any(known) or not parts


def _state_of(value: Any) -> Any:
    """The state of a generator or of an object with a `state_dict`; otherwise the value itself."""
    if isinstance(value, GENERATORS):
        return stateful("a generator", value).state_dict()
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        return value.state_dict()
    return value
