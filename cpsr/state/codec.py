"""Plain data and tensors to JSON plus named tensors, and back, bit for bit and without pickle; copies of such trees."""

import base64
import copy
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from cpsr.errors import UnsupportedEngineError
from cpsr.state.device_values import Deadline, DeviceNumber, DeviceValues
from cpsr.state.shard import bytes_of

__all__ = [
    "SCALARS",
    "SmallState",
    "decode",
    "encode",
    "host_copy",
    "is_plain",
    "same",
    "same_bits",
]

SCALARS = "scalars"  # the names of a small state's tensors begin with it, in memory and in files
_TAG = "__cpsr__"  # a mapping with this key is one of ours; user mappings that have it are written as pairs
# JSON's own types. Sequences of only these are copied whole: the training thread waits for this.
_PLAIN = frozenset({type(None), bool, int, float, str})
_TEXT, _INTEGER = frozenset({str}), frozenset({int})
_MAPPINGS, _SEQUENCES = frozenset({dict, OrderedDict}), frozenset({list, tuple})
_LONG = 64  # items of a tuple; of integers alone it becomes a tensor: Python's random state has 625
_KEPT = 4  # tensors of such tuples, newest last: most snapshots have the same states as the one before
_kept: list[tuple[tuple[Any, ...], torch.Tensor]] = []


def encode(tree: Any, prefix: str = "tree", later: DeviceValues | None = None) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a tree of plain data into a JSON value and its tensors.

    Args:
        tree: None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict, tensors, numpy scalars and arrays,
            nested freely. What would change its type is refused: other containers (named tuples, default dicts),
            subclasses of arrays, and tensors that are no block of memory (sparse, distributed, nested, quantized).
        prefix: start of the tensors' keys, so that several trees can share one file.
        later: takes tensors and numbers of a CUDA device, for `decode`; such a value is for memory, not for a file.
            Without it tensors of a device are waited for, and a `DeviceNumber` is refused.

    Returns:
        The JSON value and the tensors (detached, contiguous, on the CPU) it refers to by key.

    Raises:
        UnsupportedEngineError: an object that is not plain data; the message names its path and type.

    >>> decode(*encode({"step": 3, "betas": (0.9, 0.99), 0: torch.ones(2)}))
    {'step': 3, 'betas': (0.9, 0.99), 0: tensor([1., 1.])}
    """
    encoder = _Encoder(later)
    return encoder.encode(tree, prefix), encoder.tensors


class _Encoder:
    """Encodes parts of a tree by their paths, and collects their tensors."""

    def __init__(self, later: DeviceValues | None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._later = later

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in _MAPPINGS:
            return self._mapping(value, path)
        if kind in _SEQUENCES:
            return self._sequence(value, path)
        if isinstance(value, bool | str):
            return value
        if isinstance(value, bytes):
            return {_TAG: "bytes", "data": base64.b64encode(value).decode("ascii")}
        if isinstance(value, numpy.generic) and value.dtype.kind != "V":
            return {_TAG: "scalar", "dtype": value.dtype.str, "data": base64.b64encode(value.tobytes()).decode("ascii")}
        if isinstance(value, DeviceNumber):
            return self._number(value, path)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind in (numpy.ndarray, numpy.memmap):
            return {_TAG: "array", "key": self._put(path, _of_array(value, path))}
        raise UnsupportedEngineError(
            f"cannot save {path}: {kind.__module__}.{kind.__qualname__} is not plain data "
            "(numbers, strings, bytes, lists, tuples, dicts, tensors); CPSR never pickles"
        )

    def _sequence(self, value: list[Any] | tuple[Any, ...], path: str) -> Any:
        if type(value) is tuple and len(value) >= _LONG and (numbers := _packed(value)) is not None:
            return {_TAG: "integers", "key": self._put(path, numbers)}
        items = list(value) if _PLAIN.issuperset(map(type, value)) else self._items(value, path)
        return items if type(value) is list else {_TAG: "tuple", "items": items}

    def _tensor(self, value: torch.Tensor, path: str) -> dict[str, Any]:
        if (why := _more_than_bytes(value)) is not None:
            raise UnsupportedEngineError(
                f"cannot save {path}: a tensor that is no block of memory ({why}); keep plain tensors in its place"
            )
        index = self._later.accept(value) if self._later is not None else None
        if index is not None:
            return {_TAG: "later", "index": index}
        # A copy: the caller may change the original while the tree is written in the background.
        return {_TAG: "tensor", "key": self._put(path, value.detach().to("cpu", copy=True).contiguous())}

    def _put(self, path: str, tensor: torch.Tensor) -> str:
        """The key under which it is put: the path, with a number where that is taken, as by a name with a dot in it."""
        if not path.isascii():
            path = path.encode(errors="backslashreplace").decode()  # a file holds no lone surrogates
        key, number = path, 0
        while key in self.tensors:
            key, number = f"{path}~{number}", number + 1
        self.tensors[key] = tensor
        return key

    def _items(self, values: Sequence[Any], path: str) -> list[Any]:
        """The items of a list; one that is all of them, as an optimizer's step counts are, is encoded once."""
        first = values[0]
        # Of a mapping of numbers and strings alone the encoding does not depend on its place.
        is_simple = type(first) is dict and _PLAIN.issuperset(map(type, first.values()))
        if is_simple and all(map(is_, values, repeat(first))):
            return [self.encode(first, f"{path}.0")] * len(values)
        return [self.encode(item, f"{path}.{index}") for index, item in enumerate(values)]

    def _number(self, value: DeviceNumber, path: str) -> Any:
        if self._later is None:
            raise UnsupportedEngineError(
                f"cannot save {path}: the number is still on {value.value.device}; pass the tree to a SmallState, "
                "which waits for it"
            )
        index = self._later.accept(value.value)
        return value.value.item() if index is None else {_TAG: "later", "index": index, "number": True}

    def _mapping(self, value: dict[Any, Any], path: str) -> Any:
        if type(value) is dict and _TEXT.issuperset(map(type, value)) and _TAG not in value:
            if _PLAIN.issuperset(map(type, value.values())):
                return dict(value)
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        pairs = [
            [self.encode(key, f"{path}.{index}.key"), self.encode(item, f"{path}.{index}")]
            for index, (key, item) in enumerate(value.items())
        ]
        ordered = {"ordered": True} if type(value) is OrderedDict else {}
        return {_TAG: "dict", "pairs": pairs, **ordered}


