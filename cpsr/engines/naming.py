"""Names and identities of a module's tensors, the same on every start."""

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from cpsr.engines.distributed_tensors import is_distributed, layout_of, local
from cpsr.errors import UnsupportedEngineError
from cpsr.state.frozen_parameters import FrozenPlace

__all__ = [
    "NamedBuffers",
    "Rename",
    "module_identity",
    "named_buffers",
    "parameter_names",
    "plain_name",
    "same_objects",
    "state_dict_of",
    "tensor_identity",
]

_COMPILED = "_orig_mod."  # torch.compile puts this into every name

_MODULES, _BUFFERS = attrgetter("_modules"), attrgetter("_buffers")
_LAYOUT, _STRIDE = attrgetter("shape", "dtype", "device"), torch.Tensor.stride
_NAMING = ("named_buffers", "named_modules", "_named_members")

# From a tensor's name in a rank's own module to the one that it is saved by.
Rename = Callable[[str], str]


def plain_name(name: str) -> str:
    """A tensor's name, compiled or not."""
    return name.replace(_COMPILED, "")


def parameter_names(module: torch.nn.Module, rename: Rename = plain_name) -> dict[int, str]:
    """Name of every parameter by its id; a tied parameter has the first of its names."""
    return {id(parameter): rename(name) for name, parameter in module.named_parameters()}


def named_buffers(module: torch.nn.Module, rename: Rename = plain_name) -> dict[str, torch.Tensor]:
    """Every buffer by name, non-persistent ones included: they may carry training state all the same.

    Raises:
        UnsupportedEngineError: a buffer whose elements share memory, so that it cannot be written back.
    """
    buffers = {}
    for name, buffer in module.named_buffers():
        if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
            raise UnsupportedEngineError(
                f"buffer {name} of shape {tuple(buffer.shape)} is an expanded view and cannot be written back; "
                "register a contiguous copy"
            )
        buffers[rename(name)] = local(buffer)
    return buffers


class NamedBuffers:
    """`named_buffers` of one module, made anew only where its modules or buffers are not those of the last time.

    Args:
        module: whose buffers they are.
        rename: gives their names.
    """

    def __init__(self, module: torch.nn.Module, rename: Rename = plain_name) -> None:
        self._module, self._rename = module, rename
        self._parts: list[torch.nn.Module] = []
        self._made_of: tuple[list[Any], ...] | None = None
        self._values: list[Any] = []  # modules and buffers
        self._buffers: list[torch.Tensor] = []
        self._found: dict[str, torch.Tensor] = {}
        self._rests = self._compared = False

    def present(self) -> dict[str, torch.Tensor]:
        """See `named_buffers`; the same dict while nothing has changed."""
        if self._made_of is None or not (self._compared or self._same()):
            self._found = named_buffers(self._module, self._rename)
            self._parts = list(self._module.modules())
            plain = not any(map(is_distributed, self._module.buffers())) and all(map(_as_torch, self._parts))
            dicts = self._dicts()
            self._values = [*chain.from_iterable(map(dict.values, dicts))]
            self._buffers = [one for one in self._values if isinstance(one, torch.Tensor)]
            self._made_of = self._described(dicts) if plain else None
        self._compared = self._rests
        return self._found

    def rest(self, rests: bool) -> None:
        """Until the next call nobody changes the module, so that it is compared once; or somebody may."""
        self._rests, self._compared = rests, False

    def _dicts(self) -> list[dict[str, Any]]:
        return [*map(_MODULES, self._parts), *map(_BUFFERS, self._parts)]

    def _described(self, dicts: list[dict[str, Any]]) -> tuple[list[Any], ...]:
        buffers = self._buffers
        layouts = [*map(torch.Tensor.data_ptr, buffers), *map(_LAYOUT, buffers), *map(_STRIDE, buffers)]
        return [*map(len, dicts)], [*chain.from_iterable(dicts)], layouts

    def _same(self) -> bool:
        dicts = self._dicts()
        values = [*chain.from_iterable(map(dict.values, dicts))]
        return same_objects(values, self._values) and self._described(dicts) == self._made_of


def same_objects(found: Sequence[object], before: Sequence[object]) -> bool:
    """Whether these are the same objects as before, in the same order."""
    return len(found) == len(before) and all(map(is_, found, before))


def _as_torch(part: torch.nn.Module) -> bool:
    """Whether it names its buffers as torch does."""
    own, kind = vars(part), type(part)
    return all(name not in own and getattr(kind, name) is getattr(torch.nn.Module, name) for name in _NAMING)


def state_dict_of(module: torch.nn.Module) -> dict[str, Any]:
    """The module's own state dict, with the tensors themselves where it can return them."""
    try:
        return dict(module.state_dict(keep_vars=True))
    except TypeError:  # overridden without arguments
        return dict(module.state_dict())


def module_identity(
    module: torch.nn.Module, frozen: set[str], tensors: dict[str, Any], rename: Rename = plain_name
) -> dict[str, Any]:
    """How the module's own state dict differs from the tensors that are saved by name.

    Args:
        module: the module.
        frozen: names of the parameters that the optimizer does not move.
        tensors: see `EngineAdapter.describe`.
        rename: gives the names that the module's tensors are saved by.

    Returns:
        Plain data. `aliases`: further name of a tied tensor -> its first; `transient`: buffers that the state dict
        leaves out; `frozen`: name -> whole shape; `strides`: those of tensors that are not contiguous; `extra`:
        entries of the state dict that are neither parameters nor buffers.
    """
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    whole: dict[str, list[int]] = {}
    for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for full_name, tensor in named:
            name = rename(full_name)
            if first.setdefault(id(tensor), name) != name:
                tied[name] = first[id(tensor)]
            whole[name] = list(getattr(tensor, "ds_shape", tensor.shape))  # ZeRO-3 empties its parameters
    kept = {rename(name) for name in state_dict_of(module)}
    return {
        "aliases": {name: first_name for name, first_name in tied.items() if name in kept},
        "transient": sorted(whole.keys() - kept - tied.keys()),
        "frozen": {name: whole[name] for name in sorted(frozen)},
        "strides": {name: item["stride"] for name, item in tensors.items() if "stride" in item},
        "extra": sorted(kept - whole.keys()),
    }


def tensor_identity(tensor: torch.Tensor, place: FrozenPlace | None = None, numel: int | None = None) -> dict[str, Any]:
    """One entry of `EngineAdapter.describe()["tensors"]`.

    A tensor that is not contiguous also has `stride`: its flat view is in memory order, which another layout
    would misread.

    Args:
        tensor: that holds what this rank has of it, with other tensors where `numel` is given.
        place: of that; None: it is the whole.
        numel: elements of this rank, if they are not all of `tensor`.
    """
    held = local(tensor)
    global_shape, offset, _ = place or FrozenPlace(tuple(tensor.shape))
    identity: dict[str, Any] = {
        "shape": list(global_shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "offset": offset,
        "numel": held.numel() if numel is None else numel,
    }
    if not held.is_contiguous():
        identity["stride"] = list(held.stride())
    return identity | ({"layout": layout_of(tensor)} if is_distributed(tensor) else {})
