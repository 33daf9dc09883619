"""Which hints become checkpoints, after Wong and Zhang: CheckHint: User-assisted Static Checkpointing for ML.

The paper's recurrence (section 2.2) places l checkpoints among n hints, so that the expected time to repeat work after
failures is least; loops are unrolled. It takes O(l n^2). Here a price on the cost of checkpoints leads to the same
optimum in O(n log n) for each price tried. Let `w(i, j)` be the expected recovery time of a block from hint i to j. It
is convex in the block's length, so `w(i, j) + w(i', j') <= w(i, j') + w(i', j)` for `i < i' <= j < j'`. It follows:

- For a given price the best predecessor of a checkpoint never moves back. A queue of candidates finds all of them.
- With equal costs, the least recovery time is convex in the number of checkpoints. So at some price both a schedule of
  fewer and one of more checkpoints than allowed are the cheapest. One that follows the first, and from some place on
  the second, is then the optimum (Aggarwal, Schieber and Tokuyama, 1994: Finding a minimum-weight k-link path in
  graphs with the concave Monge property).

Where the paper is wrong or silent, this module takes:

- Times need not be integers: failures have a rate, and `1 - exp(-rate)` is the paper's p.
- The number of checkpoints is `ceil(o * sum t / t_c)`, so that the last one may exceed the allowance by a part of its
  cost. Rounding of floats makes no further one.
- Unequal costs (5.1.1, left open): their sum is at most `o * sum t`. The best choice is then a knapsack problem;
  `least_recovery_seconds` proves how far it can be.
- Restarting, and failures while a checkpoint is written, cost nothing. The end of the program is no checkpoint. The
  allowance is spent whole, even where checkpoints cost more than they save.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsr.errors import ConfigError

__all__ = ["HINTS_MAX", "Placement", "Task", "hints_of", "place"]

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
    """A task, or a loop over a body of tasks, with a hint after each repetition.

    Attributes:
        name: for people, and in `hints_of`.
        seconds: of one repetition; counts only if there is no body.
        cost_seconds: of a checkpoint at the hint; None: there is no hint.
        repetitions: of the task or the whole body.
        body: tasks of the loop, in order; empty: it is no loop.
    """

    name: str
    seconds: float = 0.0
    cost_seconds: float | None = None
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
        return self.repetitions * (sum(one.arrivals for one in self.body) + (self.cost_seconds is not None))


@dataclass(frozen=True)
class Placement:
    """The chosen checkpoints, and what they cost; all times are expected seconds of the whole program.

    Attributes:
        checkpoints: in the order of the program, pairs of a hint's place among `hints_of` and the arrival there that
            is a checkpoint, from 1.
        program_seconds: without checkpoints and failures.
        allowed_seconds: for checkpoints.
        cost_seconds: of the chosen ones.
        recovery_seconds: with the chosen ones.
        least_recovery_seconds: no schedule within the allowance is below; with equal costs that is the chosen one's.
        unprotected_recovery_seconds: without any checkpoint.
    """

    checkpoints: tuple[tuple[int, int], ...]
    program_seconds: float
    allowed_seconds: float
    cost_seconds: float
    recovery_seconds: float
    least_recovery_seconds: float
    unprotected_recovery_seconds: float


def recovery_seconds(blocks_seconds: Floats, failures_per_second: float) -> Floats:
    """Expected time to repeat work in each block between checkpoints: `t/2 * p(b)/(1 - p(b))` (section 2.1).

    The paper calls the loss of one failure exactly t/2. It is less: earlier failures are likelier, as the first one
    ends the attempt. Exact would be `(exp(rate * t) - 1)/rate - t`. The paper's figure is too high by some `rate * t /
    6` of itself: 1.7% at a tenth of the mean time between failures. Both are convex, with nearly the same places.
    """
    exponents = np.minimum(failures_per_second * blocks_seconds, EXPONENT_MAX)
    found: Floats = 0.5 * blocks_seconds * np.expm1(exponents)
    return found


def place(tasks: Sequence[Task], allowance: float, mtbf_seconds: float) -> Placement:
    """The hints that should be checkpoints, where the expected recovery time is least (CheckHint; docs/hints.md).

    Args:
        tasks: the program, in order.
        allowance: time for checkpoints as a fraction of the time of all tasks, from 0 to 1.
        mtbf_seconds: mean time between failures.

    Raises:
        ConfigError: a number is negative, zero or not finite where it cannot be, and the message names it; there are
            too many hints; or a block would be 700 mean times between failures long, so that it never ends.
    """
    _require("mtbf_seconds", mtbf_seconds, mtbf_seconds > 0, "above 0")
    _require("allowance", allowance, 0 <= allowance < math.inf, "finite, 0 or larger")
    _require_tasks(tasks)
    _require("the number of hints", count := sum(one.arrivals for one in tasks), count <= HINTS_MAX, f"<= {HINTS_MAX}")
    seconds = math.fsum(task.total_seconds for task in tasks)
    at, costs, hints = _unrolled(tasks)
    inside = at < seconds * (1 - ROUNDING)
    arrivals = _arrivals(hints)
    program = _Program(at[inside], costs[inside], seconds, 1 / mtbf_seconds)
    allowed = allowance * seconds
    if len(equal := np.unique(costs)) == 1:
        allowed = float(equal[0]) * math.ceil(allowed / float(equal[0]) * (1 - ROUNDING))
    chosen, bound = program.best(allowed * (1 + ROUNDING))
    if (longest := float(program.blocks(chosen).max())) / mtbf_seconds >= EXPONENT_MAX:
        raise ConfigError(
            f"{longest:.4g} s pass between two checkpoints, and the mean time between failures is {mtbf_seconds:.4g} "
            "s: the program would never end. Nothing was placed; raise the allowance, or give longer tasks hints inside"
        )
    return Placement(
        tuple(zip(hints[inside][chosen].tolist(), arrivals[inside][chosen].tolist(), strict=True)),
        seconds,
        allowance * seconds,
        program.cost(chosen),
        program.recovery(chosen),
        bound,
        program.recovery(np.zeros(0, np.int64)),
    )


def _require(name: str, value: float, fits: bool, wanted: str) -> None:
    if not fits:
        raise ConfigError(f"{name} is {value}, and has to be {wanted}. Nothing was placed")


def _require_tasks(tasks: Sequence[Task]) -> None:
    for task in tasks:
        cost = task.cost_seconds
        _require(f"{task.name!r}: seconds", task.seconds, 0 <= task.seconds < math.inf, "finite, 0 or larger")
        _require(f"{task.name!r}: cost_seconds", cost or 0.0, cost is None or 0 < cost < math.inf, "finite, above 0")
        _require(f"{task.name!r}: repetitions", task.repetitions, task.repetitions >= 1, "at least 1")
        _require_tasks(task.body)


def hints_of(tasks: Sequence[Task], prefix: str = "") -> list[tuple[str, Task]]:
    """The tasks with a hint in the order of the program, each body once, by a name such as `epoch / batch`."""
    found = []
    for task in tasks:
        found += hints_of(task.body, f"{prefix}{task.name} / ")
        if task.cost_seconds is not None:
            found.append((f"{prefix}{task.name}", task))
    return found


def _unrolled(tasks: Sequence[Task], first_hint: int = 0) -> tuple[Floats, Floats, Integers]:
    """Of every arrival at a hint: seconds from the start, cost of a checkpoint there, and the hint's place."""
    at, costs, hints, start = [np.zeros(0)], [np.zeros(0)], [np.zeros(0, np.int64)], 0.0
    for task in tasks:
        once, cost, hint = _unrolled(task.body, first_hint)
        first_hint += len(hints_of(task.body))
        if task.cost_seconds is not None:
            once, cost = np.append(once, task.once_seconds), np.append(cost, task.cost_seconds)
            hint = np.append(hint, first_hint)
            first_hint += 1
        offsets = start + task.once_seconds * np.arange(task.repetitions)
        at.append((offsets[:, None] + once).ravel())
        costs.append(np.tile(cost, task.repetitions))
        hints.append(np.tile(hint, task.repetitions))
        start += task.total_seconds
    return np.concatenate(at), np.concatenate(costs), np.concatenate(hints)


def _arrivals(hints: Integers) -> Integers:
    """The how manieth arrival at its hint each one is, from 1."""
    found = np.zeros_like(hints)
    for hint in np.unique(hints):
        is_there = hints == hint
        found[is_there] = np.arange(1, is_there.sum() + 1)
    return found


@dataclass(frozen=True)
class _Program:
    """Hints in order, and the cost of each; a schedule is an array of their places.

    Attributes:
        at_seconds: from the start.
        costs_seconds: of a checkpoint at each.
        seconds: of the whole program.
        rate: failures per second.
    """

    at_seconds: Floats
    costs_seconds: Floats
    seconds: float
    rate: float

    def blocks(self, chosen: Integers) -> Floats:
        """Seconds from the start to the first checkpoint, between checkpoints, and to the end."""
        return np.diff(np.concatenate([[0.0], self.at_seconds[chosen], [self.seconds]]))

    def recovery(self, chosen: Integers) -> float:
        return float(recovery_seconds(self.blocks(chosen), self.rate).sum())

    def cost(self, chosen: Integers) -> float:
        return math.fsum(self.costs_seconds[chosen])

    def best(self, allowed_seconds: float) -> tuple[Integers, float]:
        """The schedule of least expected recovery time within the allowance, and what none within it is below."""
        within, beyond = np.zeros(0, np.int64), self.cheapest_at(0.0)
        if self.cost(beyond) <= allowed_seconds:
            return beyond, self.recovery(beyond)
        bound, price = self.recovery(beyond), self._first_price(allowed_seconds)
        cheap = dear = False  # whether a price was seen that buys too much, and one that does not
        for step in range(PRICES_MAX):
            found = self.cheapest_at(price)
            total = self.recovery(found) + price * self.cost(found)
            bound = max(bound, total - price * allowed_seconds)
            if cheap and dear and total >= (self.recovery(within) + price * self.cost(within)) * (1 - ROUNDING):
                break  # within and beyond are both the cheapest at this price
            if self.cost(found) <= allowed_seconds:
                within, dear = found, True
            else:
                beyond, cheap = found, True
            if (cheap and dear) or step >= _DOUBLINGS_MAX:
                cheap = dear = True
                saved = self.recovery(within) - self.recovery(beyond)
                price = saved / (self.cost(beyond) - self.cost(within))
            else:
                price *= 2.0 if cheap else 0.5
            if price <= 0:
                break  # what is beyond saves nothing
        chosen = self._filled(self._mixed(within, beyond, allowed_seconds), allowed_seconds)
        return chosen, min(bound, self.recovery(chosen))

    def _first_price(self, allowed_seconds: float) -> float:
        """What one more of evenly spaced checkpoints of mean cost saves, per second of its cost."""
        cost = float(self.costs_seconds.mean())
        exponent = min(self.rate * self.seconds / (allowed_seconds / cost + 1), EXPONENT_MAX)
        return 0.5 * exponent * exponent * math.exp(exponent) / self.rate / cost

    def cheapest_at(self, price: float) -> Integers:
        """The schedule of least expected recovery time and price of its checkpoints.

        Args:
            price: expected seconds of recovery that a second of checkpoints has to save.
        """
        at, extra = self.at_seconds.tolist(), (price * self.costs_seconds).tolist()
        candidates = _Candidates([*at, self.seconds], self.rate)
        before = []
        for target, end in enumerate(at):
            chosen, total = candidates.best(target)
            before.append(chosen)
            candidates.add(end, total + extra[target], target + 1)
        path = []
        place, _ = candidates.best(len(at))
        while place > 0:
            path.append(place - 1)
            place = before[place - 1]
        return np.array(path[::-1], np.int64)

    def _mixed(self, within: Integers, beyond: Integers, allowed_seconds: float) -> Integers:
        """The best schedule within the allowance that follows one of both, and from some place on the other."""
        best, chosen = self.recovery(within), within
        for first, second in ((within, beyond), (beyond, within)):
            blocks = recovery_seconds(self.blocks(first), self.rate)[:-1]
            later = recovery_seconds(self.blocks(second), self.rate)[1:]
            heads = np.concatenate([[0.0], np.cumsum(blocks)])  # by how many of the first are taken
            tails = np.concatenate([np.cumsum(later[::-1])[::-1], [0.0]])  # behind each of the second
            spent = np.concatenate([[0.0], np.cumsum(self.costs_seconds[first])])
            left = np.concatenate([np.cumsum(self.costs_seconds[second][::-1])[::-1], [0.0]])
            after = np.searchsorted(second, np.concatenate([[-1], first]), side="right")
            begins = np.concatenate([[0.0], self.at_seconds[first]])
            ends = np.concatenate([self.at_seconds[second], [self.seconds]])[after]
            joints = recovery_seconds(ends - begins, self.rate)
            totals = np.where(spent + left[after] <= allowed_seconds, heads + joints + tails[after], np.inf)
            if totals[taken := int(totals.argmin())] < best:
                best, chosen = float(totals[taken]), np.concatenate([first[:taken], second[after[taken] :]])
        return chosen

    def _filled(self, chosen: Integers, allowed_seconds: float) -> Integers:
        """With more checkpoints between those chosen while one fits; each time the one that saves most."""
        while True:
            place = np.searchsorted(chosen, np.arange(len(self.at_seconds)))
            marks = np.concatenate([[0.0], self.at_seconds[chosen], [self.seconds]])
            begins, ends = self.at_seconds - marks[place], marks[place + 1] - self.at_seconds
            whole, *parts = (recovery_seconds(one, self.rate) for one in (begins + ends, begins, ends))
            saved = whole - sum(parts)
            saved[chosen] = 0.0
            saved[self.costs_seconds > allowed_seconds - self.cost(chosen)] = 0.0
            if not len(saved) or saved.max() <= ROUNDING * self.recovery(chosen):
                return chosen
            chosen = np.sort(np.append(chosen, saved.argmax()))


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
