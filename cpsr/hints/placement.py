"""Which hints become checkpoints, while the function runs.

Checkpoints earn their cost first: one is taken if it and all before are within the allowed fraction of the function's
time so far. So the allowance holds wherever the function ends. The cost is the time that the function waits, and the
processor time of the thread that writes: this may have kept the function from the interpreter. Asking at the hints is
part of it. The next one is planned at the median of the last few, and taken if the allowance holds the dearest of them.

In loops of known length the optimum of the paper chooses among the hints to come, by the times measured so far: until
the outermost loop ends, so many checkpoints as can be earned, each when it can be, where the expected time to repeat
work is least. It places again after each, and where the function comes to its hints otherwise than expected; always
the next few, in their share of the time. Where the length is not known, a hint is a checkpoint as soon as it is earned.

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
_SPREAD = 1.5  # times their median, which the next one may take
_TOGETHER = 1000  # hints that are looked at together, in less time than one by one
_CALL_SECONDS = 5e-6  # of a call at a hint, besides what it measures itself
_BYTES_PER_SECOND = 1e9  # of a processor, until a checkpoint was measured: hashed, written, read back and hashed again
_WINDOW = 6  # checkpoints that are placed together
_CANDIDATES = 20  # for each of them; of more hints, every so manieth
_OFF = 0.25  # of the time between two checkpoints, that the function may come otherwise than expected
_AGAIN = 1.25  # times the function's own seconds, before it is asked again whether hints can be placed
_RARE = 1e3  # mean time between failures, in lengths of the program: failures are rare, and the places are the same
_EXPONENT_MAX = 600.0  # of e, in a float; a block this long never ends

LoopPosition = tuple[int, int, int | None]  # number of a loop, repetitions that have begun, and how many there are


def place(
    at_seconds: Sequence[float],
    end_seconds: float,
    checkpoints_max: int,
    mtbf_seconds: float,
    earliest_seconds: Sequence[float] | None = None,
) -> list[int]:
    """The hints that should be checkpoints, where the expected recovery time is least (CheckHint).

    A thousand hints take some milliseconds for each checkpoint.

    Args:
        at_seconds: when the program comes to each hint; ascending.
        end_seconds: when it ends. Hints at that time are of no use.
        checkpoints_max: so many are taken, as far as there are hints. The paper takes `ceil(o * sum t / t_c)` for an
            allowance of o and checkpoints of t_c seconds.
        mtbf_seconds: mean time between failures.
        earliest_seconds: before which the first checkpoint, the second one, and so on cannot be taken; None: no limits.

    Returns:
        Their places in `at_seconds`, ascending.
    """
    hints = [at for at in at_seconds if at < end_seconds]
    if earliest_seconds is None and len(hints) <= checkpoints_max:
        return list(range(len(hints)))
    times = np.array([0.0, *hints, end_seconds])
    costs = _block_costs(times, 1 / mtbf_seconds)
    least, ends = costs[0], [costs[0, -1]]  # until each hint, and until the end, with so many checkpoints before
    before = []  # the last of these
    for number in range(min(checkpoints_max, len(hints))):
        if earliest_seconds is not None:
            least = np.where(times < earliest_seconds[number], np.inf, least)
        totals = least[:, None] + costs
        before.append(totals.argmin(axis=0))
        least = totals.min(axis=0)
        ends.append(least[-1])
    chosen, at = [], len(hints) + 1
    for last in reversed(before[: int(np.argmin(ends))]):
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
        chosen: which arrivals are checkpoints.
        between_seconds: mean distance of two checkpoints.
        passed: number of the newest arrival.
        is_due: a chosen arrival has come.
    """

    loop: int
    begun: int
    at_seconds: NDArray[np.float64]
    chosen: set[int]
    between_seconds: float
    passed: int = 0
    is_due: bool = False

    def follows(self, loops: Sequence[LoopPosition]) -> bool:
        """Whether one more arrival is one of these: the loop has not begun again."""
        self.passed += 1
        if not loops or self.passed >= len(self.at_seconds):
            return False
        self.is_due |= self.passed in self.chosen
        return loops[0][0] == self.loop and loops[0][1] >= self.begun


