"""Functions from text, and calls of them that are interrupted at their checkpoints, kept in memory."""

import importlib.util
import itertools
import json
import math
import random
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader

from cpsr.errors import NotResumableError
from cpsr.hints.call import Call
from cpsr.hints.placement import Pace
from cpsr.hints.resumable_checkpoints import Written
from cpsr.hints.rewriting import rewritten
from cpsr.hints.source import read_source
from cpsr.hints.values import Arguments
from cpsr.state.codec import decode, encode
from cpsr.state.loader import ResumableLoader
from cpsr.state.user_objects import stateful

HEAD = """
import math, random
import numpy, torch
from cpsr.hints import hint
import cpsr.hints
"""

left = [10**9]  # steps until a program of a test ends as if it were killed

_count = itertools.count()


def module_of(directory: Path, text: str) -> ModuleType:
    """A module with this text behind the usual imports."""
    name = f"program_{next(_count)}"
    path = directory / f"{name}.py"
    path.write_text(HEAD + text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def seed() -> None:
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)


class Killed(BaseException):
    """Takes the place of a kill."""


class InMemory:
    """Keeps the newest checkpoint as a file would, and ends the call after so many."""

    def __init__(self, kill_after: int | None = None) -> None:
        self.kill_after, self.count = kill_after, 0
        self.text, self.tensors = "", {}  # type: ignore[var-annotated]

    def save(self, content: Any) -> "Future[Written]":
        if self.killed:  # a `finally` has put another exception, or a return, in the place of the kill
            raise Killed
        data, self.tensors = encode(content)
        self.text = json.dumps(data)
        self.count += 1
        if self.killed:
            raise Killed
        done: Future[Written] = Future()
        done.set_result(Written(0.0, 0.0))
        return done

    @property
    def killed(self) -> bool:
        """Whether the call has ended, as far as its checkpoints know."""
        return self.count == self.kill_after

    def newest(self) -> Any:
        return decode(json.loads(self.text), {name: one.clone() for name, one in self.tensors.items()})


class Program:
    """A function with hints, every one of which is a checkpoint."""

    def __init__(self, function: FunctionType) -> None:
        self.plain = function
        self.source = read_source(function)
        self.written = rewritten(self.source)

    def call(self, arguments: dict[str, Any], keeper: InMemory, saved: Any = None) -> Any:
        call = Call(self.source, Arguments(arguments), keeper.save, Pace(math.inf, 0.0), saved)
        return self.written(call, **arguments)

    def interrupted(self, given: Callable[[], dict[str, Any]]) -> int:
        """Interrupt a call after each of its checkpoints, go on from there, and compare; how many there were."""
        seed()
        arguments = given()
        wanted = outcome(lambda given: self.plain(**given), arguments), shown(arguments), states()
        for number in itertools.count(1):
            seed()
            keeper = InMemory(number)
            arguments = given()
            with suppress(Killed):
                found = outcome(partial(self.call, keeper=keeper), arguments), shown(arguments), states()
            if not keeper.killed:
                assert found[2] == wanted[2]
                assert repr(found[:2]) == repr(wanted[:2])
                return number - 1
            random.seed(9)
            arguments, saved = given(), keeper.newest()
            go_on = partial(self.call, keeper=InMemory(), saved=saved)
            found = outcome(go_on, arguments), shown(arguments), states()
            assert found[2] == wanted[2], number
            assert repr(found[:2]) == repr(wanted[:2]), number
        raise AssertionError


def outcome(function: Callable[[dict[str, Any]], Any], arguments: dict[str, Any]) -> Any:
    try:
        return function(arguments)
    except NotResumableError:
        raise
    except Exception as error:  # noqa: BLE001 - a program may end so
        return repr(error)


def shown(arguments: dict[str, Any]) -> Any:
    """Arguments with the states of their objects."""
    return {name: _shown(name, one) for name, one in arguments.items()}


def _shown(name: str, value: Any) -> Any:
    if isinstance(value, DataLoader | ResumableLoader):
        return _shown(name, value.generator), _shown(name, getattr(value.dataset, "generator", None))
    has_state = hasattr(value, "state_dict") or isinstance(value, torch.Generator)
    return stateful(name, value).state_dict() if has_state else value


def states() -> Any:
    """The random states: some thousand numbers, as bytes, since they are compared after each interruption."""
    numbers = numpy.random.get_state()[1].tobytes()  # type: ignore[index]
    return random.getstate(), numbers, torch.get_rng_state().numpy().tobytes()
