"""Which hints become checkpoints, while the function runs.

In loops of known length the optimum of the paper chooses among the hints to come, by the times measured so far: until
the outermost loop ends, so many checkpoints as the allowance has, where the expected time to repeat work is least.
After each checkpoint it places again, and where the function comes to its hints otherwise than expected. Of many
checkpoints it places the next eight, in their share of the time; its own time counts as that of checkpoints.

A checkpoint that is placed is taken if all will be within the allowed fraction of the function's own time when the loop
ends, and those before it exceed that of the time so far by no more than the longest of them. Where the length is not
known, as in `while` loops, a hint is a checkpoint as soon as all so far and it are within the allowance. A disk's time
varies: the next one may take as long as the longest of the last few, or twice their median if that is less.

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
- The paper allows `ceil(o * sum t / t_c)` checkpoints, which may exceed the overhead o; here they stay within it.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsr.hints.repetitions import Repetitions, seconds_ahead

__all__ = ["LoopPosition", "Pace", "place"]

_RECENT = 16  # costs of checkpoints that count
_BYTES_PER_SECOND = 300e6  # until a checkpoint was measured: hashed, written, and read back
_WINDOW = 8  # checkpoints that are placed together
_CANDIDATES = 20  # for each of them; of more hints, every so manieth
_OFF = 0.25  # of the time between two checkpoints, that the function may come otherwise than expected
_AGAIN = 1.25  # times the function's own seconds, before it is asked again whether hints can be placed
_RARE = 1e3  # mean time between failures, in lengths of the program: failures are rare, and the places are the same
_EXPONENT_MAX = 600.0  # of e, in a float; a block this long never ends

LoopPosition = tuple[int, int, int | None]  # number of a loop, repetitions that have begun, and how many there are


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
class _Plan:
    """A placement.

    Attributes:
        loop: the outermost loop.
        begun: its repetitions until then.
        at_seconds: the function's own seconds at each arrival, from that of the placement on.
        end_seconds: the same where the loop ends.
        chosen: which arrivals are checkpoints.
        between_seconds: mean distance of two checkpoints.
        passed: number of the newest arrival.
    """

    loop: int
    begun: int
    at_seconds: NDArray[np.float64]
    end_seconds: float
    chosen: set[int]
    between_seconds: float
    passed: int = 0

    def follows(self, loops: Sequence[LoopPosition]) -> bool:
        """Whether one more arrival is one of these: the loop has not begun again."""
        self.passed += 1
        if not loops or self.passed >= len(self.at_seconds):
            return False
        return loops[0][0] == self.loop and loops[0][1] >= self.begun


class Pace:
    """Decides at each hint.

    Args:
        allowance: time for checkpoints as a fraction of the function's own; infinite: every hint is one.
        first_seconds: what the first checkpoint may take, without the bytes in it.
        clock: in seconds.

    Attributes:
        spent_seconds: for checkpoints.
    """

    def __init__(self, allowance: float, first_seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._allowance, self._first, self._clock = allowance, first_seconds, clock
        self._costs: deque[float] = deque(maxlen=_RECENT)
        self._is_measured = False
        self._worst = 0.0  # of all costs
        self.begin()

    def begin(self, loops: Sequence[LoopPosition] = ()) -> None:
        """The function begins now, or goes on inside these loops."""
        self._began = self._mark = self._clock()
        self.spent_seconds = self._asking_seconds = self._saved_at = self._ask_at = 0.0
        self._plan: _Plan | None = None
        self._loops = {number: Repetitions(begun, is_whole=False) for number, begun, _ in loops}

    def recent_seconds(self) -> list[float]:
        """The last measured costs of checkpoints, for a call that goes on."""
        return list(self._costs) if self._is_measured else []

    def learn(self, costs_seconds: Sequence[float]) -> None:
        """Take measured costs of checkpoints, which replace an estimate."""
        if costs_seconds and not self._is_measured:
            self._costs.clear()
            self._is_measured = True
        self._costs.extend(costs_seconds)
        self._worst = max([self._worst, *costs_seconds])

    def own_seconds(self) -> float:
        """The function's own time, without checkpoints."""
        return self._clock() - self._began - self.spent_seconds

    def due(self, loops: Sequence[LoopPosition], now: float | None = None) -> bool:
        """Whether the hint at which the function has arrived is a checkpoint.

        Args:
            loops: around it, outer ones first.
            now: when it has arrived, by the clock; None: now.
        """
        now = self._clock() if now is None else now
        if math.isinf(self._allowance):
            return True
        for number, begun, _ in loops:
            self._loops.setdefault(number, Repetitions(begun)).arrive(begun, now - self._mark)
        if not self._costs:
            self._mark = now
            return False
        before, plan = self._plan, self._followed(loops, now - self._began - self.spent_seconds)
        self._mark = self._clock()
        self.spent_seconds += self._mark - now
        if self._plan is before:  # else it was placed, which comes with a checkpoint and not with a hint
            self._asking_seconds += self._mark - now
        own = self.own_seconds()
        if plan is None:
            return self.spent_seconds + self._longest() <= self._allowance * own
        if plan.passed not in plan.chosen:
            return False
        if own < self._earliest() or self._left(own, plan.end_seconds) < self._longest():
            self._plan, self._ask_at = None, 0.0
            return False
        return True

    def looked(self, seconds: float, size_bytes: int) -> None:
        """The first look at a hint has taken so long; a checkpoint there would have so many bytes."""
        self.spent_seconds += seconds
        self._mark = self._clock()
        if not self._is_measured:
            self._worst = self._first + seconds + size_bytes / _BYTES_PER_SECOND
            self._costs.append(self._worst)

    def took(self, seconds: float) -> None:
        """A checkpoint has taken so long."""
        self.spent_seconds += seconds
        self._mark = self._clock()
        self.learn([seconds])
        self._saved_at, self._ask_at, self._plan = self.own_seconds(), 0.0, None

    def _longest(self) -> float:
        """Seconds that the next checkpoint may take; once in a while a disk takes still longer."""
        return min(max(self._costs), 2 * self._usual())

    def _earliest(self) -> float:
        """The function's own seconds before which one more would exceed the allowance so far by more than one."""
        return (self.spent_seconds + self._usual() - self._worst) / self._allowance

    def _usual(self) -> float:
        return max(statistics.median(self._costs), 1e-9)

    def _left(self, own: float, end_seconds: float) -> float:
        """Seconds left for checkpoints until the function's own time is that, without asking at the other hints."""
        asking = self._asking_seconds / own * (end_seconds - own) if own else 0.0
        return self._allowance * end_seconds - self.spent_seconds - asking

    def _followed(self, loops: Sequence[LoopPosition], own: float) -> _Plan | None:
        """The placement that holds at this arrival; None: there is none."""
        plan = self._plan
        if plan is not None and not plan.follows(loops):
            plan, self._plan, self._ask_at = None, None, 0.0
        off = plan is None or abs(own - plan.at_seconds.item(plan.passed)) > _OFF * plan.between_seconds
        if off and loops and (own >= self._ask_at or (plan is not None and plan.passed in plan.chosen)):
            plan = self._plan = self._placed(loops, own)
            self._ask_at = own + _OFF * plan.between_seconds if plan and plan.chosen else _AGAIN * own
        return plan

    def _placed(self, loops: Sequence[LoopPosition], own: float) -> _Plan | None:
        """Choose among this hint and those to come; None: they are not known."""
        ahead = seconds_ahead([(self._loops[number], length) for number, _, length in loops])
        if ahead is None:
            return None
        at = own + np.cumsum([0.0, *ahead])
        end = float(at[-1])
        left = self._left(own, end) - (self._longest() - self._usual())
        count = min(max(0, math.floor(left / self._usual())), len(at))
        between = (end - self._saved_at) / (count + 1)
        until = end
        if count > _WINDOW:
            count = _WINDOW
            at = at[at <= max(own, self._saved_at + (count + 1) * between)]
            until = float(at[-1]) if len(at) > 1 else own + between  # which is late
        nth = -(-len(at) // (_CANDIDATES * (count + 1)))
        since = at - self._saved_at
        early = int((at[::nth] < self._earliest()).sum())
        chosen = place(since[::nth].tolist()[early:], until - self._saved_at, count, _RARE * end)
        return _Plan(loops[0][0], loops[0][1], at, end, {nth * (early + one) for one in chosen}, between)
