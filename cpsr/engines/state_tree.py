"""An optimizer's state, taken apart and put together: for one tensor, and what it keeps beside that.

The form is plain data, from which the state is made again without knowledge of the optimizer's class::

    ["tensor", dtype, shape, strides, place]    tensors with dimensions; `place` is "device" (the parameter's), "host",
                                                or "split": over ranks as the parameter; then of this rank's part
    ["scalar", dtype, place]                    tensors without dimensions; the value is among the numbers
    ["int"], ["float"]                          Python numbers; the value is among the numbers
    ["is", value]                               None, bool, str
    ["dict", ordered, [[key, form], ...]], ["list", [form, ...]], ["tuple", [form, ...]]
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from operator import getitem, is_
from typing import Any

import torch

from cpsr.engines.sharded import is_distributed, local
from cpsr.errors import UnsupportedEngineError
from cpsr.state.device_values import number

__all__ = [
    "Form",
    "StateTree",
    "dtype_of",
    "flat_view",
    "load_outside",
    "number_of",
    "numbers_of",
    "outside_state",
    "place_of",
    "put_together",
]

Form = list[Any]

_CONSTANT = (type(None), bool, str)
_BASE = torch.optim.Optimizer.state_dict
_OF_TORCH = ("state", "param_groups")


class StateTree:
    """What an optimizer keeps for one tensor; valid while `same`.

    Args:
        entry: the value in the optimizer's `state`; None where it has none yet.
        device: of the tensor that it is for.
        owner: name of the optimizer, for messages.

    Attributes:
        entry: as given.
        form: see above; None where there is no entry.
        key: the form as JSON.
        tensors: those with dimensions, by path.
        kinds: types of the numbers.

    Raises:
        UnsupportedEngineError: an object that is not plain data; the message names it.
    """

    def __init__(self, entry: Any, device: torch.device, owner: str) -> None:
        self.entry = entry
        self._device, self._owner = device, owner
        self.tensors: dict[str, torch.Tensor] = {}
        self._numbers: dict[str, tuple[Any, Any, Any]] = {}  # container, key, and the type that the value has there
        self._containers: list[Any] = []  # every mapping and sequence
        self._within: list[Any] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self.form: Form | None = None if entry is None else self._form_of(entry, "")
        self._lengths = list(map(len, self._containers))
        self.kinds = tuple(kind for _, _, kind in self._numbers.values())
        self.key = json.dumps(self.form)

    def same(self) -> bool:
        """Whether it still is what the optimizer keeps, but for the values of numbers."""
        try:
            found = map(getitem, self._within, self._keys)
            return list(map(len, self._containers)) == self._lengths and all(map(is_, found, self._values))
        except (KeyError, IndexError):
            return False

    def numbers(self, *, on_device: bool = False) -> dict[str, Any] | None:
        """The numbers by path; None where one has another type than it had.

        Args:
            on_device: leave those of a CUDA device there, as `DeviceNumber`s.
        """
        found: dict[str, Any] = {}
        try:
            for path, (container, key, kind) in self._numbers.items():
                value = container[key]
                if isinstance(value, torch.Tensor):  # this runs at every step of a GPU
                    if value.dim() or (value.dtype, value.device) != kind:
                        return None
                    found[path] = number(value, on_device=on_device)
                elif type(value) is kind:
                    found[path] = value
                else:
                    return None
        except (KeyError, IndexError):
            return None
        return found

    def scalar(self, path: str) -> Any:
        """The number's own object: a tensor without dimensions, or a Python number; None where there is none."""
        if path not in self._numbers:
            return None
        container, key, _ = self._numbers[path]
        return container[key]

    def set_number(self, path: str, value: Any) -> None:
        """Change a number in place."""
        container, key, _ = self._numbers[path]
        if isinstance(container[key], torch.Tensor):
            container[key].fill_(value)
        else:
            container[key] = value

    def _form_of(self, value: Any, path: str) -> Form:
        if type(value) in (dict, OrderedDict):
            self._containers.append(value)
            items = [[key, self._item(value, key, self._joined(path, key))] for key in value]
            return ["dict", type(value) is OrderedDict, items]
        if type(value) in (list, tuple):
            self._containers.append(value)
            return [type(value).__name__, [self._item(value, i, self._joined(path, i)) for i in range(len(value))]]
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if type(value) in _CONSTANT:
            return ["is", value]
        raise self._refused(path, f"{type(value).__module__}.{type(value).__qualname__}, which is not plain data")

    def _item(self, container: Any, key: Any, path: str) -> Form:
        value = container[key]
        if (kind := _number_kind(value)) is not None:
            self._numbers[path] = container, key, kind
            return [type(value).__name__] if kind in (int, float) else ["scalar", _name(value.dtype), self._at(value)]
        self._within.append(container)
        self._keys.append(key)
        self._values.append(value)
        return self._form_of(value, path)

    def _tensor(self, value: torch.Tensor, path: str) -> Form:
        split = is_distributed(value)
        plain = split or type(value) in (torch.Tensor, torch.nn.Parameter)
        if not plain or value.layout != torch.strided:
            raise self._refused(path, f"a tensor of type {type(value).__name__} and layout {value.layout}")
        self.tensors[path] = value
        held = local(value)
        place = "split" if split else self._at(value)
        return ["tensor", _name(value.dtype), list(held.shape), list(held.stride()), place]

    def _at(self, value: torch.Tensor) -> str:
        if value.device.type == "cpu" and self._device.type != "cpu":
            return "host"
        return "device"

    def _joined(self, path: str, key: Any) -> str:
        if type(key) not in (int, str):
            raise self._refused(path, f"an item under the key {key!r}; only texts and whole numbers can be keys")
        return _under(path, key)

    def _refused(self, path: str, what: str) -> UnsupportedEngineError:
        return UnsupportedEngineError(
            f"optimizer {self._owner} keeps {path or 'its state'}: {what}. CPSR saves numbers, texts, plain tensors, "
            "and dicts, lists and tuples of these, and never pickles"
        )


