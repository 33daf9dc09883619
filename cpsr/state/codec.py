"""Plain data and tensors to JSON plus named tensors, and back, bit for bit and without pickle."""

import base64
from collections import OrderedDict
from typing import Any

import numpy
import torch

from cpsr.errors import UnsupportedEngineError

__all__ = ["decode", "encode", "same"]

_TAG = "__cpsr__"  # a mapping with this key is one of ours; user mappings that have it are written as pairs
# JSON's own types. Sequences of only these are copied whole: Python's random state alone has 625 integers, and the
# training thread waits for this.
_PLAIN = frozenset({type(None), bool, int, float, str})


def encode(tree: Any, prefix: str = "tree") -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a tree of plain data into a JSON value and its tensors.

    Args:
        tree: None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict, tensors, numpy scalars and arrays,
            nested freely. Other containers (named tuples, default dicts) would change their type.
        prefix: start of the tensors' keys, so that several trees can share one file.

    Returns:
        The JSON value and the tensors (detached, contiguous, on the CPU) it refers to by key.

    Raises:
        UnsupportedEngineError: an object that is not plain data; the message names its path and type.

    >>> decode(*encode({"step": 3, "betas": (0.9, 0.99), 0: torch.ones(2)}))
    {'step': 3, 'betas': (0.9, 0.99), 0: tensor([1., 1.])}
    """
    tensors: dict[str, torch.Tensor] = {}
    return _encode(tree, prefix, tensors), tensors


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, bool | str) or type(value) in (int, float):
        return value
    if isinstance(value, bytes):
        return {_TAG: "bytes", "data": base64.b64encode(value).decode("ascii")}
    if isinstance(value, numpy.generic):
        return {_TAG: "scalar", "dtype": value.dtype.str, "data": base64.b64encode(value.tobytes()).decode("ascii")}
    if isinstance(value, torch.Tensor | numpy.ndarray):
        tensor = torch.from_numpy(value) if isinstance(value, numpy.ndarray) else value.detach()
        # A copy: the caller may change the original while the tree is written in the background.
        tensors[path] = tensor.to("cpu", copy=True).contiguous()
        return {_TAG: "array" if isinstance(value, numpy.ndarray) else "tensor", "key": path}
    if type(value) in (list, tuple):
        if _PLAIN.issuperset(map(type, value)):
            items = list(value)
        else:
            items = [_encode(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        return items if type(value) is list else {_TAG: "tuple", "items": items}
    if type(value) in (dict, OrderedDict):
        return _encode_mapping(value, path, tensors)
    raise UnsupportedEngineError(
        f"cannot save {path}: {type(value).__module__}.{type(value).__qualname__} is not plain data "
        "(numbers, strings, bytes, lists, tuples, dicts, tensors); CPSR never pickles"
    )


def _encode_mapping(value: dict[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if type(value) is dict and all(type(key) is str for key in value) and _TAG not in value:
        return {key: _encode(item, f"{path}.{key}", tensors) for key, item in value.items()}
    pairs = [
        [_encode(key, f"{path}.{index}.key", tensors), _encode(item, f"{path}.{index}", tensors)]
        for index, (key, item) in enumerate(value.items())
    ]
    ordered = {"ordered": True} if type(value) is OrderedDict else {}
    return {_TAG: "dict", "pairs": pairs, **ordered}


def same(one: Any, other: Any) -> bool:
    """Whether two trees have the same plain data and, bit for bit, the same tensors."""
    (data, tensors), (other_data, other_tensors) = encode(one), encode(other)
    return (
        data == other_data
        and tensors.keys() == other_tensors.keys()
        and all(_same_bits(values, other_tensors[key]) for key, values in tensors.items())
    )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def decode(data: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Reverse `encode`.

    Raises:
        KeyError: `tensors` lacks a key that `data` refers to.
        ValueError: `data` has a tag that this version does not know.
    """
    if isinstance(data, list):
        return list(data) if _PLAIN.issuperset(map(type, data)) else [decode(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    tag = data.get(_TAG)
    if tag is None:
        return {key: decode(item, tensors) for key, item in data.items()}
    if tag == "tensor":
        return tensors[data["key"]]
    if tag == "array":
        return tensors[data["key"]].numpy()
    if tag == "tuple":
        return tuple(decode(data["items"], tensors))
    if tag == "dict":
        pairs = [(decode(key, tensors), decode(item, tensors)) for key, item in data["pairs"]]
        return OrderedDict(pairs) if data.get("ordered") else dict(pairs)
    if tag == "bytes":
        return base64.b64decode(data["data"])
    if tag == "scalar":
        return numpy.frombuffer(base64.b64decode(data["data"]), dtype=data["dtype"])[0]
    raise ValueError(f"unknown tag {tag!r} in saved data; it was written by a newer version")
