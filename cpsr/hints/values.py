"""The values of a call that a checkpoint holds: variables, what loops go over, and what the call changed in arguments.

Values are numbers, text, bytes, ranges, lists, tuples, dicts, dense tensors and arrays in host memory, freely nested.
Modules, optimizers, random generators and whatever else has `state_dict` and `load_state_dict` must be arguments: the
caller makes them again, and their state is restored in place. Everything else is refused by name.

An object that is an argument, or part of one, is saved as the place where it is there. Any other object is saved once,
as a node that all who hold it refer to. What would go on as a copy of something is refused by both names: tensors and
arrays that share memory, and what a module or another object with a state keeps, as parameters, layers or the parameter
groups of an optimizer.
"""

import builtins
import json
import math
import random
from bisect import bisect, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy
import torch
import xxhash
from torch import nn

from cpsr.errors import NotResumableError, UnsupportedEngineError
from cpsr.state.codec import encode
from cpsr.state.stateful import Stateful, stateful

__all__ = ["Arguments", "Encoder", "decoded", "is_stateful"]

_GENERATORS = (torch.Generator, numpy.random.Generator, random.Random)
_LEAVES = (type(None), bool, int, float, complex, str, bytes)
_KEPT_MAX = 100_000  # objects that one keeps, which are looked at
Path = tuple[Any, ...]
Array = torch.Tensor | numpy.ndarray[Any, Any]


class _Memory:
    """Whose the memory of tensors and arrays is."""

    def __init__(self) -> None:
        self._claims: list[tuple[int, int, Any]] = []  # begins, ends, owners; in order, none over another

    def claim(self, extent: tuple[int, int], owner: Any) -> tuple[Any, int] | None:
        """Note an owner; if a part is another one's: that, and where its memory begins from there."""
        if (at := self._overlapping(*extent)) is not None:
            return self._claims[at][2], self._claims[at][0] - extent[0]
        self.keep(extent, owner)
        return None

    def keep(self, extent: tuple[int, int], owner: Any) -> None:
        """Note an owner, also of what others have."""
        begin, end = extent
        while (at := self._overlapping(begin, end)) is not None:
            other = self._claims.pop(at)
            begin, end = min(begin, other[0]), max(end, other[1])
        if begin < end:
            insort(self._claims, (begin, end, owner), key=lambda one: one[0])

    def _overlapping(self, begin: int, end: int) -> int | None:
        at = bisect(self._claims, begin, key=lambda one: one[0])
        near = range(max(0, at - 1), min(at + 1, len(self._claims)))
        return next((one for one in near if self._claims[one][0] < end and begin < self._claims[one][1]), None)


@dataclass(frozen=True)
class _Part:
    """An argument, or something within one, that the call may change.

    Attributes:
        path: the argument's name, then keys and indices.
        value: the object.
        before: how it was when the call began: a copy of a container; of a tensor its memory, shape and a hash; of an
            object with a state None.
    """

    path: Path
    value: Any
    before: Any


