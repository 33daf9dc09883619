"""The values of a call that a checkpoint holds: variables, what loops go over, and what the call changed in arguments.

Values are numbers, text, bytes, ranges, lists, tuples, dicts, dense tensors and arrays in host memory, freely nested.
Modules, optimizers, random generators and whatever else has `state_dict` and `load_state_dict` must be arguments: the
caller makes them again, and their state is restored in place. Everything else is refused by name.

An object that is an argument, or part of one, is saved as the place where it is there. Any other object is saved once,
as a node that all who hold it refer to.
"""

import builtins
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
Path = tuple[Any, ...]


@dataclass(frozen=True)
class _Part:
    """An argument, or something within one, that the call may change.

    Attributes:
        path: the argument's name, then keys and indices.
        value: the object.
        before: how it was when the call began: a copy of a container, or a hash.
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
        self.identity = {}
        for name, value in values.items():
            text = json.dumps(list(self._walk(value, (name,))), default=str)
            self.identity[name] = xxhash.xxh3_128(text.encode()).hexdigest()

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
        self._note(value, path)
        yield f"{type(value).__module__}.{type(value).__qualname__}"
        if type(value) in (list, tuple, dict):
            self._parts.append(_Part(path, value, value if type(value) is tuple else value.copy()))
            for key, one in value.items() if type(value) is dict else enumerate(value):
                yield repr(key)
                yield from self._walk(one, (*path, key))
        else:
            before = self._tensor_or_state(value, path)
            self._parts.append(_Part(path, value, before if isinstance(value, torch.Tensor | numpy.ndarray) else None))
            yield before

    def _tensor_or_state(self, value: Any, path: Path) -> str:
        """Hash of what it holds."""
        if isinstance(value, torch.Tensor | numpy.ndarray):
            return _digest(value, _said(path))
        if not isinstance(value, _GENERATORS) and not is_stateful(value):
            raise NotResumableError(f"{_said(path)} is a {type(value).__qualname__}, which no checkpoint can hold")
        if isinstance(value, nn.Module):
            self._note_module(value, path)
        return _digest(_state(value), _said(path))

    def _note(self, value: Any, path: Path) -> None:
        if id(value) not in self.places:
            self.places[id(value)] = path
            self._objects[path] = value

    def _note_module(self, module: nn.Module, path: Path) -> None:
        for name, one in module.named_modules():
            self._note(one, (*path, ("module", name)))
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.device.type != "cpu":
                raise NotResumableError(f"{_said(path)} has tensors on {tensor.device}: only host memory is saved")
            self._note(tensor, (*path, ("tensor", name)))
        self._attributes[_said(path)] = _attributes(module)

    def at(self, path: Path) -> Any:
        """The object at a place, in the arguments as the caller gave them."""
        return self._objects[path]

    def tensors(self) -> Iterator[tuple[Path, torch.Tensor | numpy.ndarray[Any, Any]]]:
        """Every tensor and array within the arguments, parameters and buffers of modules as well."""
        return ((path, one) for path, one in self._objects.items() if isinstance(one, torch.Tensor | numpy.ndarray))

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
            elif isinstance(value, torch.Tensor | numpy.ndarray) and _digest(value, name) != part.before:
                found.append([list(part.path), _content(value, name)])
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
                value.grad = content["grad"]
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
        self._arguments = arguments
        self._index: dict[int, int] = {}  # by `id`
        self._alive: list[Any] = []  # or an id may become another object's
        self.nodes: list[Any] = []
        self._memory: dict[int, Any] = {}  # address of tensors' and arrays' memory -> who has it: a node, or a place
        for path, value in arguments.tensors():
            self._memory.setdefault(_flat(value, _said(path))[0], {"place": list(path)})

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
        if (place := self._arguments.places.get(id(value))) is not None:
            return {"place": list(place)}
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
            return {type(value).__name__: self._view(value, name)}
        raise NotResumableError(
            f"{name} is a {type(value).__qualname__}, which no checkpoint can hold: keep numbers, text, lists, tuples, "
            "dicts, tensors and arrays; pass modules, optimizers and generators as arguments"
        )

    def _view(self, value: torch.Tensor | numpy.ndarray[Any, Any], name: str) -> dict[str, Any]:
        """A tensor or an array as a view of its memory, which others may share."""
        address, memory = _flat(value, name)
        if address not in self._memory:
            self._memory[address] = {"node": len(self.nodes)}
            self.nodes.append({"memory": memory})
        view = {"memory": self._memory[address], "shape": list(value.shape)}
        if isinstance(value, numpy.ndarray):
            offset = value.__array_interface__["data"][0] - address if value.size else 0
            return view | {"dtype": value.dtype.str, "strides": list(value.strides), "offset": offset}
        view |= {"dtype": str(value.dtype).removeprefix("torch."), "strides": list(value.stride())}
        gradient = self.add(value.grad if value.is_leaf else None, f"the gradient of {name}")
        return view | {"offset": value.storage_offset(), "trained": value.requires_grad, "grad": gradient}


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
            case "memory":
                return content.clone()
            case "Tensor" | "ndarray":
                return self._tensor(kind, content)
            case "dict":
                return {self.get(key): self.get(one) for key, one in content}
        return (list if kind == "list" else tuple)(self.get(one) for one in content)

    def _tensor(self, kind: str, content: Any) -> Any:
        memory = self.get(content["memory"])
        if "place" in content["memory"]:
            _, memory = _flat(memory, "an argument")
        if kind == "ndarray":
            given = content["shape"], content["dtype"], memory.numpy().data, content["offset"], content["strides"]
            return numpy.ndarray(*given)
        value = torch.empty(0, dtype=getattr(torch, content["dtype"]), device="cpu")
        value.set_(memory.untyped_storage(), content["offset"], content["shape"], content["strides"])
        value.requires_grad_(content["trained"]).grad = self.get(content["grad"])
        return value


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


def _content(value: torch.Tensor | numpy.ndarray[Any, Any], name: str) -> dict[str, Any]:
    """The elements of a tensor or array, and a tensor's gradient."""
    _flat(value, name)  # or it is refused
    if isinstance(value, numpy.ndarray):
        return {"data": value}
    return {"data": value.detach(), "grad": value.grad if value.is_leaf else None}


