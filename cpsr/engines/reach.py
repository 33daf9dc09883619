"""What the code of a model can reach beside what a repeated step brings back: state of hooks, closures and objects."""

import array
import collections
import itertools
import operator
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy
import torch
import xxhash

from cpsr.engines.module_attributes import attributes_of, is_container
from cpsr.state.shard import bytes_of
from cpsr.state.user_objects import GENERATORS, is_users, is_users_file, stateful

__all__ = ["Reach"]

DEPTH_MAX = 8
OBJECTS_MAX = 50_000
ELEMENTS_MAX = 1000  # of one container; of a longer one the first and the last count
HASHED_BYTES_MAX = 1 << 20  # of one tensor; of a larger one torch's count of changes
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_BYTES = (numpy.ndarray, array.array, bytearray)
_DICTIONARIES = (dict, types.MappingProxyType)  # of other mappings each look at an item may be work
_CONTAINERS = (*_DICTIONARIES, list, tuple, set, frozenset, collections.deque)
# What objects of these keep is the engine's, or follows the steps of the training, and no forward computes with it.
_KNOWN = {"torch", "deepspeed", "cpsr", "transformers", "accelerate", "lightning", "pytorch_lightning", "peft"}
_KNOWN |= {"logging", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "weakref", "re", "io", "_io"}
_KNOWN |= {"socket", "subprocess", "types", "builtins"}
_HOOKS = [name for name in vars(torch.nn.Module()) if name.endswith("_hooks")]
_OF_PARAMETERS = "_backward_hooks", "_post_accumulate_grad_hooks"


