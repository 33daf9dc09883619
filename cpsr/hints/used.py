"""What a function uses of its module, as text: to tell other code, and globals that a call has changed."""

import builtins
import datetime
import decimal
import dis
import enum
import fractions
import functools
import logging
import math
import pathlib
import re
import types
import typing
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from itertools import repeat
from operator import is_
from types import CodeType, FunctionType
from typing import Any

import numpy
import torch

from cpsr.errors import NotResumableError
from cpsr.hints.held import Held, slots_of
from cpsr.hints.memory import memory_text
from cpsr.hints.positions import is_iterator
from cpsr.hints.stateful import (
    CONSTANTS,
    GENERATORS,
    GLOBAL_GENERATORS,
    code_of,
    is_global_generator,
    is_stateful,
)

__all__ = ["Used"]

_WRITTEN = (  # what never changes, and is written the same in every process
    *(range, slice, re.Pattern, pathlib.PurePath, torch.dtype, torch.device, torch.Size, numpy.generic, numpy.dtype),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction),
    *(typing.TypeVar, typing.ParamSpec, types.GenericAlias, types.UnionType),
)
_MISSING = object()
_SKIPPED = ("_abc_impl",)  # of a class


class Used:
    """Functions, classes and other globals of its module that a function names, and what those name.

    Args:
        function: of which they are.

    Attributes:
        texts: what tells each from another one, by name, when the call begins.

    Raises:
        NotResumableError: one has a state that no checkpoint has, or cannot be described; names it.
    """

    def __init__(self, function: FunctionType) -> None:
        self._function = function
        self._walks = [_Walk([function])]
        self.texts = self._walks[0].found

    def watch(self, given: Iterable[Any]) -> None:
        """Watch the globals of functions that are arguments, as far as they can be described.

        Args:
            given: all objects of the arguments.
        """
        scopes: dict[int, list[FunctionType]] = {}
        for one in given:
            if isinstance(one, FunctionType):
                scopes.setdefault(id(one.__globals__), []).append(one)
        self._walks += [_Walk(functions, lenient=True) for functions in scopes.values()]

    def values(self, rewritten: FunctionType) -> dict[str, Any]:
        """What variables can be without that an argument holds it: by words for messages, alike in every process.

        Args:
            rewritten: the function that is run.
        """
        scope = self._function.__globals__
        found = {f"the global '{name}'": scope[name] for name in sorted(self.texts) if name in scope}
        codes = {name: one.__code__ for name, one in found.items() if isinstance(one, FunctionType)}
        codes["the function"] = rewritten.__code__
        found |= {f"the constants of {name}": tuple(_constants(code)) for name, code in codes.items()}
        return found | {"the global random generators": GLOBAL_GENERATORS, "not a number": (math.nan, numpy.nan)}

    def require_unchanged(self) -> None:
        """Refuse globals that the call has changed: a later one would begin without the change.

        Raises:
            NotResumableError: names it.
        """
        for place, walk in enumerate(self._walks):
            if walk.is_unchanged():
                continue
            self._walks[place] = again = walk.again()
            before, now = walk.found, again.found
            for name in [*before, *now]:
                if now.get(name) != before.get(name):
                    raise NotResumableError(
                        f"the call has changed the global '{name}', of which no checkpoint has the content: pass it as "
                        "an argument"
                    )


