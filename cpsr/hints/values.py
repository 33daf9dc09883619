"""The values of a call that a checkpoint holds: variables, what loops go over, and what the call changed in arguments.

Variables are numbers, text, bytes, ranges, lists, tuples, dicts, contiguous tensors and arrays in host memory, freely
nested. Modules, optimizers, random generators and whatever else has `state_dict` and `load_state_dict` must be
arguments: the caller makes them again, and their state is restored in place. Everything else is refused by name.

An object that is an argument, or part of one, is saved as its number among these. Any other object is saved once, as a
node that all who hold it refer to. What would go on as a copy of something is refused by both names: tensors and arrays
that share memory, and what a module or another object with a state keeps, as the parameter groups of an optimizer.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy
import torch
import xxhash
from torch import nn

from cpsr.errors import NotResumableError, UnsupportedEngineError
from cpsr.hints.loaders import LoaderArgument, is_loader
from cpsr.state.codec import encode
from cpsr.state.host_random import capture_host_rng, restore_host_rng
from cpsr.state.shard import bytes_of
from cpsr.state.user_objects import stateful

__all__ = ["Arguments", "Encoder", "restored"]

_GENERATORS = (torch.Generator, numpy.random.Generator, random.Random)
_PLAIN = (type(None), bool, int, float, str, bytes)
_KEPT_MAX = 100_000  # objects that one keeps, which are looked at
_ARRAYS = (torch.Tensor, numpy.ndarray)
Array = torch.Tensor | numpy.ndarray[Any, Any]


@dataclass(frozen=True)
class _Part:
    """An argument, or something within one, that the call may change.

    Attributes:
        name: for messages.
        value: the object, which the caller has, too.
        before: how it was when the call began: a copy of a container; of a tensor or an array type, shape and a hash;
            None: an object with a state, which each checkpoint has.
    """

    name: str
    value: Any
    before: Any


class Arguments:
    """The arguments of a call, as they are when it begins.

    Args:
        values: by name.

    Attributes:
        identity: hash of each, by name: a call goes on only with the same ones.
        parts: every object within the arguments, in an order that is the same for the same arguments.
        numbers: of these, by `id`.
        loaders: those of them that are data loaders, by `id`; in the order of the arguments.

    Raises:
        NotResumableError: one cannot be saved, or not be told from another; names it.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.parts: list[_Part] = []
        self.numbers: dict[int, int] = {}
        self.loaders: dict[int, LoaderArgument] = {}
        self._passed: dict[int, str] = {}  # hash of what goes on from pass to pass, when the call began
        self.identity: dict[str, str] = {}
        for name, value in values.items():
            text = json.dumps(self._described(value, f"the argument '{name}'"))
            self.identity[name] = xxhash.xxh3_128(text.encode()).hexdigest()
        self._require_what_is_changed()

    def _described(self, value: Any, name: str) -> list[Any]:
        """What tells a value from another one; notes every object in it."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if type(value) in _PLAIN or isinstance(value, numpy.generic | range) or _is_fixed(value):
            return [kind, getattr(value, "__module__", ""), getattr(value, "__qualname__", repr(value))]
        if id(value) in self.numbers:
            return ["the same as", self.numbers[id(value)]]
        self.numbers[id(value)] = len(self.parts)
        if type(value) in (list, tuple, dict):
            self.parts.append(_Part(name, value, copy.copy(value)))
            pairs = value.items() if type(value) is dict else enumerate(value)
            return [kind, [[repr(key), self._described(one, f"{name}[{key!r}]")] for key, one in pairs]]
        if isinstance(value, _ARRAYS):
            _require_dense(value, name)
            found = _digest(_content(value), name)
            self.parts.append(_Part(name, value, (value.dtype, value.shape, found)))
            return [kind, found]
        if is_loader(value):
            self.loaders[id(value)] = loader = LoaderArgument(value, name)
            self._passed[id(value)] = _digest(loader.passed(), name)
            self.parts.append(_Part(name, value, None))
            return [kind, _digest(loader.identity(), name)]
        if not isinstance(value, _GENERATORS) and not _is_stateful(value):
            raise NotResumableError(f"{name} is a {type(value).__qualname__}, which no checkpoint can hold")
        for one in _registered(value) if isinstance(value, nn.Module) else ():
            if isinstance(one, torch.Tensor) and one.device.type != "cpu":
                raise NotResumableError(f"{name} has tensors on {one.device}: only host memory is saved")
        self.parts.append(_Part(name, value, None))
        return [kind, _digest(_state(value), name)]

    def _require_what_is_changed(self) -> None:
        """Refuse an optimizer, a schedule and the like whose tensors no argument has: they would not be saved."""
        modules = [part.value for part in self.parts if isinstance(part.value, nn.Module)]
        saved = {*self.numbers, *(id(one) for module in modules for one in _registered(module))}
        for part, one in self.kept():
            trained = isinstance(one, torch.Tensor) and one.is_leaf and one.requires_grad
            changes = isinstance(one, torch.optim.Optimizer) or (isinstance(one, nn.Module) and one.state_dict())
            if (trained or changes) and id(one) not in saved:
                raise NotResumableError(
                    f"{part.name} changes a {type(one).__qualname__} that is no argument, so that no checkpoint has "
                    "it: pass that as an argument, too"
                )

    def random_states(self) -> dict[str, Any]:
        """The global random states of this process, and those of loaders."""
        return {"host": capture_host_rng(), "loaders": [one.random_states() for one in self.loaders.values()]}

    def restore_random_states(self, states: Mapping[str, Any]) -> None:
        """Restore what `random_states` returned."""
        restore_host_rng(states["host"])
        for loader, state in zip(self.loaders.values(), states["loaders"], strict=True):
            loader.restore(state)

    def require_inside(self, sources: Sequence[Any]) -> None:
        """Refuse a hint outside a loop over a stream, or over data with a state, that has gone on since the begin.

        Args:
            sources: what the loops around the hint go over.
        """
        for number, loader in self.loaders.items():
            name = type(loader.given).__qualname__
            inside = any(one is loader.given for one in sources)
            if not inside and _digest(loader.passed(), name) != self._passed[number]:
                raise NotResumableError(
                    f"the position of the {name} between two passes is not known: move the hint into the loop over it"
                )

    def kept(self) -> Iterator[tuple[_Part, Any]]:
        """What objects with a state keep in their attributes, and these in theirs."""
        for part in self.parts:
            if part.before is None:
                for one in _kept_by(part.value):
                    yield part, one


class Encoder:
    """Encodes values that share objects, for one checkpoint.

    Args:
        arguments: of the call, whose objects are saved as their numbers.
    """

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._nodes: list[Any] = []
        self._index: dict[int, int] = {}  # by `id`
        self._alive: list[Any] = []  # or an id may become another object's
        self._kept: dict[int, str] = {}  # by `id`: whose it is
        self._extents: list[tuple[int, int, str, bool]] = []  # begins, ends, owners, and whether that is a variable
        for part, one in arguments.kept():
            self._alive.append(one)
            self._kept[id(one)] = part.name
            if isinstance(one, _ARRAYS):
                self._occupy(one, part.name)
        for part in arguments.parts:
            if isinstance(part.value, _ARRAYS):
                self._occupy(part.value, part.name)

    def add(self, value: Any, name: str) -> Any:
        """A value as plain data, to which `restored` gives it back.

        Raises:
            NotResumableError: it is of no kind that can be saved; says so of `name`.
        """
        if type(value) in _PLAIN or isinstance(value, numpy.generic):
            return {"value": value}
        if isinstance(value, range):
            return {"range": [value.start, value.stop, value.step]}
        if (number := self._arguments.numbers.get(id(value))) is not None:
            return {"argument": number}
        if (owner := self._kept.get(id(value))) is not None:
            raise NotResumableError(
                f"{name} is kept by {owner}, and would go on as a copy: take it from there again after the hint"
            )
        if (known := self._index.get(id(value))) is None:
            known = self._index[id(value)] = len(self._nodes)
            self._alive.append(value)
            self._nodes.append(None)
            self._nodes[known] = self._node(value, name)
        return {"node": known}

    def _node(self, value: Any, name: str) -> Any:
        if type(value) in (list, tuple):
            return {type(value).__name__: [self.add(one, name) for one in value]}
        if type(value) is dict:
            return {"dict": [[self.add(one, name) for one in pair] for pair in value.items()]}
        if type(value) not in (torch.Tensor, numpy.ndarray):
            raise NotResumableError(
                f"{name} is a {type(value).__qualname__}, which no checkpoint can hold: keep numbers, text, lists, "
                "tuples, dicts, tensors and arrays, and `del` what is not needed; pass modules, optimizers, generators "
                "as arguments"
            )
        _require_dense(value, name)
        if not (value.is_contiguous() if isinstance(value, torch.Tensor) else value.flags.c_contiguous):
            raise NotResumableError(f"{name} does not lie in memory in the order of its elements: copy it")
        self._occupy(value, name, is_variable=True)
        return {type(value).__name__: _content(value)}

    def _occupy(self, value: Array, name: str, *, is_variable: bool = False) -> None:
        """Note the memory of a tensor or an array, and of a gradient; of what is kept all that it is a view of."""
        if isinstance(value, numpy.ndarray):
            while not is_variable and isinstance(value.base, numpy.ndarray):
                value = value.base
            begin, size = value.__array_interface__["data"][0], value.nbytes
        elif value.device.type != "cpu" or value.layout != torch.strided:
            return
        elif is_variable:
            begin, size = value.data_ptr(), value.nbytes
        else:
            begin, size = value.untyped_storage().data_ptr(), value.untyped_storage().nbytes()
        self._extents.append((begin, begin + size, name, is_variable))
        if isinstance(value, torch.Tensor) and value.is_leaf and value.grad is not None:
            self._occupy(value.grad, f"the gradient of {name}", is_variable=is_variable)

    def graph(self) -> dict[str, Any]:
        """All nodes, and what the call has changed in its arguments, for `restored`.

        Raises:
            NotResumableError: a variable shares memory with something else, or a change cannot be saved.
        """
        changes = [
            [number, change]
            for number, part in enumerate(self._arguments.parts)
            if (change := self._change(part)) is not None
        ]
        self._require_apart()
        return {"nodes": self._nodes, "changes": changes}

    def _change(self, part: _Part) -> Any:
        value, name, before = part.value, part.name, part.before
        if id(value) in self._arguments.loaders:
            return None  # each loop has its pass
        if before is None:
            return _state(value)
        if isinstance(value, _ARRAYS):
            _require_dense(value, name)
            if (value.dtype, value.shape) != before[:2]:
                raise NotResumableError(f"{name} has been given another type or shape in place")
            return _content(value) if _digest(_content(value), name) != before[2] else None
        if isinstance(value, tuple) or _objects_in(value) == _objects_in(before):
            return None
        if isinstance(value, dict):
            return [[self.add(one, name) for one in pair] for pair in value.items()]
        return [self.add(one, name) for one in value]

    def _require_apart(self) -> None:
        reached = {True: (0, ""), False: (0, "")}  # by whether it is a variable's: where memory ends, and whose it is
        for begin, end, name, is_variable in sorted(self._extents):
            for others in (True, False) if is_variable else (True,):
                if begin < min(end, reached[others][0]):
                    one, other = (name, reached[others][1]) if is_variable else (reached[others][1], name)
                    raise NotResumableError(f"{one} shares memory with {other}: copy one of them")
            reached[is_variable] = max(reached[is_variable], (end, name))


def restored(graph: Mapping[str, Any], arguments: Arguments) -> Callable[[Any], Any]:
    """Restore what a call has changed in its arguments, in the caller's own objects.

    Args:
        graph: what `Encoder.graph` returned.
        arguments: of the call that goes on.

    Returns:
        Makes a value of what `Encoder.add` returned.
    """
    value = _Decoder(graph["nodes"], arguments).value
    for number, change in graph["changes"]:
        target = arguments.parts[number].value
        if isinstance(target, list):
            target[:] = map(value, change)
        elif isinstance(target, dict):
            pairs = [(value(key), value(one)) for key, one in change]
            target.clear()
            target.update(pairs)
        elif isinstance(target, numpy.ndarray):
            target[...] = change["data"]
        elif isinstance(target, torch.Tensor):
            with torch.no_grad():
                target.copy_(change["data"])
            target.requires_grad_(change["trained"]).grad = change["grad"]
        elif isinstance(target, nn.Module):
            _load_module(target, change)
        else:
            stateful("argument", target).load_state_dict(change)
    return value


class _Decoder:
    """Makes each object of a checkpoint once."""

    def __init__(self, nodes: list[Any], arguments: Arguments) -> None:
        self._nodes, self._arguments = nodes, arguments
        self._made: dict[int, Any] = {}

    def value(self, reference: Mapping[str, Any]) -> Any:
        """What `Encoder.add` was given."""
        ((kind, content),) = reference.items()
        if kind == "value":
            return content
        if kind == "range":
            return range(*content)
        if kind == "argument":
            return self._arguments.parts[content].value
        if content not in self._made:
            self._make(content, *next(iter(self._nodes[content].items())))
        return self._made[content]

    def _make(self, index: int, kind: str, content: Any) -> None:
        """A list or a dict is there before what it holds, which may be itself."""
        if kind == "list":
            made = self._made[index] = []
            made.extend(map(self.value, content))
        elif kind == "dict":
            table = self._made[index] = {}
            table.update((self.value(key), self.value(one)) for key, one in content)
        elif kind == "tuple":
            self._made[index] = tuple(map(self.value, content))
        elif kind == "ndarray":
            self._made[index] = content["data"].copy()
        else:
            tensor = self._made[index] = content["data"].clone().requires_grad_(content["trained"])
            tensor.grad = content["grad"]


def _is_stateful(value: Any) -> bool:
    """Whether it has `state_dict` and `load_state_dict`."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _is_fixed(value: Any) -> bool:
    """Whether it is a function, a class or a module of Python: nothing that a call changes."""
    if isinstance(value, FunctionType):
        return value.__closure__ is None
    if isinstance(value, BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, ModuleType)
    return isinstance(value, type | ModuleType | numpy.ufunc | torch.dtype | torch.device)


