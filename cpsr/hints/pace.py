"""When a hint is a checkpoint, while the function runs.

All checkpoints so far and the next one together may take no more than the allowed fraction of the function's own time.
The next one may take twice as long as the longest of the last few, since a disk's time varies.

In loops of known length, once each of their hints was reached, the paper's optimum (`cpsr.hints.placement`) chooses
among the hints to come, by the times measured so far. It places again after twice as many hints, since the first times
are the least certain. One that is chosen before the allowance allows it is taken at the next hint. Elsewhere, as in
`while` loops, a hint is a checkpoint as soon as the allowance allows it.
"""

import ast
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cpsr.hints.placement import HINTS_MAX, Task, place
from cpsr.hints.source import FunctionSource

__all__ = ["Pace"]

_RECENT = 8  # measured costs of checkpoints that count
_SURPRISE = 2.0  # times the longest cost that the next one may take
_RARE = 1e3  # mean time between failures, in lengths of the program: failures are rare, and the places are the same


@dataclass
class _Hint:
    """What was measured at one hint: arrivals, and the function's own seconds since the hint before."""

    arrivals: int = 0
    seconds: float = 0.0


@dataclass
class _Plan:
    """A placement in one loop.

    Attributes:
        chosen: hints, and which arrival there from the placement on is a checkpoint.
        before: arrivals at each hint of the loop until then.
        begun: repetitions of the loop until then.
        is_pending: whether a chosen one could not be afforded yet.
    """

    chosen: set[tuple[int, int]]
    before: dict[int, int]
    begun: int
    is_pending: bool = False


class Pace:
    """Decides at each hint.

    Args:
        source: of the function.
        allowance: time for checkpoints as a fraction of the function's own; infinite: every hint is one.
        first_seconds: what the first checkpoint may take.
        clock: in seconds.

    Attributes:
        taken_seconds: the function's own time at each checkpoint.
        spent_seconds: for checkpoints.
    """

    def __init__(
        self,
        source: FunctionSource,
        allowance: float,
        first_seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._source, self._allowance, self._first, self._clock = source, allowance, first_seconds, clock
        self._hints = {number: _Hint() for number in range(1, len(source.hints) + 1)}
        self._costs: deque[float] = deque(maxlen=_RECENT)
        self._lengths: dict[int, int] = {}
        self._plan: _Plan | None = None
        self._place_at = 0  # arrivals in all
        self.taken_seconds: list[float] = []
        self.begin()

    def begin(self) -> None:
        """The function begins, or goes on, now."""
        self._began = self._mark = self._clock()
        self.spent_seconds = 0.0

    def recent_seconds(self) -> list[float]:
        """The last measured costs of checkpoints, for a call that goes on."""
        return list(self._costs)

    def learn(self, costs_seconds: Sequence[float]) -> None:
        """Take the costs of the call before."""
        self._costs.extend(costs_seconds)

    def own_seconds(self) -> float:
        """The function's own time, without checkpoints."""
        return self._clock() - self._began - self.spent_seconds

    def due(self, number: int, loops: Sequence[tuple[int, int | None]]) -> bool:
        """Whether this hint, at which the function has arrived, is a checkpoint.

        Args:
            number: of the hint.
            loops: around it, outer ones first: how many repetitions have begun, and how many there are if known.
        """
        now, hint = self._clock(), self._hints[number]
        hint.arrivals, hint.seconds = hint.arrivals + 1, hint.seconds + now - self._mark
        self._mark = now
        if math.isinf(self._allowance):
            return True
        for loop, (_, length) in zip(self._source.loops_around(number), loops, strict=True):
            self._lengths[loop] = length or 0
        expected = _SURPRISE * max(self._costs, default=self._first / _SURPRISE)
        affordable = self.spent_seconds + expected <= self._allowance * self.own_seconds()
        if sum(one.arrivals for one in self._hints.values()) >= self._place_at:
            self._place(number, loops)
        plan = self._plan
        if plan is None or number not in plan.before or loops[0][0] < plan.begun:  # the last: the loop begins again
            return affordable
        plan.is_pending |= (number, hint.arrivals - plan.before[number]) in plan.chosen
        if plan.is_pending and affordable:
            plan.is_pending = False
            return True
        return False

    def took(self, seconds: float, *, checkpoint: bool) -> None:
        """A checkpoint, or the first look at a hint, has taken so long."""
        self.spent_seconds += seconds
        self._mark = self._clock()
        if checkpoint:
            self._costs.append(seconds)
            self.taken_seconds.append(self.own_seconds())

    def _place(self, number: int, loops: Sequence[tuple[int, int | None]]) -> None:
        """Choose among the hints to come, where a repetition of an outermost loop ends and all about it is known."""
        if not loops or not self._costs or any(begun != length for begun, length in loops[1:]):
            return
        outer = self._source.loops_around(number)[0] - 1
        numbers, (begun, length) = self._source.numbers([self._source.loops[outer]]), loops[0]
        if number != numbers[-1] or length is None or begun >= length:
            return
        arrivals = {one: self._hints[one].arrivals for one in numbers}
        self._place_at = 2 * sum(one.arrivals for one in self._hints.values())
        rest = Task(repetitions=length - begun, body=tuple(self._tasks(self._source.loops[outer].body)))
        if not rest.body or rest.arrivals > HINTS_MAX or not rest.total_seconds:
            return
        allowed = self._allowance * (self.own_seconds() + rest.total_seconds) - self.spent_seconds
        cost = max(sum(self._costs) / len(self._costs), 1e-9)
        count = math.ceil(max(0.0, min(allowed, rest.total_seconds)) / cost)
        chosen = place([rest], count, _RARE * rest.total_seconds).checkpoints
        self._plan = _Plan({(numbers[hint], arrival) for hint, arrival in chosen}, arrivals, begun)

    def _tasks(self, statements: Sequence[ast.stmt]) -> list[Task]:
        """Tasks of a loop's body, in order; none if something in it is not known: branches, `while`, times."""
        found: list[Task] = []
        for statement in statements:
            numbers = self._source.numbers([statement])
            if statement in self._source.hints:
                hint = self._hints[numbers[0]]
                found.append(Task(hint.seconds / max(1, hint.arrivals), hint=True))
                if not hint.arrivals:
                    return []
            elif isinstance(statement, ast.For) and numbers:
                length = self._lengths.get(self._source.loops.index(statement) + 1, 0)
                body = self._tasks(statement.body)
                if not body or not length:
                    return []
                found.append(Task(repetitions=length, body=tuple(body)))
            elif numbers:
                return []
        return found
