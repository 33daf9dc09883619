"""Which hints become checkpoints, after Wong and Zhang: CheckHint: User-assisted Static Checkpointing for ML.

The paper's recurrence (section 2.2) places l checkpoints among n hints, so that the expected time to repeat work after
failures is least; loops are unrolled. It takes O(l n^2). Here a price on checkpoints leads to the same optimum in
O(n log n) for each price tried. Let `w(i, j)` be the expected recovery time of a block from hint i to j. It is convex
in the block's length, so `w(i, j) + w(i', j') <= w(i, j') + w(i', j)` for `i < i' <= j < j'`. It follows:

- For a given price the best predecessor of a checkpoint never moves back. A queue of candidates finds all of them.
- The least recovery time is convex in the number of checkpoints. So at some price both a schedule of fewer and one of
  more checkpoints than allowed are the cheapest. One that follows the first, and from some place on the second, is then
  the optimum (Aggarwal, Schieber and Tokuyama, 1994: Finding a minimum-weight k-link path in graphs with the concave
  Monge property).

Where the paper is wrong or silent, this module takes:

- Times need not be integers: failures have a rate, and `1 - exp(-rate)` is the paper's p.
- A block of `t` seconds costs `t/2 * p(b)/(1 - p(b))` (section 2.1). The paper calls the loss of one failure exactly
  t/2. It is less: earlier failures are likelier, as the first one ends the attempt. Exact would be `(exp(rate * t) -
  1)/rate - t`. The paper's figure is too high by some `rate * t / 6` of itself, with nearly the same places.
- Restarting, and failures while a checkpoint is written, cost nothing. The end of the program is no checkpoint. All
  checkpoints that are allowed are taken, even where they cost more than they save.
- Every checkpoint costs the same. The paper leaves other costs open (section 5.1.1).
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsr.errors import ConfigError

__all__ = ["HINTS_MAX", "Placement", "Task", "place"]

HINTS_MAX = 200_000
"""Most hints of an unrolled program; more are refused. The placement of so many takes seconds."""
ROUNDING = 1e-12  # relative; of sums of floats
EXPONENT_MAX = 700.0  # a float holds no larger power of e; a block this long never ends
PRICES_MAX = 100  # that are tried; ten are usual
_DOUBLINGS_MAX = 20  # of the first guess, in either direction
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Task:
    """A task, or a loop over a body of tasks.

    Attributes:
        seconds: of one repetition; counts only if there is no body.
        hint: whether there is one after each repetition.
        repetitions: of the task or the whole body.
        body: tasks of the loop, in order; empty: it is no loop.
    """

    seconds: float = 0.0
    hint: bool = False
    repetitions: int = 1
    body: tuple["Task", ...] = ()

    @property
    def once_seconds(self) -> float:
        """Of one repetition."""
        return math.fsum(task.total_seconds for task in self.body) if self.body else self.seconds

    @property
    def total_seconds(self) -> float:
        """Of all repetitions."""
        return self.repetitions * self.once_seconds

    @property
    def arrivals(self) -> int:
        """How often the program comes to a hint of this task."""
        return self.repetitions * (sum(one.arrivals for one in self.body) + self.hint)

    @property
    def hints(self) -> int:
        """Hints of the task and its body, each once."""
        return sum(one.hints for one in self.body) + self.hint


@dataclass(frozen=True)
class Placement:
    """The chosen checkpoints, and the expected seconds to repeat work in the whole program.

    Attributes:
        checkpoints: in the order of the program, pairs of a hint and the arrival there that is a checkpoint, from 1.
            Hints have the places of their tasks, bodies before their loops, from 0.
        recovery_seconds: with these checkpoints.
        unprotected_recovery_seconds: without any.
    """

    checkpoints: tuple[tuple[int, int], ...]
    recovery_seconds: float
    unprotected_recovery_seconds: float


def place(tasks: Sequence[Task], checkpoints_max: int, mtbf_seconds: float) -> Placement:
    """The hints that should be checkpoints, where the expected recovery time is least (CheckHint).

    Args:
        tasks: the program, in order.
        checkpoints_max: so many are taken, as far as there are hints. The paper takes `ceil(o * sum t / t_c)` for an
            allowance of o and checkpoints of t_c seconds.
        mtbf_seconds: mean time between failures.

    Raises:
        ConfigError: a number is negative, zero or not finite where it cannot be, and the message names it; there are
            too many hints; or a block would be 700 mean times between failures long, so that it never ends.
    """
    _require("mtbf_seconds", mtbf_seconds, mtbf_seconds > 0, "above 0")
    _require_tasks(tasks)
    _require("the number of hints", count := sum(one.arrivals for one in tasks), count <= HINTS_MAX, f"<= {HINTS_MAX}")
    seconds = math.fsum(task.total_seconds for task in tasks)
    at, hints = _unrolled(tasks)
    inside = at < seconds * (1 - ROUNDING)
    arrivals = np.zeros_like(hints)
    for hint in np.unique(hints):
        arrivals[hints == hint] = np.arange(1, (hints == hint).sum() + 1)
    program = _Program(at[inside], seconds, 1 / mtbf_seconds)
    chosen = program.best(checkpoints_max)
    if (longest := float(program.blocks(chosen).max())) / mtbf_seconds >= EXPONENT_MAX:
        raise ConfigError(
            f"{longest:.4g} s pass between two checkpoints, and the mean time between failures is {mtbf_seconds:.4g} "
            "s: the program would never end. Nothing was placed; take more checkpoints, or give longer tasks hints "
            "inside"
        )
    return Placement(
        tuple(zip(hints[inside][chosen].tolist(), arrivals[inside][chosen].tolist(), strict=True)),
        program.recovery(chosen),
        program.recovery(np.zeros(0, np.int64)),
    )


def _require(name: str, value: float, fits: bool, wanted: str) -> None:
    if not fits:
        raise ConfigError(f"{name} is {value}, and has to be {wanted}. Nothing was placed")


def _require_tasks(tasks: Sequence[Task]) -> None:
    for task in tasks:
        _require("seconds of a task", task.seconds, 0 <= task.seconds < math.inf, "finite, 0 or larger")
        _require("repetitions of a task", task.repetitions, task.repetitions >= 1, "at least 1")
        _require_tasks(task.body)


def _unrolled(tasks: Sequence[Task], first_hint: int = 0) -> tuple[Floats, Integers]:
    """Of every arrival at a hint: seconds from the start, and the hint's place."""
    at, hints, start = [np.zeros(0)], [np.zeros(0, np.int64)], 0.0
    for task in tasks:
        once, hint = _unrolled(task.body, first_hint)
        first_hint += task.hints
        if task.hint:
            once, hint = np.append(once, task.once_seconds), np.append(hint, first_hint - 1)
        offsets = start + task.once_seconds * np.arange(task.repetitions)
        at.append((offsets[:, None] + once).ravel())
        hints.append(np.tile(hint, task.repetitions))
        start += task.total_seconds
    return np.concatenate(at), np.concatenate(hints)