def _flat(value: torch.Tensor | numpy.ndarray[Any, Any], name: str) -> tuple[int, torch.Tensor]:
    """Address and bytes of all the memory that a tensor or an array has, perhaps with others.

    Raises:
        NotResumableError: it is more than a view of host memory, or the memory belongs to something else.
    """
    if isinstance(value, numpy.ndarray):
        root: Any = value
        while isinstance(root.base, numpy.ndarray):
            root = root.base
        if isinstance(root.base, torch.Tensor):
            return _flat(root.base, name)
        if value.dtype.hasobject or root.base is not None or not (root.flags.c_contiguous or root.flags.f_contiguous):
            raise NotResumableError(f"{name} is an array of {value.dtype} whose memory is not its own: copy() it")
        data = root.reshape(-1, order="A").view(numpy.uint8) if root.size else numpy.zeros(0, numpy.uint8)
        return root.__array_interface__["data"][0] if root.size else -id(root), torch.from_numpy(data)
    if value.grad_fn is not None:
        raise NotResumableError(f"{name} has the graph of a backward: use it before the hint, or detach() it")
    special = value.is_quantized or value.is_conj() or value.is_neg()
    if value.device.type != "cpu" or value.layout != torch.strided or special:
        raise NotResumableError(f"{name} is of {value.device}, {value.layout}: only dense host memory is saved")
    storage = value.untyped_storage()
    return storage.data_ptr() or -id(value), torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _digest(tree: Any, name: str) -> str:
    """Hash of plain data, tensors and arrays.

    Raises:
        NotResumableError: there is something else in it.
    """
    if isinstance(tree, torch.Tensor | numpy.ndarray):
        tree = _content(tree, name)
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


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What modules hold beside parameters, buffers and modes: numbers and texts, hooks, names, and other objects."""
    found: dict[str, Any] = {}
    for name, one in module.named_modules():
        for key, value in vars(one).items():
            if key in ("_parameters", "_buffers", "_modules"):
                found[f"{name}.{key}"] = list(value)
            elif key != "training":
                found[f"{name}.{key}"] = _token(value)
        for key, tensor in one.named_parameters(recurse=False):
            found[f"{name}.{key}"] = (tensor.dtype, tuple(tensor.shape))
    return found


def _token(value: Any) -> Any:
    """Something that differs when a value is changed or replaced: in containers, the objects in them count."""
    if type(value) in _LEAVES:
        return repr(value)
    if isinstance(value, dict):
        return [[_token(key), _token(one)] for key, one in value.items()]
    if isinstance(value, list | tuple | set):
        return [_token(one) for one in value]
    return id(value)
