"""What the modules of a model keep beside parameters and buffers: counters, hidden states, lists, generators."""

import collections
from typing import Any

import numpy
import torch

from cpsr.state.user_objects import GENERATORS, stateful

__all__ = ["ModuleAttributes"]

_TORCH = {name for name in vars(torch.nn.Module()) if name != "training"}
_ENGINES = ("ds_", "_ds_", "_fsdp", "_original_parameters")  # begin the names of DeepSpeed's and FSDP2's
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type)
_LISTS, _DICTS = (list, collections.deque), (dict,)


class ModuleAttributes:
    """The attributes of a module and of all in it, as they are now; `restore` brings them back.

    The content of tensors, arrays, lists, dictionaries and sets comes back in their place, and the state of generators.
    Of any other object only the reference does: see `changed_objects`.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._modules = [(one, _of(one)) for one in module.modules()]
        self._content = [{name: _copied(value) for name, value in found.items()} for _, found in self._modules]
        self._objects = {
            f"{type(one).__name__}.{name}": _shown(value)
            for one, found in self._modules
            for name, value in found.items()
            if not _is_restored(value)
        }

    def changed_objects(self, since: "ModuleAttributes") -> str | None:
        """The first attribute that has changed since then, and that `restore` would not bring back; None: none has."""
        return next((name for name, shown in self._objects.items() if since._objects.get(name, shown) != shown), None)

    def restore(self) -> None:
        """Bring all of them back."""
        for (module, found), content in zip(self._modules, self._content, strict=True):
            now = vars(module)
            for name in _of(module).keys() - found.keys():
                del now[name]
            for name, value in found.items():
                back = _restored(value, content[name])
                if name not in now or now[name] is not back:
                    now[name] = back


def _of(module: torch.nn.Module) -> dict[str, Any]:
    named = vars(module).items()
    return {name: value for name, value in named if name not in _TORCH and not name.startswith(_ENGINES)}


def _is_restored(value: Any) -> bool:
    """Whether its content is kept; functions and modules keep theirs elsewhere."""
    kinds = (*_PLAIN, *GENERATORS, *_LISTS, *_DICTS, torch.Tensor, numpy.ndarray, set, torch.nn.Module)
    return isinstance(value, kinds) or callable(value) or (isinstance(value, tuple) and all(map(_is_restored, value)))


def _shown(value: Any) -> Any:
    """What tells whether a forward has changed an object: its plain attributes, and which others it has."""
    attributes = getattr(value, "__dict__", None)
    if attributes is None:
        return id(value)
    return {name: one if isinstance(one, _PLAIN) else id(one) for name, one in attributes.items()}


def _copied(value: Any) -> Any:
    """Its content now."""
    if isinstance(value, GENERATORS):
        return stateful("a generator", value).state_dict()
    if isinstance(value, torch.Tensor):
        is_kept = type(value) is torch.Tensor and not value.requires_grad and value.layout is torch.strided
        return value.clone() if is_kept else value
    if isinstance(value, numpy.ndarray):
        return value.copy()
    if isinstance(value, _DICTS):
        return {key: (item, _copied(item)) for key, item in value.items()}
    if isinstance(value, (*_LISTS, tuple)):
        return [(item, _copied(item)) for item in value]
    return set(value) if isinstance(value, set) else value


def _restored(value: Any, content: Any) -> Any:
    """The same object, with that content."""
    if isinstance(value, GENERATORS):
        stateful("a generator", value).load_state_dict(content)
    elif isinstance(value, torch.Tensor):
        return _filled(value, content)
    elif isinstance(value, numpy.ndarray):
        value[...] = content
    elif isinstance(value, tuple):
        for item in content:
            _restored(*item)
    elif isinstance(value, (*_LISTS, *_DICTS, set)):
        _refill(value, content)
    return value


def _filled(value: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    if content is value:
        return value
    if content.shape != value.shape:
        return content
    with torch.no_grad():
        return value.copy_(content)


def _refill(value: Any, content: Any) -> None:
    if isinstance(value, _DICTS):
        items: Any = {key: _restored(*item) for key, item in content.items()}
    else:
        items = content if isinstance(value, set) else [_restored(*item) for item in content]
    value.clear()
    if isinstance(value, _LISTS):
        value.extend(items)
    else:
        value.update(items)