class _Walk:
    """Describes what functions of one module name, by text.

    Args:
        functions: of the module.
        lenient: what cannot be described is known by what it is.
    """

    def __init__(self, functions: Sequence[FunctionType], *, lenient: bool = False) -> None:
        self._functions, self._lenient = functions, lenient
        self._scope, self._inside = functions[0].__globals__, set(map(id, functions))
        self._user = functions[0]
        self._held = Held()  # everything that may change
        self._hashed: list[tuple[Any, Any]] = []  # memory, and its hash
        self.found: dict[str, str] = {}
        for function in functions:
            self._held.add(function)
            try:
                self._globals_of(function)
            except RecursionError:
                raise self._too_deep(function) from None
        self._held.remember()
        self._values = self._globals()

    def again(self) -> "_Walk":
        """The same, as it is now."""
        return _Walk(self._functions, lenient=self._lenient)

    def is_unchanged(self) -> bool:
        """Whether everything holds the very objects that it held; if not it may still be equal."""
        same = all(map(is_, self._globals(), self._values)) and self._held.is_unchanged()
        return same and all(memory_text(value) == before for value, before in self._hashed)

    def _globals(self) -> list[Any]:
        return list(map(self._scope.get, self.found, repeat(_MISSING)))

    def _too_deep(self, function: FunctionType) -> NotResumableError:
        code = function.__code__
        return NotResumableError(
            f"{code.co_filename}:{code.co_firstlineno}: {function.__qualname__} uses a global with values too deep "
            "within each other to be described: pass it as an argument. Nothing was run"
        )

    def _globals_of(self, function: FunctionType) -> None:
        user, self._user = self._user, function
        for name in sorted(_names(function.__code__)):
            if name in self.found or (name not in self._scope and hasattr(builtins, name)):
                continue
            self.found[name] = ""
            text = self._text(self._scope[name], name) if name in self._scope else "missing"
            self.found[name] = repr(text)
        self._user = user

    def _unknown(self, name: str, value: Any) -> Any:
        if self._lenient:
            return f"{type(value).__qualname__} {id(value)}"
        code = self._user.__code__
        raise NotResumableError(
            f"{code.co_filename}:{code.co_firstlineno}: {self._user.__qualname__} uses the global '{name}', a "
            f"{type(value).__name__}, whose state no checkpoint has: pass it as an argument, or let a function with "
            "functools.cache make it if it never changes. Nothing was run"
        )

    def _text(self, value: Any, name: str) -> Any:
        kind = type(value)
        if kind in CONSTANTS or isinstance(value, _WRITTEN) or kind.__module__ == "typing" or kind is object:
            return "object" if kind is object else f"{kind.__name__} {value!r}"
        if isinstance(value, types.ModuleType | logging.Logger):
            return f"{kind.__name__} {getattr(value, '__name__', None) or getattr(value, 'name', '')}"
        if is_global_generator(value):  # every checkpoint has its state
            return f"the global {kind.__name__}"
        if id(value) in self._inside:
            return "within itself"
        self._inside.add(id(value))
        self._held.add(value)
        try:
            return [kind.__qualname__, self._called(value, name) if callable(value) else self._content(value, name)]
        finally:
            if not isinstance(value, FunctionType | type):  # these are described once
                self._inside.discard(id(value))

    def _called(self, value: Any, name: str) -> Any:
        if isinstance(value, type):
            return self._class(value, name)
        if isinstance(value, functools.partial):
            return [self._text(one, name) for one in (value.func, value.args, value.keywords)]
        if isinstance(value, FunctionType) and value.__globals__ is self._scope:
            return self._function_text(value, name)
        if (wrapped := getattr(value, "__wrapped__", None)) is not None:
            return self._text(wrapped, name)
        if isinstance(value, FunctionType | numpy.ufunc):
            return f"{getattr(value, '__module__', '')}.{value.__name__}"
        owner = getattr(value, "__self__", None)
        if hasattr(value, "__self__"):
            known = owner is None or isinstance(owner, types.ModuleType | type)
            return [value.__name__, str(owner) if known else self._text(owner, name)]
        return self._content(value, name)

    def _function_text(self, value: FunctionType, name: str) -> Any:
        cells = [one.cell_contents for one in value.__closure__ or ()]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        inner = [self._text(one, f"{name}: {value.__name__}") for one in [*cells, *defaults]]
        self._globals_of(value)
        return [value.__qualname__, code_of(value), inner]

    def _class(self, value: type, name: str) -> Any:
        if value.__module__ != self._scope.get("__name__"):
            return f"{value.__module__}.{value.__qualname__}"
        is_enum = issubclass(value, enum.Enum)
        members = (
            [[one.name, self._text(one.value, name)] for one in vars(value)["_member_map_"].values()] if is_enum else []
        )
        for key, one in vars(value).items():
            if key in _SKIPPED or (is_enum and not isinstance(one, FunctionType)):
                continue
            members += [[key, self._text(part, f"{name}.{key}")] for part in _parts(key, one)]
        return [value.__qualname__, members, [self._text(one, name) for one in value.__mro__[1:]]]

    def _content(self, value: Any, name: str) -> Any:
        trained = isinstance(value, torch.Tensor) and value.requires_grad
        moves = isinstance(value, GENERATORS) or is_iterator(value) or hasattr(value, "__next__")
        if trained or moves or is_stateful(value):
            return self._unknown(name, value)
        if isinstance(value, list | tuple | deque):
            return [self._text(one, name) for one in value]
        if isinstance(value, set | frozenset):
            return sorted(repr(self._text(one, name)) for one in value)
        if isinstance(value, dict | types.MappingProxyType):
            return [[self._text(key, name), self._text(one, f"{name}[{key!s:.40}]")] for key, one in value.items()]
        if isinstance(value, enum.Enum):
            return f"{value.name} {value.value!r}"
        if (memory := memory_text(value)) is not None:
            self._hashed.append((value, memory))
            return memory
        own = type(value).__module__ == self._scope.get("__name__")
        if own or is_dataclass(value) or isinstance(value, Namespace | types.SimpleNamespace):
            slots = {key: getattr(value, key) for key in slots_of(type(value)) if hasattr(value, key)}
            state = slots | getattr(value, "__dict__", {})
            state = {key: one for key, one in state.items() if not key.startswith("__")}
            parts = [[key, self._text(one, f"{name}.{key}")] for key, one in state.items()]
            return [parts, self._text(type(value), name)]
        return self._unknown(name, value)


def _parts(key: str, value: Any) -> Iterator[Any]:
    """What is to be described of an attribute of a class."""
    if isinstance(value, property):
        yield from (one for one in (value.fget, value.fset, value.fdel) if one is not None)
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, functools.cached_property):
        yield value.func
    else:
        code = isinstance(value, FunctionType | type) or hasattr(value, "__wrapped__")
        if code or not (hasattr(type(value), "__get__") or key.startswith("__")):
            yield value


def _constants(code: CodeType) -> Iterator[Any]:
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _constants(one)
        else:
            yield one


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType) -> frozenset[str]:
    """Globals that a piece of code reads or writes."""
    wanted = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
    own = frozenset(one.argval for one in dis.get_instructions(code) if one.opname in wanted)
    return own.union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))
