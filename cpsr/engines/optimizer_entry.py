"""What an optimizer keeps for one tensor, and beside that: taken apart for a checkpoint, and put together.

An entry is a dict. Its form is plain data, from which it is made again without knowledge of the optimizer's class:
`["dict", ordered, [[key, form], ...]]`, with one of these for each item::

    ["tensor", dtype, shape, strides, place]    tensors with dimensions; `place` is "device" (the parameter's), "host",
                                                or "split": over ranks as the parameter; then of this rank's part
    ["scalar", dtype, place]                    tensors without dimensions; the value is among the numbers
    ["int"], ["float"]                          Python numbers; the value is among the numbers
    ["is", value]                               None, bool, str
    ["tree"]                                    dicts, lists and tuples, which the small state holds as they are
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import repeat
from operator import is_
from typing import Any

import torch

from cpsr.engines.distributed_tensors import is_distributed, local
from cpsr.errors import UnsupportedEngineError
from cpsr.state.codec import encode
from cpsr.state.device_values import DeviceValues

__all__ = [
    "Form",
    "StateEntry",
    "dtype_of",
    "flat_view",
    "load_outside",
    "number_of",
    "numbers_of",
    "outside_state",
    "path_of",
    "place_of",
    "put_together",
    "tree_from",
    "tree_of",
]

Form = list[Any]

_ABSENT = object()
_CONSTANT = (type(None), bool, str)
_TREES = (dict, OrderedDict, list, tuple)
_BASE = torch.optim.Optimizer.state_dict
_OF_TORCH = ("state", "param_groups")


class StateEntry:
    """An optimizer's entry for one tensor; valid while `same`.

    Args:
        entry: the value in the optimizer's `state`; None where it has none yet.
        device: of the tensor that it is for.
        owner: name of the optimizer, for messages.

    Attributes:
        entry: as given.
        form: see above; None where there is no entry.
        key: the form as JSON.
        tensors: those with dimensions, by path.
        trees: dicts, lists and tuples, by path.

    Raises:
        UnsupportedEngineError: an object that is not plain data; the message names it.
    """

    def __init__(self, entry: Any, device: torch.device, owner: str) -> None:
        self.entry = entry
        self._device, self._owner = device, owner
        self.tensors: dict[str, torch.Tensor] = {}
        self.trees: dict[str, Any] = {}
        self._numbers: dict[str, tuple[Any, Any]] = {}  # the key, and the type that the value has there
        self._kept: dict[Any, Any] = {}  # what must stay the same object
        self.form: Form | None = None
        if entry is not None:
            if type(entry) not in (dict, OrderedDict):
                raise self._refused("its state", entry)
            self.form = ["dict", type(entry) is OrderedDict, [[key, self._form_of(key, entry[key])] for key in entry]]
        self._places = [_place(one) for one in self.tensors.values()]
        self.key = json.dumps(self.form)

    def same(self) -> bool:
        """Whether it still is what the optimizer keeps, but for the values of numbers and what is in trees."""
        entry = self.entry
        return entry is None or (
            len(entry) == len(self._kept) + len(self._numbers)
            and all(map(is_, map(entry.get, self._kept, repeat(_ABSENT)), self._kept.values()))
            and all(_number_kind(entry.get(key)) == kind for key, kind in self._numbers.values())
            and self._places == [_place(one) for one in self.tensors.values()]
        )

    @property
    def number_paths(self) -> dict[Any, str]:
        """Paths of the numbers, by their keys."""
        return {key: path for path, (key, _) in self._numbers.items()}

    def scalar(self, path: str) -> Any:
        """The number's own object: a tensor without dimensions, or a Python number; None where there is none."""
        return self.entry[self._numbers[path][0]] if path in self._numbers else None

    def set_number(self, path: str, value: Any) -> None:
        """Change a number in place."""
        key, _ = self._numbers[path]
        if isinstance(self.entry[key], torch.Tensor):
            self.entry[key].fill_(value)
        else:
            self.entry[key] = value

    def _form_of(self, key: Any, value: Any) -> Form:
        if type(key) not in (int, str):
            raise UnsupportedEngineError(
                f"optimizer {self._owner} keeps an item under the key {key!r}; CPSR takes texts and whole numbers as "
                "keys"
            )
        path = path_of(key)
        if (kind := _number_kind(value)) is not None:
            self._numbers[path] = key, kind
            return [type(value).__name__] if kind in (int, float) else ["scalar", _name(value.dtype), self._at(value)]
        self._kept[key] = value
        if type(value) in _CONSTANT:
            return ["is", value]
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if type(value) not in _TREES:
            raise self._refused(path, value)
        encode(value, f"optimizer({self._owner}).{path}", DeviceValues())  # waits for no device
        self.trees[path] = value
        return ["tree"]

    def _tensor(self, value: torch.Tensor, path: str) -> Form:
        split = is_distributed(value)
        plain = split or type(value) in (torch.Tensor, torch.nn.Parameter)
        if not plain or value.layout != torch.strided:
            raise self._refused(path, value)
        self.tensors[path] = value
        held = local(value)
        place = "split" if split else self._at(value)
        return ["tensor", _name(value.dtype), list(held.shape), list(held.stride()), place]

    def _at(self, value: torch.Tensor) -> str:
        return "host" if value.device.type == "cpu" and self._device.type != "cpu" else "device"

    def _refused(self, what: str, value: Any) -> UnsupportedEngineError:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            return UnsupportedEngineError(
                f"optimizer {self._owner} keeps {what} in a tensor subclass, {kind}; CPSR saves plain tensors alone. "
                "Use an optimizer that keeps these, of any dtype, as torch's over bfloat16 weights"
            )
        layout = f" of layout {value.layout}" if isinstance(value, torch.Tensor) else ""
        return UnsupportedEngineError(
            f"optimizer {self._owner} keeps {what}: {kind}{layout}, which is not plain data. CPSR saves numbers, "
            "texts, plain tensors, and dicts, lists and tuples of these, and never pickles"
        )


