"""An optimizer's state for one tensor, taken apart and put together: its tensors, its numbers, and its form.

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
from collections.abc import Callable, Sequence
from operator import getitem, is_
from typing import Any

import torch

from cpsr.engines.sharded import is_distributed, local
from cpsr.errors import UnsupportedEngineError
from cpsr.state.device_values import number

__all__ = ["Form", "StateTree", "StateTrees", "dtype_of", "flat_view", "number_of", "place_of", "put_together"]

Form = list[Any]

_CONSTANT = (type(None), bool, str)


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
        containers, lengths: every mapping and sequence, and how many items it has.
        within, keys, values: container, key and object of everything but numbers.
        kinds: types of the numbers.

    Raises:
        UnsupportedEngineError: an object that is not plain data; the message names it.
    """

    def __init__(self, entry: Any, device: torch.device, owner: str) -> None:
        self.entry = entry
        self._device, self._owner = device, owner
        self.tensors: dict[str, torch.Tensor] = {}
        self._numbers: dict[str, tuple[Any, Any, Any]] = {}  # container, key, and the type that the value has there
        self.containers: list[Any] = []
        self.within: list[Any] = []
        self.keys: list[Any] = []
        self.values: list[Any] = []
        self.form: Form | None = None if entry is None else self._form_of(entry, "")
        self.lengths = list(map(len, self.containers))
        self.kinds = tuple(kind for _, _, kind in self._numbers.values())
        self.key = json.dumps(self.form)

    def same(self) -> bool:
        """Whether it still is what the optimizer keeps, but for the values of numbers."""
        return _unchanged(self)

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
            self.containers.append(value)
            items = [[key, self._item(value, key, self._joined(path, key))] for key in value]
            return ["dict", type(value) is OrderedDict, items]
        if type(value) in (list, tuple):
            self.containers.append(value)
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
        self.within.append(container)
        self.keys.append(key)
        self.values.append(value)
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


class StateTrees:
    """Several trees, which are compared without a call for each.

    Args:
        trees: of the state of several tensors.

    Attributes:
        containers, lengths, within, keys, values: see `StateTree`.
    """

    def __init__(self, trees: Sequence[StateTree]) -> None:
        self._entries = [tree.entry for tree in trees]
        self.containers = [one for tree in trees for one in tree.containers]
        self.lengths = [length for tree in trees for length in tree.lengths]
        self.within = [one for tree in trees for one in tree.within]
        self.keys = [key for tree in trees for key in tree.keys]
        self.values = [value for tree in trees for value in tree.values]

    def same(self, entries: list[Any]) -> bool:
        """Whether these are the entries of all trees, and `StateTree.same` is true of each."""
        alike = len(entries) == len(self._entries) and all(map(is_, entries, self._entries))
        return alike and _unchanged(self)


def _unchanged(of: StateTree | StateTrees) -> bool:
    """Whether every container still has as many items, and the same objects where no numbers are."""
    try:
        found = map(getitem, of.within, of.keys)
        return list(map(len, of.containers)) == of.lengths and all(map(is_, found, of.values))
    except (KeyError, IndexError):
        return False


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