@dataclass(frozen=True)
class _Program:
    """Hints in order; a schedule is an array of their places.

    Attributes:
        at_seconds: from the start.
        seconds: of the whole program.
        rate: failures per second.
    """

    at_seconds: Floats
    seconds: float
    rate: float

    def blocks(self, chosen: Integers) -> Floats:
        """Seconds from the start to the first checkpoint, between checkpoints, and to the end."""
        return np.diff(np.concatenate([[0.0], self.at_seconds[chosen], [self.seconds]]))

    def costs(self, blocks_seconds: Floats) -> Floats:
        """Expected seconds to repeat work in each block."""
        found: Floats = 0.5 * blocks_seconds * np.expm1(np.minimum(self.rate * blocks_seconds, EXPONENT_MAX))
        return found

    def recovery(self, chosen: Integers) -> float:
        return float(self.costs(self.blocks(chosen)).sum())

    def best(self, count: int) -> Integers:
        """The schedule of least expected recovery time with at most so many checkpoints."""
        within, beyond = np.zeros(0, np.int64), self.cheapest_at(0.0)
        if len(beyond) <= count:
            return beyond
        # What one more of evenly spaced checkpoints saves.
        exponent = min(self.rate * self.seconds / (count + 1), EXPONENT_MAX)
        price = 0.5 * exponent * exponent * math.exp(exponent) / self.rate
        cheap = dear = False  # whether a price was seen that buys too many, and one that does not
        for step in range(PRICES_MAX):
            found = self.cheapest_at(price)
            total = self.recovery(found) + price * len(found)
            if cheap and dear and total >= (self.recovery(within) + price * len(within)) * (1 - ROUNDING):
                break  # within and beyond are both the cheapest at this price
            if len(found) <= count:
                within, dear = found, True
            else:
                beyond, cheap = found, True
            if (cheap and dear) or step >= _DOUBLINGS_MAX:
                cheap = dear = True
                price = (self.recovery(within) - self.recovery(beyond)) / (len(beyond) - len(within))
            else:
                price *= 2.0 if cheap else 0.5
            if price <= 0:
                break  # what is beyond saves nothing
        return self._mixed(within, beyond, count)

    def cheapest_at(self, price: float) -> Integers:
        """The schedule of least expected recovery time and price of its checkpoints.

        Args:
            price: expected seconds of recovery that a checkpoint has to save.
        """
        at = self.at_seconds.tolist()
        candidates = _Candidates([*at, self.seconds], self.rate)
        before = []
        for target, end in enumerate(at):
            chosen, total = candidates.best(target)
            before.append(chosen)
            candidates.add(end, total + price, target + 1)
        path = []
        place, _ = candidates.best(len(at))
        while place > 0:
            path.append(place - 1)
            place = before[place - 1]
        return np.array(path[::-1], np.int64)

    def _mixed(self, within: Integers, beyond: Integers, count: int) -> Integers:
        """The best schedule of at most so many that follows one of both, and from some place on the other."""
        best, chosen = self.recovery(within), within
        for first, second in ((within, beyond), (beyond, within)):
            blocks, later = self.costs(self.blocks(first))[:-1], self.costs(self.blocks(second))[1:]
            heads = np.concatenate([[0.0], np.cumsum(blocks)])  # by how many of the first are taken
            tails = np.concatenate([np.cumsum(later[::-1])[::-1], [0.0]])  # behind each of the second
            after = np.searchsorted(second, np.concatenate([[-1], first]), side="right")
            begins = np.concatenate([[0.0], self.at_seconds[first]])
            ends = np.concatenate([self.at_seconds[second], [self.seconds]])[after]
            taken = np.arange(len(first) + 1) + len(second) - after
            totals = np.where(taken <= count, heads + self.costs(ends - begins) + tails[after], np.inf)
            if totals[at := int(totals.argmin())] < best:
                best, chosen = float(totals[at]), np.concatenate([first[:at], second[after[at] :]])
        return chosen