class Pace:
    """Decides at each hint.

    Args:
        allowance: time for checkpoints as a fraction of the function's own; infinite: every hint is one.
        first_seconds: what the first checkpoint may take, without the look at a hint and the bytes in it.
        clock: in seconds.

    Attributes:
        spent_seconds: for checkpoints.
    """

    def __init__(self, allowance: float, first_seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._allowance, self._first, self._clock = allowance, first_seconds, clock
        self._costs: deque[float] = deque(maxlen=_RECENT)
        self._estimate: float | None = None  # of the first cost, after a look at a hint
        self._usual = self._dearest = 0.0  # seconds of the next one, as planned, and as they must be earned
        self._writes: deque[float] = deque([0.0], _RECENT)  # seconds until each was written
        self._copying: float | None = None  # seconds that the function waited for the one that is being written
        self.begin()

    def begin(self, loops: Sequence[LoopPosition] = ()) -> None:
        """The function begins now, or goes on inside these loops."""
        self._began = self._mark = self._clock()
        self.spent_seconds = self._saved_at = self._ask_at = 0.0
        self._plan: _Plan | None = None
        self._wake_at = self._began  # by the clock; before it the next one is not earned, and nothing is placed
        self._arrived: list[tuple[float, Sequence[LoopPosition]]] = []  # seconds since the hint before, and the loops
        self._loops = {number: Repetitions(begun, is_whole=False) for number, begun, _ in loops}

    @property
    def is_unlimited(self) -> bool:
        """Whether every hint is a checkpoint."""
        return math.isinf(self._allowance)

    def recent_seconds(self) -> list[float]:
        """The last measured costs of checkpoints, for a call that goes on."""
        return list(self._costs)

    def learn(self, costs_seconds: Sequence[float]) -> None:
        """Take measured costs of checkpoints."""
        self._costs.extend(costs_seconds)
        known = [*self._costs, *([] if self._estimate is None else [self._estimate])]
        if known:  # one of many takes still longer, and later ones have to earn it
            self._dearest = min(max(self._costs or known), _SPREAD * statistics.median(known))
            self._usual = max(statistics.median(self._costs or known), 1e-9)

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
        if self.is_unlimited:
            return True
        self._arrived.append((now - self._mark, loops))
        is_due = False
        if (now >= self._wake_at and self._copying is None) or len(self._arrived) >= _TOGETHER:
            self._note_arrivals()
            is_due = self._copying is None and self._usual > 0 and self._wants(loops, now) and self._is_earned(now)
        self._mark = self._clock()
        self.spent_seconds += self._mark - now + _CALL_SECONDS
        return is_due

    def may_look(self) -> bool:
        """Whether a hint may be looked at for the first time: the first one may, others where that is earned."""
        return not self._usual or (self._copying is None and self._is_earned(self._mark))

    def looked(self, seconds: float, size_bytes: int) -> None:
        """The first look at a hint has taken so long; a checkpoint there would have so many bytes."""
        self.spent_seconds += seconds
        self._mark = self._clock()
        if not self._usual:
            self._estimate = self._first + seconds + size_bytes / _BYTES_PER_SECOND
            self.learn([])
            self._sleep()

    def copied(self, seconds: float) -> None:
        """The function has waited so long for a checkpoint, which is now being written."""
        self.spent_seconds += seconds
        self._copying = seconds
        self._mark = self._clock()
        self._saved_at, self._ask_at, self._plan = self.own_seconds(), 0.0, None

    def written(self, processor_seconds: float, seconds: float) -> None:
        """It is written, which has taken so long."""
        self.spent_seconds += processor_seconds
        self.learn([(self._copying or 0.0) + processor_seconds])
        self._writes.append(seconds)
        self._copying = None
        self._sleep()

    def _sleep(self) -> None:
        """Place nothing until the next checkpoint can be earned."""
        self._wake_at = self._began + self.spent_seconds + (self.spent_seconds + self._dearest) / self._allowance

    def _note_arrivals(self) -> None:
        for seconds, loops in self._arrived:
            for number, begun, _ in loops:
                self._loops.setdefault(number, Repetitions(begun)).arrive(begun, seconds)
        self._arrived.clear()

    def _is_earned(self, now: float) -> bool:
        """Whether one more is within the allowance of the time until now."""
        own = now - self._began - self.spent_seconds
        return self.spent_seconds + self._dearest <= self._allowance * own

    def _wants(self, loops: Sequence[LoopPosition], now: float) -> bool:
        """Whether this arrival is placed, or one before that was not earned; where none can be placed, each is."""
        own, plan = now - self._began - self.spent_seconds, self._plan
        if plan is not None and not plan.follows(loops):
            plan, self._plan, self._ask_at = None, None, 0.0
        elif plan is not None and plan.is_due and plan.passed not in plan.chosen:
            return True
        off = plan is None or abs(own - plan.at_seconds.item(plan.passed)) > _OFF * plan.between_seconds
        if off and loops and (own >= self._ask_at or (plan is not None and plan.is_due)):
            plan = self._plan = self._placed(loops, own)
            self._ask_at = own + _OFF * plan.between_seconds if plan and plan.chosen else _AGAIN * own
        return plan is None or plan.is_due

    def _earliest(self, end: float, hints: int) -> list[float]:
        """The function's own seconds before which the next checkpoint until then, and those after, are not earned."""
        first = (self.spent_seconds + self._dearest) / self._allowance
        between = max(self._usual / self._allowance, statistics.median(self._writes))
        count = min(hints, math.ceil(max(0.0, end - first) / between))
        return [first + between * number for number in range(count)]

    def _placed(self, loops: Sequence[LoopPosition], own: float) -> _Plan | None:
        """Choose among this hint and those to come; None: they are not known."""
        ahead = seconds_ahead([(self._loops[number], length) for number, _, length in loops])
        if ahead is None:
            return None
        at = own + np.cumsum([0.0, *ahead])
        end = float(at[-1])
        until = end - statistics.median(self._writes)  # one that is not written before the end is of no use
        earliest = self._earliest(until, len(at))
        between = (end - self._saved_at) / (len(earliest) + 1)
        if len(earliest) > _WINDOW:
            earliest = earliest[:_WINDOW]
            at = at[at <= max(own, self._saved_at + (_WINDOW + 1) * between)]
            end = until = float(at[-1]) if len(at) > 1 else own + between  # which is late
        nth = -(-len(at) // (_CANDIDATES * (len(earliest) + 1)))
        since = at[at < until][::nth] - self._saved_at
        limits = [one - self._saved_at for one in earliest]
        chosen = place(since.tolist(), end - self._saved_at, len(earliest), _RARE * end, limits)
        plan = _Plan(loops[0][0], loops[0][1], at, {nth * one for one in chosen}, between)
        plan.is_due = 0 in plan.chosen
        return plan
