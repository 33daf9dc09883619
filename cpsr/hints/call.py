"""One call of a resumable function: what the rewritten function asks at its loops and hints."""

import builtins
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from itertools import chain
from time import perf_counter
from typing import Any

import numpy
import torch

from cpsr.errors import NotResumableError
from cpsr.hints.loaders import Pass
from cpsr.hints.placement import Pace
from cpsr.hints.resumable_checkpoints import Written
from cpsr.hints.source import FunctionSource
from cpsr.hints.values import Arguments, Encoder, restored
from cpsr.state.codec import encode

__all__ = ["Call"]

_SEQUENCES = (list, tuple, range, str, bytes, numpy.ndarray, torch.Tensor)


class Loop:
    """What a `for` loop with hints goes over: a sequence, which may change meanwhile.

    Args:
        source: the sequence.
        saved: what `saved` returned, to go on from; None: from its begin.

    Attributes:
        length: items in all when the loop began.
        position: number of the next item.
    """

    def __init__(self, source: Any, saved: int | None = None) -> None:
        self.source, self.length = source, len(source)
        self.position = saved or 0

    def saved(self) -> int:
        """Where it is."""
        return self.position

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                item = self.source[self.position]
            except IndexError:
                return
            self.position += 1
            yield item


class Call:
    """A call, from its begin or from a checkpoint.

    Args:
        source: of the function.
        arguments: of the call.
        save: copies one more checkpoint and begins to write it; returns what will say that it is written.
        pace: which hints are checkpoints.
        saved: content of the checkpoint to go on from; None: from the begin.

    Attributes:
        target: number of the hint to go on from, until the function has come there; else 0.
    """

    locals = staticmethod(builtins.locals)  # of the function that calls it

    def __init__(
        self,
        source: FunctionSource,
        arguments: Arguments,
        save: Callable[[Any], Future[Written]],
        pace: Pace,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self._source, self._arguments, self._save, self._pace = source, arguments, save, pace
        self._saved = saved
        self._checked: set[int] = set()
        self._loops: dict[int, Loop | Pass] = {}
        self._wanted = False
        self._writing: Future[Written] | None = None
        self._variables: dict[str, Any] = {}
        self.target = 0 if saved is None else int(saved["hint"])
        if saved is not None:
            value = restored(saved["graph"], arguments)
            self._variables = {name: value(one) for name, one in saved["variables"].items()}
            self._loops = {number: self._loop(value(source), at) for number, source, at in saved["loops"]}
            pace.learn(saved["cost_seconds"])

    def has(self, name: str) -> bool:
        """Whether a variable is restored."""
        return name in self._variables

    def restored(self, name: str) -> Any:
        """The value of a variable, once."""
        return self._variables.pop(name)

    def begin_loop(self, number: int, source: Any) -> None:
        """A loop with hints begins.

        Raises:
            NotResumableError: it cannot be begun in the middle; names its line and what it goes over.
        """
        around = self._source.loops_around[self._source.numbers([self._source.loops[number - 1]])[0]]
        outer = [self._loops[one].source for one in around if one < number]
        loader = self._arguments.loaders.get(id(source))
        if not isinstance(source, _SEQUENCES) and (loader is None or any(one is source for one in outer)):
            raise NotResumableError(
                f"{self._place(self._source.loops[number - 1])}: the loop over a {type(source).__qualname__} cannot "
                "begin in the middle; nothing was saved. Make a list of it, as with list(enumerate(...)). A DataLoader "
                "of torch or torchdata must be an argument, and no outer loop may go over the same one"
            )
        self._loops[number] = self._loop(source)

    def _loop(self, source: Any, saved: Any = None) -> Loop | Pass:
        loader = self._arguments.loaders.get(id(source))
        return Loop(source, saved) if loader is None else Pass(loader, saved)

    def items(self, number: int, first: int, last: int) -> Iterator[Any]:
        """What a loop goes over; where it goes on in its body, one item more, which is not used."""
        loop = self._loops[number]
        if not first <= self.target <= last:
            return iter(loop)
        return chain((None,), iter(loop))

    def due(self, hint: int) -> bool:
        """Whether `save` is to be called at this hint.

        Raises:
            SupersededError: a newer call has begun in the run directory.
        """
        now = perf_counter()
        self._settle(wait=False)
        around = self._source.loops_around[hint]
        loops = [(number, self._loops[number].position, self._loops[number].length) for number in around]
        if self.target:
            assert self.target == hint, (self.target, hint)
            assert self._saved is not None
            self.target = 0
            self._arguments.restore_random_states(self._saved["random"])
            self._saved = None
            self._pace.begin(loops)
            return False
        self._wanted = self._pace.due(loops, now)
        return self._wanted or (hint not in self._checked and self._pace.may_look())

    def save(self, hint: int, variables: dict[str, Any]) -> None:
        """Make a checkpoint; at the first arrival at a hint at least find out whether it is possible.

        Args:
            hint: its number.
            variables: of the function, by name.

        Raises:
            NotResumableError: a variable cannot be saved; names it, and the line.
        """
        started = perf_counter()
        try:
            content = self._content(hint, variables)
        except (NotResumableError, RecursionError) as error:
            why = "a value holds others too deep within each other" if isinstance(error, RecursionError) else error
            place = self._place(self._source.hints[hint - 1])
            raise NotResumableError(f"{place}: no checkpoint is possible at this hint: {why}") from None
        finally:
            variables.clear()  # Python keeps it with the function, and everything in it
        self._checked.add(hint)
        if self._wanted:
            self._writing = self._save(content)
            self._pace.copied(perf_counter() - started)
            self._settle(wait=self._pace.is_unlimited)
        else:
            _, tensors = encode(content)
            self._pace.looked(perf_counter() - started, sum(one.nbytes for one in tensors.values()))

    def _settle(self, *, wait: bool) -> None:
        """Take note of what the newest checkpoint took to write, if it is written; or wait for it."""
        if self._writing is not None and (wait or self._writing.done()):
            self._pace.written(*self._writing.result())
            self._writing = None

    def _content(self, hint: int, variables: Mapping[str, Any]) -> dict[str, Any]:
        encoder = Encoder(self._arguments)
        names = sorted(self._source.live[hint] & variables.keys())
        roots = {name: encoder.add(variables[name], f"the variable '{name}'") for name in names}
        loops = []
        for number in self._source.loops_around[hint]:
            loop, line = self._loops[number], self._source.loops[number - 1].lineno
            loops.append([number, encoder.add(loop.source, f"what the loop in line {line} goes over"), loop.saved()])
        self._arguments.require_inside([self._loops[number].source for number in self._source.loops_around[hint]])
        return {
            "hint": hint,
            "variables": roots,
            "loops": loops,
            "graph": encoder.graph(),
            "random": self._arguments.random_states(),
            "cost_seconds": self._pace.recent_seconds(),
        }

    def _place(self, node: Any) -> str:
        return f"{self._source.function.__code__.co_filename}:{node.lineno}"