class Arguments:
    """The arguments of a call, as they are when it begins.

    Args:
        values: by name.

    Attributes:
        identity: hash of each, by name: a call goes on only with the same ones.
        places: of every object within the arguments, by its `id`: the path there.

    Raises:
        NotResumableError: one cannot be saved, or not be told from another; names it.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.places: dict[int, Path] = {}
        self._objects: dict[Path, Any] = {}  # by place, as the caller gave them; kept, or an id may go to another
        self._parts: list[_Part] = []
        self._attributes: dict[str, Any] = {}
        self.identity: dict[str, str] = {}
        self._memory = _Memory()
        for name, value in values.items():
            text = json.dumps(list(self._walk(value, (name,))), default=str)
            self.identity[name] = xxhash.xxh3_128(text.encode()).hexdigest()
        del self._memory
        modules = [part.value for part in self._parts if isinstance(part.value, nn.Module)]
        saved = {*self.places, *(id(one) for module in modules for one in _registered(module))}
        for part in self._parts:
            self._require_arguments(part, saved)

    def _walk(self, value: Any, path: Path) -> Iterator[Any]:
        """What tells a value from another one; notes every object in it."""
        if type(value) in _LEAVES or isinstance(value, numpy.generic | range):
            yield [type(value).__name__, repr(value)]
            return
        if id(value) in self.places:
            yield ["same as", self.places[id(value)]]
            return
        if _is_fixed(value):
            yield [type(value).__name__, getattr(value, "__module__", ""), getattr(value, "__qualname__", repr(value))]
            return
        self.places[id(value)], self._objects[path] = path, value
        yield f"{type(value).__module__}.{type(value).__qualname__}"
        if type(value) in (list, tuple, dict):
            self._parts.append(_Part(path, value, value if type(value) is tuple else value.copy()))
            for key, one in value.items() if type(value) is dict else enumerate(value):
                yield repr(key)
                yield from self._walk(one, (*path, key))
            return
        if isinstance(value, torch.Tensor | numpy.ndarray):
            extent, found = _extent(value, _said(path)), _digest(value, _said(path))
            self._parts.append(_Part(path, value, (extent, value.shape, found)))
            yield self._memory.claim(extent, path)
        else:
            found = self._state_of(value, path)
            self._parts.append(_Part(path, value, None))
        yield found

    def _state_of(self, value: Any, path: Path) -> str:
        """Hash of the state of an object."""
        if not isinstance(value, _GENERATORS) and not is_stateful(value):
            raise NotResumableError(f"{_said(path)} is a {type(value).__qualname__}, which no checkpoint can hold")
        if isinstance(value, nn.Module):
            for tensor in [*value.parameters(), *value.buffers()]:
                if tensor.device.type != "cpu":
                    raise NotResumableError(f"{_said(path)} has tensors on {tensor.device}: only host memory is saved")
            self._attributes[_said(path)] = _attributes(value)
        return _digest(_state(value), _said(path))

    def _require_arguments(self, part: _Part, saved: set[int]) -> None:
        """Refuse an optimizer, a schedule and the like whose tensors no argument has: they would not be saved."""
        for one in _kept_by(part.value) if part.before is None else ():
            trained = isinstance(one, torch.Tensor) and one.is_leaf and one.requires_grad
            if (trained or isinstance(one, nn.Module | torch.optim.Optimizer)) and id(one) not in saved:
                raise NotResumableError(
                    f"{_said(part.path)} changes a {type(one).__qualname__} that is no argument, so that no checkpoint "
                    "has it: pass that as an argument, too"
                )

    def at(self, path: Path) -> Any:
        """The object at a place, in the arguments as the caller gave them."""
        return self._objects[path]

    def kept(self) -> Iterator[tuple[str, Any]]:
        """Tensors and arrays among the arguments, what others keep, and gradients; with whose they are."""
        for part in self._parts:
            for one in _kept_by(part.value) if part.before is None else [part.value]:
                yield _said(part.path), one
                if isinstance(one, torch.Tensor) and one.is_leaf and one.grad is not None:
                    yield _said(part.path), one.grad

    def changes(self, encoder: "Encoder") -> list[Any]:
        """What the call has changed, as pairs of a path and the content.

        Raises:
            NotResumableError: a module was changed beside its state, or a content cannot be saved.
        """
        found: list[Any] = []
        for part in self._parts:
            value, name = part.value, _said(part.path)
            if isinstance(value, tuple):
                continue
            if isinstance(value, list) and not _alike(value, part.before):
                found.append([list(part.path), [encoder.add(one, name) for one in value]])
            elif isinstance(value, dict) and not _alike(_pairs(value), _pairs(part.before)):
                found.append([list(part.path), [[encoder.add(one, name) for one in pair] for pair in value.items()]])
            elif isinstance(value, torch.Tensor | numpy.ndarray):
                extent, shape, digest = part.before
                if (_extent(value, name), value.shape) != (extent, shape):
                    raise NotResumableError(f"{name} has been given another shape or other memory in place")
                if _digest(value, name) != digest:
                    found.append([list(part.path), _content(value)])
            elif part.before is None:
                found.append([list(part.path), _state(value)])
                if isinstance(value, nn.Module):
                    self._require_attributes(value, name)
        return found

    def _require_attributes(self, module: nn.Module, name: str) -> None:
        before, now = self._attributes[name], _attributes(module)
        if changed := sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key)):
            raise NotResumableError(f"the call has changed {name}.{changed[0]}, which its state_dict does not hold")

    def restore(self, changes: list[Any], nodes: "_Nodes") -> None:
        """Put the changed content into the caller's own objects."""
        targets = [(self.at(tuple(path)), content) for path, content in changes]
        for value, content in targets:
            if isinstance(value, list):
                value[:] = [nodes.get(one) for one in content]
            elif isinstance(value, dict):
                pairs = [(nodes.get(key), nodes.get(one)) for key, one in content]
                value.clear()
                value.update(pairs)
            elif isinstance(value, torch.Tensor):
                with torch.no_grad():
                    value.copy_(content["data"])
                value.requires_grad_(content["trained"]).grad = content["grad"]
            elif isinstance(value, numpy.ndarray):
                value[...] = content["data"]
            elif isinstance(value, nn.Module):
                _load_module(value, content)
            else:
                stateful("argument", value).load_state_dict(content)