def _packed(integers: tuple[Any, ...]) -> torch.Tensor | None:
    """A tuple of integers as a shared int64 tensor, which callers must not change; None for other tuples."""
    for known, packed in list(_kept):  # from any thread
        if known is integers:
            return packed
    if not _INTEGER.issuperset(map(type, integers)):
        return None
    try:
        packed = torch.frombuffer(array("q", integers), dtype=torch.int64)
    except OverflowError:
        return None
    _kept[:] = [*_kept[1 - _KEPT :], (integers, packed)]
    return packed


def _more_than_bytes(value: torch.Tensor) -> str | None:
    """What a tensor is that its elements in the order of its shape do not tell; None: they tell all."""
    if value.is_nested or value.layout is not torch.strided:
        return "nested" if value.is_nested else str(value.layout)
    if value.is_quantized or value.is_meta:
        return f"{value.dtype} on {value.device}"
    return type(value).__qualname__ if hasattr(value, "__tensor_flatten__") else None  # distributed ones, too


def _of_array(value: NDArray[Any], path: str) -> torch.Tensor:
    """A copy, whatever the strides; torch has neither texts nor dates, structures or another order of bytes."""
    try:
        return torch.from_numpy(numpy.array(value, order="C"))
    except (TypeError, ValueError) as error:
        raise UnsupportedEngineError(f"cannot save {path}: a numpy array of {value.dtype!r}: {error}") from error


def is_plain(tree: Any) -> bool:
    """Whether `encode` takes this tree."""
    try:
        encode(tree)
    except UnsupportedEngineError:
        return False
    return True


