"""What the modules of a model keep beside parameters and buffers: counters, hidden states, lists, generators."""

import collections
from typing import Any

import numpy
import torch
import xxhash

from cpsr.engines.distributed_tensors import local
from cpsr.state.shard import bytes_of
from cpsr.state.user_objects import GENERATORS, stateful

__all__ = ["ModuleAttributes", "attributes_of", "is_container"]

_TORCH = {name for name in vars(torch.nn.Module()) if name != "training"}
# These begin the names of DeepSpeed's and FSDP2's.
_ENGINES = (
    "ds_grads_remaining", "ds_id", "ds_inflight", "ds_external", "ds_model_", "ds_recompute", "_ds_", "_fsdp",
    "_original_parameters",
)  # fmt: skip
_LISTS, _DICTS = (list, collections.deque), (dict,)


class ModuleAttributes:
    """The attributes of a module and of all in it, as they are now; `restore` brings them back.

    The content of tensors, arrays, lists, dictionaries and sets comes back in their place, and the state of generators.
    Of any other object only the reference does: see `cpsr.engines.reach`.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._modules = [(one, attributes_of(one)) for one in module.modules()]
        self._content = [{name: _copied(value) for name, value in found.items()} for _, found in self._modules]

    def digest(self) -> str:
        """A hash of the values, which another rank has as well if its modules keep the same; not of objects."""
        found = xxhash.xxh3_128()
        for content in self._content:
            for name in sorted(content):
                found.update(name.encode())
                _feed(found, content[name])
        return found.hexdigest()

    def restore(self) -> None:
        """Bring all of them back."""
        for (module, found), content in zip(self._modules, self._content, strict=True):
            now = vars(module)
            for name in attributes_of(module).keys() - found.keys():
                del now[name]
            for name, value in found.items():
                back = _restored(value, content[name])
                if name not in now or now[name] is not back:
                    now[name] = back


def attributes_of(module: torch.nn.Module) -> dict[str, Any]:
    """What a module keeps that is not torch's, and no parameter or buffer."""
    named = vars(module).items()
    return {name: value for name, value in named if name not in _TORCH and not name.startswith(_ENGINES)}


def is_container(value: Any) -> bool:
    """Whether the content of a container comes back with it."""
    return isinstance(value, (*_LISTS, *_DICTS, tuple, set))


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


def _feed(found: xxhash.xxh3_128, content: Any) -> None:
    if isinstance(content, torch.Tensor):
        if content.layout is torch.strided and not content.is_meta:
            found.update(bytes_of(local(content)).cpu().numpy().data)
    elif isinstance(content, numpy.ndarray):
        found.update(str(content).encode() if content.dtype.hasobject else content.tobytes())
    elif isinstance(content, _DICTS):
        for key, item in content.items():
            found.update(str(key).encode())
            _feed(found, item)
    elif isinstance(content, (*_LISTS, tuple)):
        for item in content:
            _feed(found, item)
    elif content is None or isinstance(content, bool | int | float | complex | str | bytes):
        found.update(repr(content).encode())


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
