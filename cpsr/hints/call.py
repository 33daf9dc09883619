"""One call of a resumable function: what the rewritten function asks at its loops and hints."""

import builtins
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from operator import length_hint
from time import perf_counter
from typing import Any, Protocol

from cpsr.errors import NotResumableError
from cpsr.hints.liveness import Liveness
from cpsr.hints.pace import Pace
from cpsr.hints.positions import one_way, positions_of
from cpsr.hints.restoring import restored
from cpsr.hints.settings import require_unchanged, settings_of_blocks, settings_of_process
from cpsr.hints.source import FunctionSource
from cpsr.hints.values import Arguments, Encoder
from cpsr.state.scalars import capture_host_rng, restore_host_rng

__all__ = ["Call", "Keeper"]

_log = logging.getLogger(__name__)


class Keeper(Protocol):
    """Keeps checkpoints."""

    def save(self, content: Any) -> bool:
        """Keep one more; whether it is safe now."""


class Call:
    """A call, from its begin or from a checkpoint.

    Args:
        source: of the function.
        live: what is saved at each hint.
        arguments: of the call.
        keeper: of its checkpoints.
        pace: which hints are checkpoints.
        saved: content of the checkpoint to go on from; None: from the begin.
        identity: of code and arguments, for the checkpoints; raises where the call has changed a global.

    Attributes:
        target: number of the hint to go on from, until the function has come there; else 0.
    """

    locals = staticmethod(builtins.locals)  # of the function that calls it
    view = staticmethod(positions_of)

    def __init__(
        self,
        source: FunctionSource,
        live: Liveness,
        arguments: Arguments,
        keeper: Keeper,
        pace: Pace,
        saved: Mapping[str, Any] | None = None,
        identity: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._source, self._live, self._arguments = source, live, arguments
        self._keeper, self._pace, self._saved, self._identity = keeper, pace, saved, identity
        self._checked: set[int] = set()
        self._settings, self._blocks = settings_of_process(), {0: settings_of_blocks()}
        self._wanted = False
        self.target = 0 if saved is None else int(saved["hint"])
        self._variables: dict[str, Any] = {}
        if saved is not None:
            self._variables = restored(saved["values"], saved["variables"], arguments)
            pace.learn(saved["costs"])

    def has(self, name: str) -> bool:
        """Whether a variable is restored."""
        return name in self._variables

    def take(self, name: str) -> Any:
        """The value of a variable, once."""
        return self._variables.pop(name)

    def lacks(self, name: str) -> bool:
        """Whether an argument was deleted before the hint."""
        return self._saved is not None and name in self._saved["lacks"]

    def inside(self, first: int, last: int) -> bool:
        """Whether the hint to go on from is one of these."""
        return first <= self.target <= last

    def enters(self, first: int, last: int) -> bool:
        """Whether the function runs here: from its begin, or because the hint to go on from is one of these."""
        return not self.target or first <= self.target <= last

    def iterate(self, iterable: Any, loop: int) -> Iterator[Any]:
        """The iterator of a loop with hints in it.

        Raises:
            NotResumableError: it cannot be begun in the middle.
        """
        iterator: Iterator[Any] = iter(iterable)
        # What its own `iter` returns may be one of Python's, and still not go over the thing itself.
        found = one_way(iterable if iterator is not iterable else iterator)
        if found is not None:
            file, kind = self._source.function.__code__.co_filename, type(found)
            line = self._source.loops[loop - 1].lineno
            raise NotResumableError(
                f"{file}:{line}: the loop over a {kind.__module__}.{kind.__qualname__} cannot begin in the middle; "
                "nothing was saved. Make it a list first, or loop over range(len(...))"
            )
        self._pace.entered(loop, length_hint(iterator, 0))
        return iterator

    def loop(self, iterator: Iterator[Any], first: int, last: int) -> Iterator[Any]:
        """What a loop goes over; where it goes on in its body, one item more, which is not used."""
        return chain((None,), iterator) if first <= self.target <= last else iterator

    def entering(self, depth: int) -> None:
        """A `with` with hints in it is entered, inside so many others.

        Raises:
            NotResumableError: the call has changed a setting that the `with` may set.
        """
        try:
            require_unchanged(self._blocks[depth], settings_of_blocks())
        except NotResumableError as error:
            file, line = self._source.function.__code__.co_filename, sys._getframe(1).f_lineno
            raise NotResumableError(f"{file}:{line}: no checkpoint is possible in this `with`: {error}") from None

    def entered(self, depth: int) -> None:
        """It was, and so many are around now."""
        self._blocks[depth] = settings_of_blocks()

    def due(self, hint: int) -> bool:
        """Whether `save` is to be called at this hint."""
        if self.target:
            assert self.target == hint, (self.target, hint)
            self.target = 0
            if self._saved is not None:
                restore_host_rng(self._saved["random"])
            self._saved = None
            self._variables.clear()
            self._checked.add(hint)
            self._pace.begin()
            return False
        self._wanted = self._pace.due(hint)
        return self._wanted or hint not in self._checked

    def save(self, hint: int, depth: int, variables: dict[str, Any]) -> None:
        """Make a checkpoint; at the first arrival at a hint at least find out whether it is possible.

        Args:
            hint: its number.
            depth: how many `with` are around it.
            variables: of the function, by name.

        Raises:
            NotResumableError: a variable cannot be saved; names it, and the line.
        """
        started = perf_counter()
        try:
            identity = self._identity()
            require_unchanged(self._settings, settings_of_process())
            require_unchanged(self._blocks[depth], settings_of_blocks())
            encoder = Encoder(self._arguments)
            names = sorted(self._live.at[hint])
            roots = {name: encoder.add(variables[name], self._named(name)) for name in names if name in variables}
            lacks = [name for name in names if name not in variables]
            variables.clear()  # Python keeps it with the function, and everything in it
            if self._wanted:
                content = {
                    "hint": hint,
                    "variables": roots,
                    "lacks": lacks,
                    "values": encoder.changed(),
                    "random": capture_host_rng(),
                    "identity": dict(identity),
                    "costs": self._pace.costs(),
                }
                self._keeper.save(content)
            else:
                encoder.nodes()
                encoder.check_memory()
        except (NotResumableError, RecursionError) as error:
            place = f"{self._source.function.__code__.co_filename}:{self._source.hints[hint - 1].lineno}"
            too_deep = "the state_dict of an argument holds values too deep within each other: keep them flat"
            why = too_deep if isinstance(error, RecursionError) else error
            raise NotResumableError(f"{place}: no checkpoint is possible at this hint: {why}") from None
        self._checked.add(hint)
        self._pace.took(hint, perf_counter() - started, checkpoint=self._wanted)

    def _named(self, name: str) -> str:
        loops = {self._source.iterator(loop): loop.lineno for loop in self._source.loops}
        return f"the iterator of the loop in line {loops[name]}" if name in loops else f"the variable '{name}'"
