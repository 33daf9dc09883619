"""The cheapest sequence of segments within an allowance, by a price on the cost of checkpoints.

Let `w(i, j)` be the expected recovery time of a block from checkpoint i to j. It is a convex function of the block's
length, so `w(i, j) + w(i', j') <= w(i, j') + w(i', j)` for `i < i' <= j < j'`. From this inequality of Monge follow:

- For a given price the best predecessor of a checkpoint never moves back. A queue of candidates finds all of them in
  O(n log n), with costs of their own for each checkpoint. The paper's recurrence (section 2.2) takes O(l n^2).
- With equal costs, the least recovery time is convex in the number of checkpoints. So at some price both a schedule of
  fewer and one of more checkpoints than allowed are the cheapest. One that follows the first, and from some place on
  the second, is then the optimum (Aggarwal, Schieber and Tokuyama, 1994: Finding a minimum-weight k-link path in
  graphs with the concave Monge property).

With unequal costs the problem contains the knapsack problem. The price still proves what every schedule costs at least.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, expm1, fsum
from typing import NamedTuple

from cpsr.hints.segments import EXPONENT_MAX, ROUNDING, Failures, Segment

__all__ = ["Chain", "Schedule", "cheapest", "cheapest_at"]

STEPS_MAX = 100  # of the search for the price; ten are usual
DOUBLINGS_MAX = 20  # of the first guess, in either direction


class Step(NamedTuple):
    """A segment of a schedule, and the place of its element."""

    element: int
    segment: Segment


Path = Sequence[Step]


@dataclass(frozen=True)
class Chain:
    """What a schedule may consist of: of each element, at most one segment.

    The segments of an element lie after those of the elements before it. `seconds` is the time of all tasks.
    """

    elements: Sequence[Sequence[Segment]]
    seconds: float
    failures: Failures

    def blocks(self, path: Path) -> list[float]:
        """Seconds from the start to the first step, between steps, and to the end."""
        ends = [0.0, *(step.segment.end_seconds for step in path)]
        begins = [*(step.segment.begin_seconds for step in path), self.seconds]
        return [begin - end for begin, end in zip(begins, ends, strict=True)]


@dataclass(frozen=True)
class Schedule:
    """A path through a chain, with its expected recovery time and the cost of its checkpoints, in seconds."""

    path: Path
    recovery_seconds: float
    cost_seconds: float

    @classmethod
    def of(cls, chain: Chain, path: Path) -> "Schedule":
        """The schedule of a path."""
        own = [step.segment.recovery_seconds for step in path]
        recovery = fsum([*map(chain.failures.recovery_seconds, chain.blocks(path)), *own])
        return cls(path, recovery, fsum(step.segment.cost_seconds for step in path))

    def at(self, price: float) -> float:
        """Recovery time and the price of the checkpoints."""
        return self.recovery_seconds + price * self.cost_seconds


def cheapest(chain: Chain, allowed_seconds: float) -> tuple[Schedule, float]:
    """The schedule of least expected recovery time whose checkpoints cost no more than allowed.

    Returns:
        The schedule, and what no schedule of the chain within the allowance is below, in seconds. Both are the same,
        but for rounding, if all checkpoints cost the same and every element has one segment.
    """
    allowed = allowed_seconds * (1 + ROUNDING)
    within, beyond = Schedule.of(chain, ()), cheapest_at(chain, 0.0)
    if beyond.cost_seconds <= allowed:
        return beyond, beyond.recovery_seconds
    bound, price = beyond.recovery_seconds, _first_price(chain, allowed)
    cheap = dear = False  # whether a price was seen that buys too much, and one that does not
    for step in range(STEPS_MAX):
        found = cheapest_at(chain, price)
        bound = max(bound, found.at(price) - price * allowed_seconds)
        if cheap and dear and found.at(price) >= within.at(price) * (1 - ROUNDING):
            break  # within and beyond are both the cheapest at this price
        if found.cost_seconds <= allowed:
            within, dear = found, True
        else:
            beyond, cheap = found, True
        if step >= DOUBLINGS_MAX:
            cheap = dear = True
        if cheap and dear:
            price = (within.recovery_seconds - beyond.recovery_seconds) / (beyond.cost_seconds - within.cost_seconds)
        else:
            price *= 2.0 if cheap else 0.5
        if price <= 0:
            break  # what is beyond saves nothing
    best = _filled(chain, _best_mixture(chain, within, beyond, allowed), allowed)
    return best, min(bound, best.recovery_seconds)


def _first_price(chain: Chain, allowed_seconds: float) -> float:
    """What one more of evenly spaced checkpoints of mean cost saves, per second of its cost."""
    costs = [segment.cost_seconds / sum(use.count for use in segment.uses) for one in chain.elements for segment in one]
    cost = fsum(costs) / len(costs)
    exponent = min(chain.failures.per_second * chain.seconds / (allowed_seconds / cost + 1), EXPONENT_MAX)
    return 0.5 * exponent * exponent * exp(exponent) / chain.failures.per_second / cost


def cheapest_at(chain: Chain, price: float) -> Schedule:
    """The schedule of least expected recovery time and price of its checkpoints.

    Args:
        chain: what it may consist of.
        price: expected seconds of recovery that a second of checkpoints has to save.
    """
    elements = [sorted(one, key=_begin) if len(one) > 1 else one for one in chain.elements]
    begins = [segment.begin_seconds for segments in elements for segment in segments]
    candidates = _Candidates([*begins, chain.seconds], chain.failures.per_second)
    steps: list[Step] = []  # of each candidate but the start
    before: list[int] = []
    target = 0
    for element, segments in enumerate(elements):
        reached = []
        for segment in segments:
            chosen, total = candidates.best(target)
            reached.append((segment, total + segment.recovery_seconds + price * segment.cost_seconds, chosen))
            target += 1
        for segment, total, chosen in sorted(reached, key=_end) if len(reached) > 1 else reached:
            steps.append(Step(element, segment))
            before.append(chosen)
            candidates.add(segment.end_seconds, total, target)
    path = []
    at, _ = candidates.best(target)
    while at > 0:
        path.append(steps[at - 1])
        at = before[at - 1]
    return Schedule.of(chain, path[::-1])


def _begin(segment: Segment) -> float:
    return segment.begin_seconds


def _end(reached: tuple[Segment, float, int]) -> float:
    return reached[0].end_seconds


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
        return totals[new] + 0.5 * length * expm1(rate * length) < totals[old] + 0.5 * other * expm1(exponent)

    def _total(self, candidate: int, target: int) -> float:
        length = self._begins[target] - self._ends[candidate]
        exponent = self._rate * length
        return self._totals[candidate] + 0.5 * length * expm1(exponent if exponent < EXPONENT_MAX else EXPONENT_MAX)


def _best_mixture(chain: Chain, within: Schedule, beyond: Schedule, allowed_seconds: float) -> Schedule:
    """The best one within the allowance that follows one of both, and from some place on the other."""
    best, path = within.recovery_seconds, within.path
    for first, second in ((within.path, beyond.path), (beyond.path, within.path)):
        heads = list(accumulate(first, lambda sums, step: _extended(chain, sums, step), initial=_Sums(0.0, 0.0, 0.0)))
        tails = list(accumulate(second, lambda sums, step: _extended(chain, sums, step), initial=_Sums(0.0, 0.0, 0.0)))
        elements = [step.element for step in second]
        for taken, head in enumerate(heads):
            left = bisect_right(elements, first[taken - 1].element) if taken else 0
            joint = _extended(chain, head, second[left]) if left < len(second) else head
            rest = tails[left + 1] if left < len(second) else tails[-1]
            recovery = joint.recovery_seconds + tails[-1].recovery_seconds - rest.recovery_seconds
            recovery += chain.failures.recovery_seconds(
                chain.seconds - (tails[-1] if left < len(second) else head).end_seconds
            )
            if joint.cost_seconds + tails[-1].cost_seconds - rest.cost_seconds <= allowed_seconds and recovery < best:
                best, path = recovery, [*first[:taken], *second[left:]]
    return Schedule.of(chain, path)


class _Sums(NamedTuple):
    """Of the steps so far: the last one's end, and recovery time and cost, in seconds."""

    end_seconds: float
    recovery_seconds: float
    cost_seconds: float


