"""Whether a checkpoint is of this code and these arguments."""

import ast
import dis
import hashlib
import platform
import random
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import numpy
import torch

from cpsr.errors import NotResumableError
from cpsr.hints.positions import is_iterator
from cpsr.hints.source import FunctionSource
from cpsr.hints.stateful import CONSTANTS, code_of, is_stateful
from cpsr.hints.values import GENERATORS

__all__ = ["difference", "identity_of", "name_of"]

_WORDS = {
    "function": "the function",
    "code": "its code, or that of a function, a class or a constant of its module that it uses",
    "python": "the version of Python",
    "numpy": "the version of NumPy",
    "torch": "the version of torch",
    "random": "the global random states at its begin: another seed, or another one of several calls",
}
_HIDDEN = ("code", "random")  # whose values say nothing


def name_of(function: FunctionType) -> str:
    """Module and name."""
    return f"{function.__module__}.{function.__qualname__}"


def identity_of(source: FunctionSource, arguments: Mapping[str, str]) -> dict[str, Any]:
    """What must be the same for a call to go on from a checkpoint.

    Args:
        source: of the function.
        arguments: hash of each, by name.

    Raises:
        NotResumableError: it uses a global with a state of its own; names it.
    """
    used = sorted(set(_used(source.function, set())))
    text = "\n".join([ast.dump(source.tree), *used])
    return {
        "function": name_of(source.function),
        "code": hashlib.sha256(text.encode()).hexdigest(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
        "random": _random_states(),
        "arguments": dict(arguments),
    }


def _random_states() -> list[str]:
    """Hashes; but those without a seed or a draw, which differ from start to start, are all alike."""
    states = _hashes()
    return ["as at the start" if now == then else now for now, then in zip(states, _AT_START, strict=True)]


def _hashes() -> list[str]:
    state: Any = numpy.random.get_state()
    drawn = [repr(random.getstate()).encode(), state[1].tobytes() + repr((state[0], *state[2:])).encode()]
    return [hashlib.sha256(one).hexdigest() for one in (*drawn, torch.get_rng_state().numpy().tobytes())]


_AT_START = _hashes()


def difference(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """In words, the first thing that differs; None if all is the same."""
    for key, words in _WORDS.items():
        if saved.get(key) != here[key]:
            values = "" if key in _HIDDEN else f" ({saved.get(key)} there, {here[key]} here)"
            return f"{words}{values}"
    before = saved.get("arguments", {})
    for name in [*here["arguments"], *before]:
        if before.get(name) != here["arguments"].get(name):
            return f"the argument '{name}'"
    return None


def _used(function: FunctionType, seen: set[int]) -> Iterator[str]:
    """Functions, classes and constants of its module that a function names, and what those name, as text."""
    if id(function) in seen:
        return
    seen.add(id(function))
    for name in sorted(_names(function.__code__)):
        value = function.__globals__.get(name)
        _refuse_state(function, name, value)
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            yield f"{name} {code_of(value)}"
            yield from _used(value, seen)
        elif isinstance(value, type) and value.__module__ == function.__module__:
            for key, method in vars(value).items():
                if isinstance(method, FunctionType):
                    yield f"{name}.{key} {code_of(method)}"
                    yield from _used(method, seen)
        elif type(value) in CONSTANTS and name in function.__globals__:
            yield f"{name} {value!r}"


def _refuse_state(function: FunctionType, name: str, value: Any) -> None:
    """A state in a global would go on from where the process began, not from the checkpoint."""
    is_trained = isinstance(value, torch.Tensor) and value.requires_grad
    if isinstance(value, GENERATORS) or is_iterator(value) or is_trained or is_stateful(value):
        code = function.__code__
        raise NotResumableError(
            f"{code.co_filename}:{code.co_firstlineno}: {function.__qualname__} uses the global '{name}', a "
            f"{type(value).__name__}, whose state no checkpoint has: pass it as an argument. Nothing was run"
        )


def _names(code: CodeType) -> set[str]:
    """Globals that a piece of code reads."""
    own = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))
