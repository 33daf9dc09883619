"""`@resumable`: a function that goes on after a kill from one of its hints."""

import ast
import dis
import functools
import hashlib
import inspect
import logging
import math
import platform
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Generic, ParamSpec, TypeVar

import numpy
import torch
from torch import nn

from cpsr.errors import ConfigError, NotResumableError
from cpsr.hints.call import Call
from cpsr.hints.placement import Pace
from cpsr.hints.resumable_checkpoints import KeptCheckpoints
from cpsr.hints.rewriting import rewritten
from cpsr.hints.source import FunctionSource, read_source
from cpsr.hints.values import Arguments

__all__ = ["Resumable", "resumable"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Of the allowance. The rest pays for what is not measured: at a hint the function may lose the interpreter to the
# thread that writes, and find its memory out of the processor's caches.
_PLANNED = 0.95
_CHANGEABLE = (
    *(list, dict, set, bytearray, torch.Tensor, numpy.ndarray, nn.Module, torch.optim.Optimizer, Iterator),
    *(torch.Generator, numpy.random.Generator, random.Random),
)
_running = threading.Lock()  # random states and checkpoints are of one call at a time
_log = logging.getLogger(__name__)


class Resumable(Generic[Parameters, Result]):
    """A function with hints; called like the function itself, which is its `__wrapped__`.

    Attributes:
        resumed_from: number of the checkpoint that the newest call went on from; None: it began anew.
    """

    def __init__(self, function: Callable[Parameters, Result], run_dir: Path, allowance: float) -> None:
        self._source = read_source(function)
        self._function = rewritten(self._source)
        self._signature = inspect.signature(function)
        self._run_dir, self._allowance = run_dir, allowance
        self.resumed_from: int | None = None
        functools.update_wrapper(self, function)

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """Call the function; go on from the newest checkpoint if an earlier call has not returned.

        Raises:
            NotResumableError: an argument, a global or a variable cannot be saved; names it. Or another call runs.
            RunMismatchError: the checkpoints are of other code, or of other arguments; nothing was changed.
            RunDirectoryError: the run directory cannot be written.
            SupersededError: a newer call has begun in the run directory.
        """
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if not _running.acquire(blocking=False):
            raise NotResumableError(
                f"{self._source.function.__qualname__} was called while another resumable function runs in this "
                "process: call the inner one without @resumable (its __wrapped__), or each in a process of its own"
            )
        try:
            return self._call(bound)
        finally:
            _running.release()

    def _call(self, bound: inspect.BoundArguments) -> Result:
        name = f"{self._source.function.__module__}.{self._source.function.__qualname__}"
        arguments = Arguments(bound.arguments)
        with KeptCheckpoints(self._run_dir, name, _identity(name, self._source, arguments)) as kept:
            self.resumed_from, saved = kept.newest() or (None, None)
            pace = Pace(_PLANNED * self._allowance, kept.first_seconds)
            call = Call(self._source, arguments, kept.save, pace, saved)
            if saved is not None:
                line = self._source.hints[call.target - 1].lineno
                _log.info("%s goes on from checkpoint %d, at the hint in line %d", name, self.resumed_from, line)
            result: Result = self._function(call, *bound.args, **bound.kwargs)
            kept.clear()
            return result


def resumable(
    run_dir: str | Path, allowance: float = 0.05
) -> Callable[[Callable[Parameters, Result]], Resumable[Parameters, Result]]:
    """Make a function with `hint()` in it go on after a kill, where it is called again with the same arguments.

    Args:
        run_dir: directory of its checkpoints, which no other function and no other call uses.
        allowance: time for checkpoints as a fraction of the function's own; `math.inf`: every hint is a checkpoint.

    Raises:
        ConfigError: the allowance is not positive.
        NotResumableError: the function could not go on after a kill; names the line and the feature.
    """
    if math.isnan(allowance) or allowance <= 0:
        raise ConfigError(f"allowance is {allowance}: give a positive fraction of the time, 0.05 say, or math.inf")
    return lambda function: Resumable(function, Path(run_dir).absolute(), allowance)


def _identity(name: str, source: FunctionSource, arguments: Arguments) -> dict[str, Any]:
    """What must be the same for a call to go on from a checkpoint; keys are words of a message.

    Raises:
        NotResumableError: the function, or one of its module that it uses, reads a global that a call could change.
    """
    code = "\n".join([ast.dump(source.tree), *sorted(_used(source.function, {}))])
    versions = [platform.python_version(), numpy.__version__, torch.__version__]
    identity = {
        "function": name,
        "its code, or that of its module that it uses": hashlib.sha256(code.encode()).hexdigest(),
        "the version of Python, NumPy or torch": versions,
        "the global random states at its begin": _random_states(),
    }
    return identity | {f"the argument '{one}'": digest for one, digest in arguments.identity.items()}


def _used(function: FunctionType, known: dict[str, str]) -> list[str]:
    """Text of every global that a function reads: functions and classes of its module, and constants."""
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        if name in known or value is None:
            continue
        if isinstance(value, _CHANGEABLE):
            raise NotResumableError(
                f"{function.__code__.co_filename}: {function.__qualname__} uses the global '{name}', a "
                f"{type(value).__qualname__}, of which no checkpoint knows: pass it as an argument"
            )
        if isinstance(value, FunctionType | type) and value.__module__ == function.__module__:
            known[name] = f"{name} {_text(value)}"
            for inner in [value] if isinstance(value, FunctionType) else vars(value).values():
                if isinstance(inner, FunctionType):
                    _used(inner, known)
        elif isinstance(value, int | float | str | bytes | tuple | frozenset):
            known[name] = f"{name} {value!r}"
    return list(known.values())


def _text(value: Any) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        return repr(value)


def _names(code: CodeType) -> set[str]:
    """Global names in code, and in functions and comprehensions within."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    own = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    return own.union(*map(_names, inner))


def _random_states() -> list[str]:
    """Hashes; but those without a seed or a draw, which differ from start to start, are all alike."""
    return ["as at the start" if now == then else now for now, then in zip(_hashes(), _AT_START, strict=True)]


def _hashes() -> list[str]:
    state: Any = numpy.random.get_state()
    drawn = [repr(random.getstate()).encode(), state[1].tobytes() + repr((state[0], *state[2:])).encode()]
    return [hashlib.sha256(one).hexdigest() for one in (*drawn, torch.get_rng_state().numpy().tobytes())]


_AT_START = _hashes()