def path_of(key: int | str) -> str:
    """A key as a part of a tensor's name on disk, which is of one item."""
    if isinstance(key, int):
        return f"#{key}"
    return key.replace("%", "%25").replace("/", "%2F").replace(".", "%2E").replace("#", "%23")


def put_together(form: Form, item: Callable[[str, Form], Any]) -> Any:
    """The entry that has this form.

    Args:
        form: of it.
        item: gives the tensor, the number or the tree at a path, by its form.
    """
    items = [(key, one[1] if one[0] == "is" else item(path_of(key), one)) for key, one in form[2]]
    return OrderedDict(items) if form[1] else dict(items)


def tree_of(value: Any, device: torch.device) -> dict[str, Any]:
    """A tree as plain data, with the place and the strides of each of its tensors.

    Args:
        value: dicts, lists and tuples.
        device: of the parameters.
    """
    places = [
        ["host" if one.device.type == "cpu" and device.type != "cpu" else "device", list(_dense_stride(one))]
        for one in _tensors_in(value)
    ]
    return {"tree": value, "places": places}


def tree_from(saved: Mapping[str, Any], device: torch.device) -> Any:
    """What `tree_of` was given, with every tensor in its place."""
    places = iter(saved["places"])

    def placed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            place, stride = next(places)
            made = torch.empty_strided(
                value.shape, stride, dtype=value.dtype, device="cpu" if place == "host" else device
            )
            return made.copy_(value)
        if isinstance(value, dict):
            return type(value)((key, placed(one)) for key, one in value.items())
        return type(value)(map(placed, value)) if isinstance(value, list | tuple) else value

    return placed(saved["tree"])


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    return torch.empty_like(tensor, device="meta").stride()


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one)


def outside_state(
    optimizer: torch.optim.Optimizer, attributes: Collection[str], device: torch.device, entries: int
) -> dict[str, Any] | None:
    """What an optimizer keeps beside its entries, as plain data with tensors; None where there is nothing.

    Args:
        optimizer: torch's.
        attributes: names of numbers among its own attributes that have changed.
        device: of the parameters.
        entries: how many entries of its state are of tensors that it updates.
    """
    beside = optimizer.state.items() if len(optimizer.state) > entries else ()
    found: dict[str, Any] = {
        "state": {key: value for key, value in beside if not isinstance(key, torch.Tensor)},
        "attributes": {key: getattr(optimizer, key) for key in sorted(attributes)},
        "more": {},
    }
    if type(optimizer).state_dict is not _BASE or optimizer._optimizer_state_dict_post_hooks:
        found["more"] = {key: value for key, value in optimizer.state_dict().items() if key not in _OF_TORCH}
    return tree_of(found, device) if any(found.values()) else None


def load_outside(optimizer: torch.optim.Optimizer, saved: dict[str, Any] | None, device: torch.device) -> None:
    """Put `outside_state` back; entries of a state dict by the optimizer's own `load_state_dict`."""
    if saved is None:
        return
    found = tree_from(saved, device)
    if found["more"]:
        own = dict(optimizer.state)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}, **found["more"]})
        optimizer.state.update(own)
    optimizer.state.update(found["state"])
    for key, value in found["attributes"].items():
        setattr(optimizer, key, value)


def dtype_of(form: Form) -> torch.dtype:
    """Of a tensor or a scalar."""
    found = getattr(torch, form[1])
    assert isinstance(found, torch.dtype)
    return found


def place_of(form: Form, device: torch.device) -> torch.device:
    """Where a tensor or a scalar belongs, whose parameter is on this device."""
    return torch.device("cpu") if form[-1] == "host" else device


def number_of(form: Form, value: Any, device: torch.device) -> Any:
    """A Python number as it is, and a scalar as a tensor in its place."""
    if form[0] != "scalar":
        return value
    return torch.tensor(value, dtype=dtype_of(form), device=place_of(form, device))


def flat_view(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """1-D view of a dense tensor in the order of its memory (so also of `channels_last` tensors).

    Of a distributed tensor it is a view of this rank's part.

    Raises:
        UnsupportedEngineError: the tensor's elements do not fill one block of memory (an expanded or strided view).
    """
    tensor = local(tensor)
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        raise UnsupportedEngineError(
            f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}: not one block of memory, so it has "
            "no zero-copy view; make it contiguous before building the optimizer"
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where its elements lie, and in which order."""
    address = (local(tensor) if is_distributed(tensor) else tensor).data_ptr()
    return address, tensor.size(), tensor.stride()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _number_kind(value: Any) -> Any:
    """What must stay as it is of a number; None for what is no number."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.device) if value.dim() == 0 and not value.is_complex() else None
    return type(value) if type(value) in (int, float) else None


def numbers_of(values: Mapping[str, Any]) -> dict[str, int | float]:
    """The Python numbers among these, without truth values."""
    return {key: value for key, value in values.items() if type(value) in (int, float)}
