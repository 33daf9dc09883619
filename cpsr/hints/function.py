"""`@resumable`: a function that goes on after a kill from one of its hints."""

import functools
import inspect
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from cpsr.errors import ConfigError, NotResumableError, RunMismatchError
from cpsr.hints.arguments import read_arguments
from cpsr.hints.call import Call
from cpsr.hints.identity import difference, identity_of, name_of
from cpsr.hints.kept import KeptCheckpoints
from cpsr.hints.liveness import live_variables
from cpsr.hints.pace import Pace, rounds_of
from cpsr.hints.refusals import refuse_live
from cpsr.hints.rewriting import rewritten
from cpsr.hints.source import read_source
from cpsr.hints.used import Used

__all__ = ["Report", "Resumable", "resumable"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_running = threading.Lock()  # random states and checkpoints are of one call at a time
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """What checkpoints a call has taken since it began, or went on.

    Attributes:
        resumed_from: number of the checkpoint that it went on from; None: it began anew.
        own_seconds: of the function, without checkpoints.
        checkpoint_seconds: for all checkpoints.
        checkpoints: the function's own seconds at each of them.
    """

    resumed_from: int | None
    own_seconds: float
    checkpoint_seconds: float
    checkpoints: tuple[float, ...]


class Resumable(Generic[Arguments, Result]):
    """A function with hints; called like the function itself, which is its `__wrapped__`.

    Attributes:
        report: of the newest call; None before the first one ends.
    """

    def __init__(self, function: Callable[Arguments, Result], run_dir: Path, allowance: float) -> None:
        self._source = read_source(function)
        self._live = live_variables(self._source)
        refuse_live(self._source, self._live)
        self._rounds = rounds_of(self._source)
        self._function = rewritten(self._source, self._live.everywhere)
        self._signature = inspect.signature(function)
        self._run_dir, self._allowance = run_dir, allowance
        self.report: Report | None = None
        functools.update_wrapper(self, function)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Call the function; go on from the newest checkpoint if an earlier call has not returned.

        Raises:
            NotResumableError: an argument or a variable cannot be saved; names it. Or another call runs.
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
        name = name_of(self._source.function)
        used = Used(self._source.function)
        arguments = read_arguments(bound.arguments, used.values(self._function))
        used.watch(arguments.objects)
        identity = identity_of(self._source, used.texts, arguments)
        kept = KeptCheckpoints(self._run_dir, name, functools.partial(self._refuse_other, identity))
        number, saved = kept.newest() or (None, None)
        if saved is not None:  # an older one than that whose identity was looked at before, perhaps
            self._refuse_other(identity, saved["identity"])
        pace = Pace(self._allowance, self._rounds, len(self._source.hints), kept.first_seconds)

        def identity_now() -> dict[str, Any]:
            used.require_unchanged()
            return identity

        call = Call(self._source, self._live, arguments, kept, pace, saved, identity_now)
        if saved is not None:
            line = self._source.hints[call.target - 1].lineno
            _log.info("%s goes on from checkpoint %d, at the hint in line %d", name, number, line)
        try:
            result: Result = self._function(call, *bound.args, **bound.kwargs)
        finally:
            own, spent = pace.own_seconds(), pace.spent_seconds
            self.report = Report(number, own, spent, tuple(pace.taken_seconds))
        kept.clear()
        return result

    def _refuse_other(self, identity: dict[str, Any], saved: Any) -> None:
        if (other := difference(saved, identity)) is not None:
            raise RunMismatchError(
                f"{self._run_dir} holds a checkpoint of {identity['function']}, but this differs: {other}. No "
                "checkpoint was changed. Call it as before to go on, or remove the directory or use another run_dir to "
                "begin anew"
            )


def resumable(
    run_dir: str | Path, allowance: float = 0.05
) -> Callable[[Callable[Arguments, Result]], Resumable[Arguments, Result]]:
    """Make a function with `hint()` in it go on after a kill, where it is called again with the same arguments.

    Args:
        run_dir: directory of its checkpoints, which no other function and no other call uses.
        allowance: time for checkpoints as a fraction of the function's own; `math.inf`: every hint is a checkpoint.

    Raises:
        ConfigError: the allowance is not positive.
        NotResumableError: the function could not go on after a kill; names the line and the variable.
    """
    if math.isnan(allowance) or allowance <= 0:
        raise ConfigError(f"allowance is {allowance}: give a positive fraction of the time, 0.05 say, or math.inf")
    return lambda function: Resumable(function, Path(run_dir).absolute(), allowance)