def same(one: Any, other: Any) -> bool:
    """Whether two trees have the same plain data and, bit for bit, the same tensors."""
    (data, tensors), (other_data, other_tensors) = encode(one), encode(other)
    return (
        data == other_data
        and tensors.keys() == other_tensors.keys()
        and all(same_bits(values, other_tensors[key]) for key, values in tensors.items())
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, also where they hold NaNs; of one device, with any strides."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(bytes_of(one), bytes_of(other))


def decode(data: Any, tensors: Mapping[str, torch.Tensor], later: Mapping[int, torch.Tensor] | None = None) -> Any:
    """Reverse `encode`.

    Args:
        data: the JSON value.
        tensors: those that it refers to by key.
        later: those that `encode` left to `DeviceValues`, by index.

    Raises:
        KeyError: a tensor is missing that `data` refers to.
        ValueError: `data` has a tag that this version does not know.
    """
    if isinstance(data, list):
        return list(data) if _PLAIN.issuperset(map(type, data)) else [decode(item, tensors, later) for item in data]
    if not isinstance(data, dict):
        return data
    if _TAG not in data:
        return {key: decode(item, tensors, later) for key, item in data.items()}
    if data[_TAG] == "later" and later is not None:
        value = later[data["index"]]
        return value.item() if data.get("number") else value
    return _decode_tagged(data, tensors, later)


def _decode_tagged(
    data: dict[str, Any], tensors: Mapping[str, torch.Tensor], later: Mapping[int, torch.Tensor] | None
) -> Any:
    tag = data[_TAG]
    if tag == "tensor":
        return tensors[data["key"]]
    if tag == "array":
        return tensors[data["key"]].numpy()
    if tag == "integers":
        return tuple(tensors[data["key"]].tolist())
    if tag == "tuple":
        return tuple(decode(data["items"], tensors, later))
    if tag == "dict":
        pairs = [(decode(key, tensors, later), decode(item, tensors, later)) for key, item in data["pairs"]]
        return OrderedDict(pairs) if data.get("ordered") else dict(pairs)
    if tag == "bytes":
        return base64.b64decode(data["data"])
    if tag == "scalar":
        return numpy.frombuffer(base64.b64decode(data["data"]), dtype=data["dtype"])[0]
    raise ValueError(f"unknown tag {tag!r} in saved data; it was written by a newer version")


_UNCHANGING = (int, float, str, bytes, type(None), DeviceNumber)


class SmallState:
    """A copy of plain data; what lies on a CUDA device follows in the order of the current stream.

    Args:
        tree: see `cpsr.state.codec.encode`; also `DeviceNumber`s.

    Raises:
        UnsupportedEngineError: an object that is not plain data; the message names it.
    """

    def __init__(self, tree: Any) -> None:
        self._later = DeviceValues()
        self._data, self._tensors = encode(tree, prefix=SCALARS, later=self._later)
        self._later.send()

    @property
    def encoded(self) -> tuple[Any, dict[str, torch.Tensor]] | None:
        """The encoded tree, for reading; None where a device has a part of it."""
        return None if self._later else (self._data, self._tensors)

    @property
    def here(self) -> bool:
        """Whether it is complete; does not wait."""
        return self._later.here

    def wait(self, deadline: Deadline | None = None) -> None:
        """Wait for what the device sends.

        Raises:
            SaveError: it hangs, and the deadline has passed.
        """
        self._later.wait(deadline)

    def tree(self) -> Any:
        """The plain data, with numbers and host tensors in the place of those on a device; once it is here."""
        return decode(self._data, self._tensors, self._later.values())


def host_copy(tree: Any) -> Any:
    """A copy of plain data as it is now; of a `DeviceNumber` the reference.

    Raises:
        UnsupportedEngineError: a tensor of a device, which would have to be copied there.
    """
    if isinstance(tree, dict):
        return {key: host_copy(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(host_copy, tree))
    if isinstance(tree, _UNCHANGING):
        return tree
    if isinstance(tree, torch.Tensor) and tree.device.type != "cpu":
        raise UnsupportedEngineError(f"the small state has a tensor on {tree.device}")
    return copy.deepcopy(tree)