class Reach:
    """Fingerprints of the values that forward and backward of a module can reach, and that nobody brings back.

    Searched are the user's own code and objects: from the modules' attributes, their classes and their hooks, through
    closures, the global variables that a function names, and the attributes of objects.

    Args:
        module: the model. Its parameters, buffers and plain attributes come back (`ModuleAttributes`).
        saved: other objects that come back.

    Attributes:
        found: name -> what changes with the value.
    """

    def __init__(self, module: torch.nn.Module, saved: Sequence[Any] = ()) -> None:
        self.found: dict[str, Any] = {}
        modules = list(module.modules())
        self._seen = {id(one): one for one in [*saved, *modules, *module.parameters(), *module.buffers()]}
        for one in modules:
            name = type(one).__name__
            self._mapping(f"{name}.", attributes_of(one), DEPTH_MAX, comes_back=True)
        for one in modules:
            name = type(one).__name__
            self._class(name, type(one), DEPTH_MAX)
            for kind in _HOOKS:
                self._mapping(f"a hook of {name}", getattr(one, kind), DEPTH_MAX, named=False)
        for name, parameter in module.named_parameters():
            for kind in _OF_PARAMETERS:
                self._mapping(f"a hook of {name}", getattr(parameter, kind, None) or {}, DEPTH_MAX, named=False)

    def changed(self, since: "Reach") -> str | None:
        """The name of the first value that is another one than it was then; None: there is none."""
        return next((name for name, value in self.found.items() if since.found.get(name, value) != value), None)

    def _value(self, name: str, value: Any, depth: int, *, comes_back: bool = False) -> None:
        if isinstance(value, _PLAIN):
            if not comes_back:
                self._note(name, repr(value))  # a NaN is not equal to itself
            return
        if id(value) in self._seen or depth < 0 or len(self._seen) > OBJECTS_MAX:
            return
        self._seen[id(value)] = value  # also keeps it: no other object gets its id
        if isinstance(value, (torch.Tensor, *_BYTES, *GENERATORS)):
            if not comes_back:
                self._note(name, _bits(value))
        elif isinstance(value, _CONTAINERS):
            self._container(name, value, depth - 1, comes_back=comes_back and is_container(value))
        elif isinstance(value, _FUNCTIONS) or (callable(value) and not hasattr(value, "__dict__")):
            self._function(name, value, depth - 1)
        elif isinstance(value, type):
            self._class(name, value, depth - 1)
        elif hasattr(type(value), "__next__"):
            self._note(name, _position(value))
        else:
            self._object(name, value, depth - 1)

    def _container(self, name: str, value: Any, depth: int, *, comes_back: bool) -> None:
        if not comes_back:
            self._note(f"len({name})", len(value))
        items = value if isinstance(value, _DICTIONARIES) else _elements(value)
        self._mapping(f"{name}.", items, depth, comes_back=comes_back)

    def _note(self, name: str, value: Any) -> None:
        while name in self.found:
            name += "'"
        self.found[name] = value

    def _mapping(
        self, prefix: str, values: Mapping[Any, Any], depth: int, *, comes_back: bool = False, named: bool = True
    ) -> None:
        for index, (key, value) in enumerate(islice(values.items(), ELEMENTS_MAX)):
            label = key if isinstance(key, str | int) else index
            self._value(f"{prefix}{label}" if named else prefix, value, depth, comes_back=comes_back)

    def _object(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, torch.nn.Module):
            self._mapping(f"{name}.", {**dict(value.named_parameters()), **dict(value.named_buffers())}, depth)
            self._mapping(f"{name}.", attributes_of(value), depth)
            return
        if type(value).__module__.partition(".")[0] in _KNOWN:
            return
        slots = {slot: getattr(value, slot) for slot in getattr(type(value), "__slots__", ()) if hasattr(value, slot)}
        self._mapping(f"{name}.", {**slots, **getattr(value, "__dict__", {})}, depth)
        self._class(type(value).__name__, type(value), depth)
        if callable(value):
            self._function(name, type(value).__call__, depth)

    def _class(self, name: str, kind: type, depth: int) -> None:
        for one in kind.__mro__:
            if not is_users(one) or id(one) in self._seen:
                continue
            self._seen[id(one)] = one
            plain = {key: value for key, value in vars(one).items() if not key.startswith("__")}
            self._mapping(f"{name}.", plain, depth)
            for key in ("__init__", "__call__"):
                self._value(f"{name}.{key}", vars(one).get(key), depth)

    def _function(self, name: str, given: Any, depth: int) -> None:
        """A function of the user's, a method, or what wraps one."""
        if isinstance(given, partial):
            self._mapping(f"{name}.", dict(enumerate((given.func, *given.args))) | given.keywords, depth)
            return
        owner = getattr(given, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            self._value(f"{name}.self", owner, depth)
        given = getattr(given, "__func__", given)
        given = getattr(given, "fget", given)
        if (wrapped := getattr(given, "__wrapped__", None)) is not None:
            self._value(name, wrapped, depth)
        code = getattr(given, "__code__", None)
        if code is None or not is_users(given):
            return
        for key, cell in zip(code.co_freevars, given.__closure__ or (), strict=True):
            try:
                self._value(key, cell.cell_contents, depth)
            except ValueError:  # not filled yet
                continue
        self._mapping(f"{name}.", dict(enumerate(given.__defaults__ or ())), depth)
        names = set(_names(code))
        for key in names & given.__globals__.keys():
            value = given.__globals__[key]
            if isinstance(value, types.ModuleType):
                if is_users_file(getattr(value, "__file__", None) or "<built in>"):
                    self._mapping(f"{key}.", {one: vars(value)[one] for one in names & vars(value).keys()}, depth)
            else:
                self._value(key, value, depth)


_FUNCTIONS = (
    types.FunctionType, types.MethodType, partial, property, staticmethod, classmethod, types.BuiltinFunctionType,
)  # fmt: skip


def _bits(value: Any) -> Any:
    """What changes with the content of a tensor, an array or a generator."""
    if isinstance(value, torch.Generator):
        return _bits(value.get_state())
    if isinstance(value, GENERATORS):
        return str(stateful("a generator", value).state_dict())
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta or value.nbytes > HASHED_BYTES_MAX:
            return value.data_ptr() if value.layout is torch.strided else id(value), value._version
        return tuple(value.shape), xxhash.xxh3_128_hexdigest(bytes_of(value).cpu().numpy().data)
    if isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        return id(value)
    elements = numpy.asarray(value).reshape(-1)
    sampled = elements[:: 1 + elements.nbytes // HASHED_BYTES_MAX]
    return elements.size, xxhash.xxh3_128_hexdigest(numpy.ascontiguousarray(sampled).tobytes())


def _position(value: Any) -> Any:
    """What changes when an iterator moves; of most kinds that cannot be told, and each is another one at each look."""
    if isinstance(value, itertools.count):
        return repr(value)
    hint = operator.length_hint(value, -1)
    return object() if hint < 0 else hint


def _elements(value: Any) -> dict[str, Any]:
    if isinstance(value, set | frozenset):
        return {"elements": str(sorted(map(repr, islice(value, ELEMENTS_MAX))))}
    last = {"-1": value[-1]} if len(value) > ELEMENTS_MAX else {}
    return {**{str(index): one for index, one in enumerate(islice(value, ELEMENTS_MAX - 1))}, **last}


def _names(code: types.CodeType) -> Iterator[str]:
    """The names of global variables and attributes that a function uses, and those inside it."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _names(one)
