"""Whether a checkpoint is of this code and these arguments."""

import ast
import hashlib
import platform
import random
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import numpy
import torch

from cpsr.hints.source import FunctionSource
from cpsr.hints.values import Arguments

__all__ = ["difference", "identity_of", "name_of"]

_WORDS = {
    "function": "the function",
    "layout": "the layout of checkpoints, which is of another version of CPSR",
    "code": "its code, or that of a function, a class or a value of its module that it uses",
    "python": "the version of Python",
    "numpy": "the version of NumPy",
    "torch": "the version of torch",
    "random": "the global random states at its begin: another seed, or another one of several calls",
}
_LAYOUT = 2  # of what a checkpoint holds
_HIDDEN = ("code", "random")  # whose values say nothing


def name_of(function: FunctionType) -> str:
    """Module and name."""
    return f"{function.__module__}.{function.__qualname__}"


def identity_of(source: FunctionSource, used: Mapping[str, str], arguments: Arguments) -> dict[str, Any]:
    """What must be the same for a call to go on from a checkpoint.

    Args:
        source: of the function.
        used: text of everything of its module that it uses, by name.
        arguments: of the call.
    """
    text = "\n".join([ast.dump(source.tree), *(f"{name} {one}" for name, one in sorted(used.items()))])
    return {
        "function": name_of(source.function),
        "layout": _LAYOUT,
        "code": hashlib.sha256(text.encode()).hexdigest(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
        "places": arguments.places,
        "random": _random_states(),
        "arguments": dict(arguments.identity),
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
    if saved.get("places") != here["places"]:
        return "which of the arguments are globals of its module, or hold some"
    return None
