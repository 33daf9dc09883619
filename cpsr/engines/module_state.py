"""What a module keeps beside its parameters: buffers of any layout, and whatever else its state dict returns."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from cpsr.engines.naming import NamedBuffers, Rename, named_buffers, plain_name, state_dict_of
from cpsr.engines.optimizer_entry import flat_view
from cpsr.errors import UnsupportedEngineError
from cpsr.state.codec import encode
from cpsr.state.device_values import DeviceValues

__all__ = ["ModuleState"]

_EXTRA = "_extra_state"  # torch's own suffix
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_BUILT = (
    "and the module has none of that name at its start, so that a restart cannot put it back. If it appears later, "
    'call register_buffer("{}", None) in the constructor. A pruning or parametrization of weights must be there before '
    "the optimizer is made, and may change later: torch.nn.utils.prune.identity(layer, name) begins with none pruned"
)
_Layout = tuple[torch.Size, torch.dtype, torch.device]


class ModuleState:
    """The buffers and the extra state of one module.

    Snapshots have a place for the buffers that the module has when `buffers` is first called. A buffer that appears or
    changes its shape later goes with the small state (`state`), as does what a state dict has beside parameters and
    buffers: `get_extra_state`, and what overridden methods and hooks add.

    Args:
        module: whose state it is.
        rename: gives the names that the module's tensors are saved by.

    Attributes:
        named: its buffers.

    Raises:
        UnsupportedEngineError: an entry of the state dict is not plain data, or cannot be set again; the message names
            it.
    """

    def __init__(self, module: nn.Module, rename: Rename = plain_name) -> None:
        self._module, self._rename = module, rename
        self.named = NamedBuffers(module, rename)
        self._as_built: dict[str, torch.Tensor] | None = None  # buffers, where all have the layouts of the first call
        self._layouts: dict[str, _Layout] | None = None
        self._names: set[str] = set()  # of all buffers at that time, also where they are None
        self._room: dict[str, torch.Tensor] = {}
        self._returns_more = any(map(_returns_more, module.modules()))
        for prefix, part in module.named_modules():
            if _overrides(part, "get_extra_state") and not _overrides(part, "set_extra_state"):
                raise UnsupportedEngineError(
                    f"{type(part).__name__} ({prefix or 'the model'}) has get_extra_state and no set_extra_state, so "
                    "that CPSR could save this state and not restore it; define both"
                )
        self._more()

    def buffers(self, *, to_fill: bool = False) -> dict[str, torch.Tensor]:
        """The buffers that snapshots have a place for, by name: the same ones at every call.

        A buffer that is gone, or has another layout by now, is zeros that take no memory and cannot be written.

        Args:
            to_fill: memory of its own for such a buffer: `load` makes it the module's, if the saved state had it so.

        Raises:
            UnsupportedEngineError: a buffer whose elements share memory; the message names it.
        """
        found = self.named.present()
        if self._layouts is None:
            self._layouts = {name: _layout(one) for name, one in found.items()}
            self._names = {self._rename(name) for name, _ in _buffer_places(self._module)}
        if found is self._as_built or {name: _layout(one) for name, one in found.items()} == self._layouts:
            self._as_built = found
            return found
        return {name: self._placed(name, found.get(name), to_fill) for name in self._layouts}

    def state(self) -> dict[str, Any] | None:
        """What has no place in snapshots, as plain data; None where there is nothing.

        Keys: `buffers`: name -> `values` in the order of the memory, `shape`, `stride`, and whether it is on the host;
        `absent`: buffers that are gone; `more`: entries of the state dict.

        Raises:
            UnsupportedEngineError: an entry is not plain data, or a restarted script will have no place for a buffer;
                the message names it.
        """
        found, more = self.named.present(), self._more()
        if found is self._as_built and not more:
            return None
        layouts = {name: _layout(one) for name, one in found.items()} if self._layouts is None else self._layouts
        moved = {name: one for name, one in found.items() if layouts.get(name) != _layout(one)}
        for name in sorted(moved.keys() - self._names):
            raise UnsupportedEngineError(
                f"the loop has added a buffer {name}, {_BUILT.format(name.rpartition('.')[2])}"
            )
        absent = sorted(layouts.keys() - found.keys())
        if not (moved or absent or more):
            return None
        return {"buffers": {name: _described(one, name) for name, one in moved.items()}, "absent": absent, "more": more}

    def load(self, saved: dict[str, Any] | None, device: torch.device) -> None:
        """Put `state()` back, once the tensors of `buffers(to_fill=True)` and the parameters have been restored.

        Args:
            saved: what `state()` returned.
            device: of buffers that were not on the host.

        Raises:
            UnsupportedEngineError: the module has no such buffer or entry; the message names it.
        """
        state = saved or {"buffers": {}, "absent": [], "more": {}}
        own, layouts = named_buffers(self._module, self._rename), self._layouts or {}
        filled = {name: one for name, one in self._room.items() if name not in state["buffers"]}
        anew = {name: _made(one, device) for name, one in state["buffers"].items()}
        gone = {*state["absent"], *(own.keys() - layouts.keys() - state["buffers"].keys())}
        self._room = {}
        self._put({**filled, **anew} | dict.fromkeys(gone))
        self._load_more(state["more"])

    def _placed(self, name: str, found: torch.Tensor | None, to_fill: bool) -> torch.Tensor:
        assert self._layouts is not None
        shape, dtype, device = layout = self._layouts[name]
        if found is not None and _layout(found) == layout:
            return found
        if not to_fill:
            return torch.zeros((), dtype=dtype, device=device).expand(shape)
        return self._room.setdefault(name, torch.zeros(shape, dtype=dtype, device=device))

    def _put(self, values: dict[str, torch.Tensor | None]) -> None:
        if not values:
            return
        places = {self._rename(name): place for name, place in _buffer_places(self._module)}
        for name, value in values.items():
            if name not in places:
                raise UnsupportedEngineError(
                    f"the saved run had a buffer {name}, {_BUILT.format(name.rpartition('.')[2])}"
                )
            owner, key = places[name]
            current = owner._buffers[key]
            if value is not None and current is not None and _same_memory(current, value):
                with torch.no_grad():
                    current.copy_(value)  # where it is: a CUDA graph may read it there
            else:
                owner._buffers[key] = value

    def _more(self) -> dict[str, Any]:
        """Entries of the state dict that are neither parameters nor buffers, nor other names of these."""
        if not self._returns_more:
            return {}
        tensors: list[tuple[str, torch.Tensor]] = [*self._module.named_parameters(remove_duplicate=False)]
        tensors += self._module.named_buffers(remove_duplicate=False)
        names, places = {name for name, _ in tensors}, {_place(one) for _, one in tensors if one.numel()}
        found = {
            self._rename(name): value
            for name, value in state_dict_of(self._module).items()
            if name not in names and not (isinstance(value, torch.Tensor) and _place(value) in places)
        }
        encode(found, f"{type(self._module).__name__}.state_dict()", DeviceValues())  # waits for no device
        return found

    def _load_more(self, more: dict[str, Any]) -> None:
        if not more:
            return
        parts = {self._rename(f"{prefix}.{_EXTRA}".lstrip(".")): part for prefix, part in self._module.named_modules()}
        for name in [name for name in more if name in parts]:
            parts[name].set_extra_state(more.pop(name))
        if more:
            now = state_dict_of(self._module)
            full = {self._rename(name): name for name in now}
            if absent := sorted(more.keys() - full.keys()):
                raise UnsupportedEngineError(
                    f"the saved state dict of {type(self._module).__name__} had an entry {absent[0]}, and this one has "
                    "none at its start; build the module as it was"
                )
            # Parameters and buffers are in it as they are: the module takes all that it returns, as from a file.
            self._module.load_state_dict(now | {full[name]: value for name, value in more.items()})


def _returns_more(part: nn.Module) -> bool:
    """Whether the state dict of a module may have more than its parameters and buffers."""
    methods = ("get_extra_state", "state_dict", "_save_to_state_dict")
    if any(_overrides(part, name) for name in methods) or "state_dict" in vars(part):
        return True
    hooks = [hook for name in _HOOKS for hook in getattr(part, name, {}).values()]
    return any(not _origin(hook).startswith("torch.distributed.") for hook in hooks)  # those of FSDP2 add nothing


def _overrides(part: nn.Module, name: str) -> bool:
    return getattr(type(part), name) is not getattr(nn.Module, name)


def _origin(hook: Any) -> str:
    """The module in which a hook was written."""
    function = getattr(hook, "hook", getattr(hook, "func", hook))  # torch wraps hooks that take the module
    return str(getattr(function, "__module__", ""))


def _buffer_places(module: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """Every buffer's owner and key, also where it is None."""
    for prefix, part in module.named_modules():
        for key in part._buffers:
            yield f"{prefix}.{key}".lstrip("."), (part, key)


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.shape, tensor.dtype, tensor.device


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _same_memory(own: torch.Tensor, value: torch.Tensor) -> bool:
    return (_layout(own), own.stride()) == (_layout(value), value.stride()) and not own.is_inference()


def _described(tensor: torch.Tensor, name: str) -> dict[str, Any]:
    return {
        "values": flat_view(tensor, f"buffer {name}"),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "host": tensor.device.type == "cpu",
    }


def _made(described: dict[str, Any], device: torch.device) -> torch.Tensor:
    values: torch.Tensor = described["values"].to("cpu" if described["host"] else device, copy=True)
    assert values.numel() == math.prod(described["shape"])
    return values.as_strided(described["shape"], described["stride"])