class Encoder:
    """Encodes values that share objects, for one checkpoint.

    Args:
        arguments: of the call, whose objects are saved as their places.

    Attributes:
        nodes: plain data and tensors; each object once.
    """

    def __init__(self, arguments: Arguments) -> None:
        self.nodes: list[Any] = []
        self._places = arguments.places
        self._index: dict[int, int] = {}  # by `id`
        self._alive: list[Any] = []  # or an id may become another object's
        self._kept: dict[int, str] = {}  # by `id`: whose it is
        self._memory = _Memory()
        for owner, one in arguments.kept():
            self._alive.append(one)
            if isinstance(one, dict | list | set | nn.Module | torch.Tensor | numpy.ndarray):
                self._kept[id(one)] = owner
            if isinstance(one, numpy.ndarray) or (isinstance(one, torch.Tensor) and _is_dense(one)):
                self._memory.keep(_bounds(one), owner)

    def add(self, value: Any, name: str) -> Any:
        """A value as plain data that `_Nodes.get` takes.

        Raises:
            NotResumableError: it is of no kind that can be saved; says so of `name`.
        """
        if type(value) in _LEAVES and not isinstance(value, complex):
            return {"value": value}
        if isinstance(value, numpy.generic):
            return {"value": value}
        if isinstance(value, range):
            return {"range": [value.start, value.stop, value.step]}
        if (place := self._places.get(id(value))) is not None:
            return {"place": list(place)}
        if (owner := self._kept.get(id(value))) is not None:
            raise NotResumableError(
                f"{name} is kept by {owner}, and would go on as a copy: take it from there again after the hint"
            )
        if (known := self._index.get(id(value))) is not None:
            if self.nodes[known] is None:
                raise NotResumableError(f"{name} holds itself: no checkpoint can hold that")
            return {"node": known}
        index = self._index[id(value)] = len(self.nodes)
        self._alive.append(value)
        self.nodes.append(None)
        self.nodes[index] = self._node(value, name)
        return {"node": index}

    def _node(self, value: Any, name: str) -> Any:
        if type(value) in (list, tuple):
            return {type(value).__name__: [self.add(one, name) for one in value]}
        if type(value) is dict:
            return {"dict": [[self.add(one, name) for one in pair] for pair in value.items()]}
        if type(value) in (torch.Tensor, numpy.ndarray):
            return {type(value).__name__: self._tensor(value, name)}
        raise NotResumableError(
            f"{name} is a {type(value).__qualname__}, which no checkpoint can hold: keep numbers, text, lists, tuples, "
            "dicts, tensors and arrays, and `del` what is not needed; pass modules, optimizers, generators as arguments"
        )

    def _tensor(self, value: Array, name: str) -> dict[str, Any]:
        """Elements and strides of a tensor or an array, and of a tensor whether it is trained."""
        begin, end = _extent(value, name)
        if (known := self._memory.claim((begin, end), name)) is not None:
            raise NotResumableError(f"{name} shares memory with {known[0]}: copy one of them")
        if value.nbytes != end - begin or (isinstance(value, numpy.ndarray) and min(value.strides, default=0) < 0):
            raise NotResumableError(f"{name} is a view of a larger memory, or turned around: copy it")
        if isinstance(value, numpy.ndarray):
            return {"data": value, "strides": list(value.strides)}
        gradient = self.add(value.grad if value.is_leaf else None, f"the gradient of {name}")
        strides = list(value.stride())
        return {"data": value.detach(), "strides": strides, "trained": value.requires_grad, "grad": gradient}


