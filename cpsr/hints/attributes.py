"""What modules and optimizers hold beside their state. No checkpoint has it, so a call that changes it is refused."""

from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import nn

from cpsr.hints.held import Held
from cpsr.hints.memory import UnsavableError, memory_text
from cpsr.hints.stateful import CONSTANTS, GENERATORS
from cpsr.state.stateful import stateful

__all__ = ["Attributes"]

_STATE = ("_parameters", "_buffers", "_modules", "training")
_KNOWN_BY_ITSELF = (nn.Module, nn.Parameter, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_WRITTEN = (torch.dtype, torch.device, torch.Size, numpy.dtype, numpy.generic, range)
_DEPTH_MAX = 6  # of attributes in attributes


class _Itself:
    """Stands for an object that is known by what it is, and not by what it holds."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


class Attributes:
    """What a module or an optimizer holds beside its state when this is made; of other objects nothing.

    Args:
        value: the object.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self._modules = dict(value.named_modules()) if isinstance(value, nn.Module) else {}
        self._held = Held()  # everything that can be replaced
        self._changing: list[tuple[nn.Module, str, Any]] = []  # what may change more deeply, and its content
        for module in self._modules.values():
            self._held.add(vars(module))
            for key, one in vars(module).items():
                if key in ("_parameters", "_modules") or "_hooks" in key or _is_flat(one):
                    self._held.add(one)
                elif key not in _STATE and type(one) not in CONSTANTS:
                    self._changing.append((module, key, _content(one, 0)))
        self._held.remember()
        self._layouts, self._described = self._layouts_now(), self._describe()

    def require_same(self) -> None:
        """Refuse what the call has changed: the caller's own object will not have it after a restart.

        Raises:
            UnsavableError: names the attribute.
        """
        same = self._held.is_unchanged() and self._layouts_now() == self._layouts
        if same and all(_content(vars(module)[key], 0) == before for module, key, before in self._changing):
            return
        now, before = self._describe(), self._described
        for name in [*before, *now]:
            if name not in now or name not in before or now[name] != before[name]:
                raise UnsavableError(
                    f"the call has changed '{name}' of it, which is no part of its state: change it before the call, "
                    "or keep it in a variable"
                )
        self._held.remember()  # it is in another mode, say

    def _layouts_now(self) -> list[Any]:
        if not self._modules:
            return [_of_optimizer(self._value)]
        parameters = [one for module in self._modules.values() for one in module._parameters.values()]
        buffers = [one for module in self._modules.values() for one in module._buffers.items()]
        types = list(map(type, self._modules.values()))
        return [*types, *map(_layout, parameters), *map(_hooks_of, parameters), *((k, *_layout(b)) for k, b in buffers)]

    def _describe(self) -> dict[str, Any]:
        """The same by name."""
        if not isinstance(self._value, nn.Module):
            return _of_optimizer(self._value)
        return {key: one for name, module in self._value.named_modules() for key, one in _of_module(name, module)}


def _of_optimizer(value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.optim.Optimizer):
        return {}
    groups = [[_Itself(one) for one in group["params"]] for group in value.param_groups]
    return {"param_groups": groups} | {key: _hooks(one) for key, one in vars(value).items() if "_hooks" in key}


def _of_module(name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    prefix = f"{name}." if name else ""
    yield f"{prefix}__class__", type(module)
    yield f"{prefix}_modules", {key: _Itself(one) for key, one in module._modules.items()}
    for key, one in vars(module).items():
        if key not in _STATE and not ("_hooks" in key and not one):
            yield prefix + key, _hooks(one) if "_hooks" in key else _content(one, 0)
    for key, parameter in module._parameters.items():
        yield prefix + key, [_Itself(parameter), *_layout(parameter), *_hooks_of(parameter)]
    for key, buffer in module._buffers.items():
        yield prefix + key, _layout(buffer)


def _hooks_of(parameter: Any) -> list[Any]:
    if parameter is None:
        return []
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return [_hooks(one) for one in hooks if one]


def _is_flat(value: Any) -> bool:
    """Whether it holds constants alone."""
    return type(value) in (list, tuple, set) and all(type(one) in CONSTANTS for one in value)


def _layout(value: torch.Tensor | None) -> list[Any]:
    return [] if value is None else [value.dtype, value.shape, value.device]


def _hooks(hooks: Any) -> Any:
    return [(key, _Itself(one)) for key, one in hooks.items()] if isinstance(hooks, dict) else _content(hooks, 0)


def _content(value: Any, depth: int) -> Any:
    """Something that is equal as long as nothing in it changes, as far as that can be seen."""
    kind = type(value)
    if kind in CONSTANTS:
        return kind, repr(value) if kind is float else value
    if isinstance(value, _WRITTEN):
        return kind, repr(value)
    if isinstance(value, _KNOWN_BY_ITSELF):
        return _Itself(value)
    if kind in GENERATORS:
        return _Itself(value), repr(stateful("", value).state_dict())
    if isinstance(value, torch.Tensor | numpy.ndarray) and (text := memory_text(value)) is not None:
        return kind, text
    return _held(value, depth) if depth < _DEPTH_MAX else _Itself(value)


def _held(value: Any, depth: int) -> Any:
    """The same of what an object holds."""
    kind = type(value)
    if isinstance(value, list | tuple):
        return kind, [_content(one, depth + 1) for one in value]
    if isinstance(value, set | frozenset):
        return kind, {repr(one) for one in value}
    if isinstance(value, dict):
        return kind, [(_content(key, depth + 1), _content(one, depth + 1)) for key, one in value.items()]
    if hasattr(value, "__dict__") and not kind.__module__.startswith("torch."):
        return _Itself(value), [(key, _content(one, depth + 1)) for key, one in vars(value).items()]
    return _Itself(value)