def _objects_in(container: Any) -> list[int]:
    """The `id` of each object in a list or a dict."""
    keys_and_values = [*container, *container.values()] if isinstance(container, dict) else container
    return list(map(id, keys_and_values))


def _require_dense(value: Array, name: str) -> None:
    """Refuse what is no dense tensor or array of numbers in host memory, or has a graph."""
    if isinstance(value, numpy.ndarray):
        if value.dtype.kind not in "biufc":
            raise NotResumableError(f"{name} is an array of {value.dtype}: keep a list")
    elif value.grad_fn is not None:
        raise NotResumableError(
            f"{name} has the graph of a backward: use it before the hint and `del` it, or detach() it"
        )
    elif value.device.type != "cpu" or value.layout != torch.strided or value.is_quantized or value.is_conj():
        raise NotResumableError(f"{name} is of {value.device}, {value.layout}: only dense host memory is saved")


def _content(value: Array) -> dict[str, Any]:
    """The elements of a tensor or array, and of a tensor whether it is trained, and its gradient."""
    if isinstance(value, numpy.ndarray):
        return {"data": value}
    gradient = value.grad if value.is_leaf else None
    return {"data": value.detach(), "grad": gradient, "trained": value.requires_grad}


def _digest(tree: Any, name: str) -> str:
    """Hash of plain data, tensors and arrays.

    Raises:
        NotResumableError: there is something else in it.
    """
    try:
        data, tensors = encode(tree)
    except (UnsupportedEngineError, RecursionError) as error:
        raise NotResumableError(f"{name} cannot be saved: {error}") from error
    found = xxhash.xxh3_128(json.dumps(data).encode())
    for key, one in tensors.items():
        found.update(f"{key} {one.dtype} {tuple(one.shape)}".encode())
        found.update(bytes_of(one).numpy().data)
    return found.hexdigest()


def _state(value: Any) -> Any:
    """Everything of an object with a state that changes; of a module also what `state_dict` leaves out."""
    if not isinstance(value, nn.Module):
        return stateful("argument", value).state_dict()
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
    while waiting and len(seen) < _KEPT_MAX:
        one = waiting.pop()
        if type(one) in _PLAIN or id(one) in seen or _is_fixed(one):
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, dict):
            waiting += [*islice(one, _KEPT_MAX), *islice(one.values(), _KEPT_MAX)]
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += islice(one, _KEPT_MAX)
        elif not isinstance(one, _ARRAYS):
            waiting.append(getattr(one, "__dict__", {}))