class _Nodes:
    """The objects of a checkpoint, each made once."""

    def __init__(self, nodes: list[Any], arguments: Arguments) -> None:
        self._nodes, self._arguments = nodes, arguments
        self._made: dict[int, Any] = {}

    def get(self, reference: Mapping[str, Any]) -> Any:
        """What `Encoder.add` was given."""
        ((kind, content),) = reference.items()
        match kind:
            case "value":
                return content
            case "range":
                return range(*content)
            case "place":
                return self._arguments.at(tuple(content))
        if content not in self._made:
            ((kind, inner),) = self._nodes[content].items()
            self._made[content] = self._make(kind, inner)
        return self._made[content]

    def _make(self, kind: str, content: Any) -> Any:
        match kind:
            case "ndarray":
                data = content["data"]
                made = numpy.ndarray(data.shape, data.dtype, bytearray(data.nbytes), strides=content["strides"])
                made[...] = data
                return made
            case "Tensor":
                data = content["data"]
                value = torch.empty_strided(data.shape, content["strides"], dtype=data.dtype, device="cpu").copy_(data)
                value.requires_grad_(content["trained"]).grad = self.get(content["grad"])
                return value
            case "dict":
                return {self.get(key): self.get(one) for key, one in content}
        return (list if kind == "list" else tuple)(self.get(one) for one in content)


def decoded(nodes: list[Any], changes: list[Any], arguments: Arguments) -> Callable[[Any], Any]:
    """Restore what a call has changed in its arguments; returns what makes a value of what `Encoder.add` returned."""
    found = _Nodes(nodes, arguments)
    for index in range(len(nodes)):  # before an argument changes, and places in it with it
        found.get({"node": index})
    arguments.restore(changes, found)
    return found.get