def put_together(
    form: Form, tensor: Callable[[str, Form], torch.Tensor], value: Callable[[str, Form], Any], path: str = ""
) -> Any:
    """The state that has this form.

    Args:
        form: of it.
        tensor: gives the tensor at a path, by its form.
        value: gives the number, or the tensor without dimensions, at a path.
        path: where in the state this is.
    """
    kind = form[0]
    if kind == "dict":
        items = [(key, put_together(one, tensor, value, _under(path, key))) for key, one in form[2]]
        return OrderedDict(items) if form[1] else dict(items)
    if kind in ("list", "tuple"):
        listed = [put_together(one, tensor, value, _under(path, i)) for i, one in enumerate(form[1])]
        return listed if kind == "list" else tuple(listed)
    if kind == "is":
        return form[1]
    return tensor(path, form) if kind == "tensor" else value(path, form)


def outside_state(
    optimizer: torch.optim.Optimizer, attributes: Collection[str], device: torch.device
) -> dict[str, Any] | None:
    """As plain data with tensors; None where there is nothing.

    Args:
        optimizer: torch's.
        attributes: names of numbers among its own attributes that have changed.
        device: of the parameters.

    Raises:
        UnsupportedEngineError: something that is not plain data; the message names it.
    """
    found: dict[str, Any] = {
        "state": {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)},
        "attributes": {key: getattr(optimizer, key) for key in sorted(attributes)},
        "more": {},
    }
    if type(optimizer).state_dict is not _BASE or optimizer._optimizer_state_dict_post_hooks:
        found["more"] = {key: value for key, value in optimizer.state_dict().items() if key not in _OF_TORCH}
    if not any(found.values()):
        return None
    tree = StateTree(found, device, type(optimizer).__name__)
    return {"form": tree.form, "numbers": tree.numbers(), "tensors": tree.tensors}


def load_outside(optimizer: torch.optim.Optimizer, saved: dict[str, Any] | None, device: torch.device) -> None:
    """Put `outside_state` back; entries of a state dict by the optimizer's own `load_state_dict`."""
    if saved is None:
        return
    tensors, numbers = saved["tensors"], saved["numbers"]

    def tensor(path: str, form: Form) -> torch.Tensor:
        found: torch.Tensor = tensors[path]
        return found.to(place_of(form, device), copy=True)

    def number(path: str, form: Form) -> Any:
        return number_of(form, numbers[path], device)

    found = put_together(saved["form"], tensor, number)
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


def _under(path: str, key: int | str) -> str:
    """Path of an item; a text is written so that every path is of one item, and a part of a tensor's name on disk."""
    if isinstance(key, int):
        part = f"#{key}"
    else:
        part = key.replace("%", "%25").replace("/", "%2F").replace(".", "%2E").replace("#", "%23")
    return f"{path}.{part}" if path else part


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