class _Candidates:
    """Where the block before a target may begin; the first one is the start of the program.

    Targets are asked for in rising order, and candidates end in rising order. Once a later candidate is better than an
    earlier one, it stays better. So the queue holds each candidate with the first target that it is the best for.
    """

    def __init__(self, begins: Sequence[float], failures_per_second: float) -> None:
        self._begins = begins
        self._rate = failures_per_second
        self._ends = [0.0]
        self._totals = [0.0]
        self._queue = [0]
        self._since = [0]
        self._head = 0

    def best(self, target: int) -> tuple[int, float]:
        """The candidate of least total, and the total with its block."""
        since, head = self._since, self._head
        while head + 1 < len(since) and since[head + 1] <= target:
            head += 1
        self._head = head
        return self._queue[head], self._total(self._queue[head], target)

    def add(self, end_seconds: float, total_seconds: float, target: int) -> None:
        """A candidate that may come before this target and later ones."""
        new, queue, since = len(self._ends), self._queue, self._since
        self._ends.append(end_seconds)
        self._totals.append(total_seconds)
        while len(queue) > self._head and self._is_better(new, queue[-1], max(since[-1], target)):
            queue.pop()
            since.pop()
        if len(queue) == self._head:
            queue.append(new)
            since.append(target)
            return
        last = len(self._begins) - 1
        low, step = max(since[-1], target), 1
        while low + step <= last and not self._is_better(new, queue[-1], low + step):
            low, step = low + step, 2 * step
        first = bisect_left(
            range(low + 1, min(low + step, last + 1)), True, key=lambda one: self._is_better(new, queue[-1], one)
        )
        if low + 1 + first <= last:
            since.append(low + 1 + first)
            queue.append(new)

    def _is_better(self, new: int, old: int, target: int) -> bool:
        # Written out: it is most of the work.
        begin, rate, ends, totals = self._begins[target], self._rate, self._ends, self._totals
        length, other = begin - ends[new], begin - ends[old]
        exponent = rate * other  # the longer one
        if exponent > EXPONENT_MAX:
            return self._total(new, target) < self._total(old, target)
        expm1 = math.expm1
        return totals[new] + 0.5 * length * expm1(rate * length) < totals[old] + 0.5 * other * expm1(exponent)

    def _total(self, candidate: int, target: int) -> float:
        length = self._begins[target] - self._ends[candidate]
        return self._totals[candidate] + 0.5 * length * math.expm1(min(self._rate * length, EXPONENT_MAX))
