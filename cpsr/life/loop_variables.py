"""Fingerprints of what a training loop keeps in variables, to compare two lives of it.

Searched are the variables of the functions that are running and of their modules, where these are the user's own: no
installed package, and no part of Python. Objects of the user's own classes are searched, too.
"""

import json
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader, Sampler

from cpsr.errors import ConfigError
from cpsr.state.codec import encode
from cpsr.state.user_objects import stateful

__all__ = ["fingerprints"]

DEPTH_MAX = 6
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CPSR = Path(__file__).resolve().parents[1]


def fingerprints(saved: Iterable[Any]) -> dict[str, str]:
    """Name of a variable -> a hash of its value, where that is plain data, tensors, or has a `state_dict`.

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
            if (hashed := self._hash(value)) is not None:
                self.found[f"{prefix}{name}"] = hashed

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
                for name, one in (vars(module).items() if _is_users_class(type(module)) else ())
                if not name.startswith("_") and name != "training"
            }
        searched = isinstance(value, Sampler) or _is_users_class(type(value))
        return (
            dict(vars(value)) if searched and not hasattr(value, "state_dict") and hasattr(value, "__dict__") else None
        )

    def _hash(self, value: Any) -> str | None:
        if id(value) in self._parameters:
            return None
        try:
            tree, tensors = encode(_state_of(value))
        except Exception:  # noqa: BLE001 - a user's object may raise anything; it then has no fingerprint
            return None
        hashed = xxhash.xxh3_64(json.dumps(tree).encode())
        for key, tensor in tensors.items():
            hashed.update(f"{key}{tensor.dtype}{tuple(tensor.shape)}".encode())
            packed = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)  # of a stride that is known
            hashed.update(packed.view(torch.uint8).numpy().tobytes())
        return hashed.hexdigest()


def _state_of(value: Any) -> Any:
    """The state of a generator or of an object with a `state_dict`; otherwise the value itself."""
    try:
        return stateful("", value).state_dict()
    except ConfigError:
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