def is_stateful(value: Any) -> bool:
    """Whether it has `state_dict` and `load_state_dict`."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _said(path: Path) -> str:
    first, *rest = path
    return f"the argument '{first}'" + "".join(f"[{one!r}]" for one in rest)


def _is_fixed(value: Any) -> bool:
    """Whether it is a function, a class or a module of Python: nothing that a call changes."""
    if isinstance(value, FunctionType):
        return value.__closure__ is None
    if isinstance(value, BuiltinFunctionType):
        return value.__self__ is None or value.__self__ is builtins or isinstance(value.__self__, ModuleType)
    return isinstance(value, type | ModuleType | numpy.ufunc | torch.dtype | torch.device)


def _alike(now: Any, before: Any) -> bool:
    """Whether a container holds the same objects, or equal numbers and texts, in the same order."""
    return len(now) == len(before) and all(
        one is other or (type(one) is type(other) and type(one) in _LEAVES and repr(one) == repr(other))
        for one, other in zip(now, before, strict=True)
    )


def _pairs(mapping: Mapping[Any, Any]) -> list[Any]:
    return [*mapping.keys(), *mapping.values()]


def _content(value: Array) -> dict[str, Any]:
    """The elements of a tensor or array, and of a tensor whether it is trained, and its gradient."""
    if isinstance(value, numpy.ndarray):
        return {"data": value}
    gradient = value.grad if value.is_leaf else None
    return {"data": value.detach(), "grad": gradient, "trained": value.requires_grad}


def _extent(value: Array, name: str) -> tuple[int, int]:
    """Where the memory of a tensor or an array begins and ends.

    Raises:
        NotResumableError: it is no dense tensor or array of numbers in host memory, or has a graph.
    """
    if isinstance(value, numpy.ndarray):
        if value.dtype.hasobject:
            raise NotResumableError(f"{name} is an array of {value.dtype}: keep a list")
    elif value.grad_fn is not None:
        raise NotResumableError(
            f"{name} has the graph of a backward: use it before the hint and `del` it, or detach() it"
        )
    elif not _is_dense(value):
        raise NotResumableError(f"{name} is of {value.device}, {value.layout}: only dense host memory is saved")
    return _bounds(value)


def _is_dense(value: torch.Tensor) -> bool:
    special = value.is_quantized or value.is_conj() or value.is_neg()
    return value.device.type == "cpu" and value.layout == torch.strided and not special


def _bounds(value: Array) -> tuple[int, int]:
    if isinstance(value, numpy.ndarray):
        begin, item, strides = value.__array_interface__["data"][0], value.itemsize, value.strides
    else:
        item = value.element_size()
        begin, strides = value.data_ptr(), tuple(item * stride for stride in value.stride())
    if not math.prod(value.shape):
        return 0, 0
    ways = [(size - 1) * stride for size, stride in zip(value.shape, strides, strict=True)]
    return begin + sum(min(0, way) for way in ways), begin + item + sum(max(0, way) for way in ways)


def _digest(tree: Any, name: str) -> str:
    """Hash of plain data, tensors and arrays.

    Raises:
        NotResumableError: there is something else in it.
    """
    if isinstance(tree, torch.Tensor | numpy.ndarray):
        tree = _content(tree)
    try:
        data, tensors = encode(tree)
    except (UnsupportedEngineError, RecursionError) as error:
        raise NotResumableError(f"{name} cannot be saved: {error}") from error
    found = xxhash.xxh3_128(json.dumps(data).encode())
    for key, one in tensors.items():
        found.update(f"{key} {one.dtype} {tuple(one.shape)}".encode())
        found.update(one.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _state(value: Any) -> Any:
    """Everything of an object with a state that changes; of a module also what `state_dict` leaves out."""
    if not isinstance(value, nn.Module):
        known: Stateful = stateful("argument", value)
        return known.state_dict()
    return {
        "state": dict(value.state_dict()),
        "buffers": dict(value.named_buffers()),
        "gradients": {name: one.grad for name, one in value.named_parameters()},
        "trained": [one.requires_grad for one in value.parameters()],
        "training": [one.training for one in value.modules()],
    }


def _load_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    module.load_state_dict(state["state"])
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(state["buffers"][name])
    for (name, parameter), trained in zip(module.named_parameters(), state["trained"], strict=True):
        parameter.requires_grad_(trained)
        parameter.grad = state["gradients"][name]
    for one, training in zip(module.modules(), state["training"], strict=True):
        one.training = training


def _registered(module: nn.Module) -> list[Any]:
    """What the state of a module covers: modules, parameters and buffers."""
    return [*module.modules(), *module.parameters(), *module.buffers()]


def _kept_by(value: Any) -> Iterator[Any]:
    """Containers, tensors and other objects that an object keeps in its attributes, and these in theirs."""
    seen: set[int] = {id(value)}
    waiting: list[Any] = [getattr(value, "__dict__", {})]
    if isinstance(value, nn.Module):
        waiting += _registered(value)
    while waiting and len(seen) < _KEPT_MAX:
        one = waiting.pop()
        if type(one) in _LEAVES or id(one) in seen or _is_fixed(one):
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, dict):
            waiting += [*islice(one, _KEPT_MAX), *islice(one.values(), _KEPT_MAX)]
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += islice(one, _KEPT_MAX)
        elif not isinstance(one, torch.Tensor | numpy.ndarray):
            waiting.append(getattr(one, "__dict__", {}))


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What modules hold beside parameters, buffers and modes: numbers and texts, hooks, names, and other objects."""
    found: dict[str, Any] = {}
    for name, one in module.named_modules():
        for key, value in vars(one).items():
            if key in ("_parameters", "_buffers"):
                kinds = [(one, tensor is not None and (tensor.dtype, tensor.shape)) for one, tensor in value.items()]
                found[f"{name}.{key}"] = kinds
            elif key != "training":
                found[f"{name}.{key}"] = _token(value)
    return found


def _token(value: Any) -> Any:
    """Something that differs when a value is changed or replaced: in containers, the objects in them count."""
    if type(value) in _LEAVES:
        return repr(value)
    if isinstance(value, dict):
        return [[_token(key), _token(one)] for key, one in value.items()]
    if isinstance(value, list | tuple | set):
        return [_token(one) for one in value]
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return id(value), _digest(value, "an attribute of a module")
    return id(value)