def _extended(chain: Chain, sums: _Sums, step: Step) -> _Sums:
    segment = step.segment
    block = chain.failures.recovery_seconds(segment.begin_seconds - sums.end_seconds)
    return _Sums(
        segment.end_seconds,
        sums.recovery_seconds + block + segment.recovery_seconds,
        sums.cost_seconds + segment.cost_seconds,
    )


def _filled(chain: Chain, schedule: Schedule, allowed_seconds: float) -> Schedule:
    """With more segments between its steps while one fits; each time the one that saves most."""
    while True:
        spare = allowed_seconds - schedule.cost_seconds
        elements = [step.element for step in schedule.path]
        best, place, added = 0.0, 0, None
        for element, segments in enumerate(chain.elements):
            at = bisect_left(elements, element)
            if at < len(elements) and elements[at] == element:
                continue
            for segment in segments:
                if segment.cost_seconds <= spare and (saved := _saved(chain, schedule.path, at, segment)) > best:
                    best, place, added = saved, at, Step(element, segment)
        if added is None or best <= ROUNDING * schedule.recovery_seconds:
            return schedule
        schedule = Schedule.of(chain, [*schedule.path[:place], added, *schedule.path[place:]])


def _saved(chain: Chain, path: Path, at: int, segment: Segment) -> float:
    """Expected seconds that a segment saves before the step at this place of a path."""
    begin = path[at - 1].segment.end_seconds if at else 0.0
    end = path[at].segment.begin_seconds if at < len(path) else chain.seconds
    cost = chain.failures.recovery_seconds
    return (
        cost(end - begin)
        - cost(segment.begin_seconds - begin)
        - cost(end - segment.end_seconds)
        - segment.recovery_seconds
    )
