"""Which hints become checkpoints, while the function runs.

All checkpoints so far and the next one together may take no more than the allowed fraction of the function's own time.
The next one may take twice as long as the longest of the last few, since a disk's time varies.

In loops of known length, once each of their hints was reached, the optimum of the paper chooses among the hints to
come, by the times measured so far. It places again after twice as many hints, since the first times are the least
certain. One that is chosen before the allowance allows it is taken at the next hint. Elsewhere, as in `while` loops, a
hint is a checkpoint as soon as the allowance allows it.

Source: Wong and Zhang, CheckHint: User-assisted Static Checkpointing for ML. Its recurrence (section 2.2) places l
checkpoints among n hints, so that the expected time to repeat work after failures is least; loops are unrolled.
Where the paper is wrong or silent, this module takes:

- Times need not be integers: failures have a rate, and `1 - exp(-rate)` is the paper's p.
- A block of `t` seconds costs `t/2 * p(b)/(1 - p(b))` (section 2.1). The paper calls the loss of one failure exactly
  t/2. It is less: earlier failures are likelier, as the first one ends the attempt. Exact would be `(exp(rate * t) -
  1)/rate - t`. The paper's figure is too high by some `rate * t / 6` of itself, with nearly the same places.
- Restarting, and failures while a checkpoint is written, cost nothing. The end of the program is no checkpoint. All
  checkpoints that are allowed are taken, even where they cost more than they save.
- Every checkpoint costs the same. The paper leaves other costs open (section 5.1.1).
"""

import ast
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsr.hints.source import FunctionSource

__all__ = ["Pace", "place"]

_RECENT = 8  # measured costs of checkpoints that count
_SURPRISE = 2.0  # times the longest cost that the next one may take
_HINTS_MAX = 200_000  # of an unrolled loop
_CANDIDATES_MAX = 1000  # hints that are placed among; of more, every so manieth
_RARE = 1e3  # mean time between failures, in lengths of the program: failures are rare, and the places are the same
_EXPONENT_MAX = 600.0  # of e, in a float; a block this long never ends


def place(at_seconds: Sequence[float], end_seconds: float, checkpoints_max: int, mtbf_seconds: float) -> list[int]:
    """The hints that should be checkpoints, where the expected recovery time is least (CheckHint).

    A thousand hints take some milliseconds for each checkpoint.

    Args:
        at_seconds: when the program comes to each hint; ascending.
        end_seconds: when it ends. Hints at that time are of no use.
        checkpoints_max: so many are taken, as far as there are hints. The paper takes `ceil(o * sum t / t_c)` for an
            allowance of o and checkpoints of t_c seconds.
        mtbf_seconds: mean time between failures.

    Returns:
        Their places in `at_seconds`, ascending.
    """
    hints = [at for at in at_seconds if at < end_seconds]
    if len(hints) <= checkpoints_max:
        return list(range(len(hints)))
    costs = _block_costs(np.array([0.0, *hints, end_seconds]), 1 / mtbf_seconds)
    least = costs[0]  # until each hint, and until the end, with so many checkpoints before
    before = []  # the last of these
    for _ in range(checkpoints_max):
        totals = least[:, None] + costs
        before.append(totals.argmin(axis=0))
        least = totals.min(axis=0)
    chosen, at = [], len(hints) + 1
    for last in reversed(before):
        at = int(last[at])
        chosen.append(at - 1)
    return chosen[::-1]


def _block_costs(times: NDArray[np.float64], failures_per_second: float) -> NDArray[np.float64]:
    """Expected seconds to repeat work in the block from each time (row) to each later one (column); else infinite."""
    blocks = times[None, :] - times[:, None]
    costs = 0.5 * blocks * np.expm1(np.minimum(failures_per_second * blocks, _EXPONENT_MAX))
    return np.where(np.triu(np.ones(blocks.shape, bool), 1), costs, np.inf)


@dataclass
class _Hint:
    """What was measured at one hint: arrivals, and the function's own seconds since the hint before."""

    arrivals: int = 0
    seconds: float = 0.0


@dataclass
class _Plan:
    """A placement in one loop.

    Attributes:
        chosen: which arrivals at its hints are checkpoints; that of the placement is number 0.
        hints: of the loop.
        begun: repetitions of the loop until then.
        passed: number of the last arrival.
        is_pending: whether a chosen one could not be afforded yet.
    """

    chosen: set[int]
    hints: range
    begun: int
    passed: int = -1
    is_pending: bool = False


class Pace:
    """Decides at each hint.

    Args:
        source: of the function.
        allowance: time for checkpoints as a fraction of the function's own; infinite: every hint is one.
        first_seconds: what the first checkpoint may take.
        clock: in seconds.

    Attributes:
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
        if plan is None or number not in plan.hints or loops[0][0] < plan.begun:  # the last: the loop begins again
            return affordable
        plan.passed += 1
        plan.is_pending |= plan.passed in plan.chosen
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

    def _place(self, number: int, loops: Sequence[tuple[int, int | None]]) -> None:
        """Choose among the hints to come, where a repetition of an outermost loop ends and all about it is known."""
        if not loops or not self._costs or any(begun != length for begun, length in loops[1:]):
            return
        outer = self._source.loops[self._source.loops_around(number)[0] - 1]
        numbers, (begun, length) = self._source.numbers([outer]), loops[0]
        if number != numbers[-1] or length is None or begun >= length:
            return
        self._place_at = 2 * sum(one.arrivals for one in self._hints.values())
        at = list(itertools.accumulate(self._unrolled(outer.body, length - begun)))
        if not at or not at[-1]:
            return
        allowed = self._allowance * (self.own_seconds() + at[-1]) - self.spent_seconds
        cost = max(sum(self._costs) / len(self._costs), 1e-9)
        count = math.ceil(max(0.0, min(allowed, at[-1])) / cost)
        nth = -(-len(at) // _CANDIDATES_MAX)
        chosen = place(at[nth - 1 :: nth], at[-1], count, _RARE * at[-1])
        self._plan = _Plan({nth * (one + 1) for one in chosen}, numbers, begun)

    def _unrolled(self, statements: Sequence[ast.stmt], repetitions: int) -> list[float]:
        """Seconds before each hint that a loop will come to; none if something in it is not known.

        That may be a branch, a `while` loop, or a length or a time that was not measured.
        """
        found: list[float] = []
        for statement in statements:
            numbers = self._source.numbers([statement])
            if statement in self._source.hints:
                hint = self._hints[numbers[0]]
                inside = [hint.seconds / hint.arrivals] if hint.arrivals else []
            elif isinstance(statement, ast.For) and numbers:
                length = self._lengths.get(self._source.loops.index(statement) + 1, 0)
                inside = self._unrolled(statement.body, length)
            else:
                inside = []
            if numbers and not inside:
                return []
            found += inside
        return found * repetitions if len(found) * repetitions <= _HINTS_MAX else []
