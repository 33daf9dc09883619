"""Which hints become checkpoints, after Wong and Zhang: CheckHint: User-assisted Static Checkpointing for ML.

The paper is wrong or silent in places. Here is what this module takes:

- Times (section 2) need not be integers: failures have a rate, `1 - exp(-rate)` is the paper's p.
- The loss of one failure (2.1) is less than t/2: see `Failures.recovery_seconds`, which keeps the paper's figure.
- The number of checkpoints (2) is `ceil(o * sum t / t_c)`, so that the last one may exceed the allowance by a part of
  its cost. If there are fewer hints before the end of the program, it is their number: the recurrence (2.2) has no
  value beyond. Rounding of floats makes no further checkpoint.
- Unequal costs (5.1.1, left open): the sum of the costs is at most `o * sum t`. The best choice is a knapsack problem;
  `least_recovery_seconds` proves how far it can be.
- Loops (5.3.2, left open) are not unrolled. A hint in a loop is a checkpoint in every k-th repetition, counted afresh
  each time the loop begins. Or all repetitions have the same checkpoints: those of one inner loop, or several of which
  one is at the end of the body. Nothing depends on the number of repetitions but the choices of k.
- A failure while a checkpoint is written, restoring and restarting cost nothing, as in the paper. The end of the
  program is the end of a block and no checkpoint.
- The allowance is spent whole, even where checkpoints cost more than they save. The paper's claim (2.1) that the least
  recovery time is the least time to completion holds for a fixed number of checkpoints.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cpsr.errors import ConfigError
from cpsr.hints.schedule import Chain, cheapest, cheapest_at
from cpsr.hints.segments import ROUNDING, Failures, Segment, Use, joined, periods, repeated, thinned

__all__ = ["Checkpoint", "EvenPlacement", "Placement", "Task", "hints_of", "place"]

EVEN_HINTS_MAX = 10**6  # unrolled, for the comparison alone
LADDER = [4.0**power for power in range(-12, 13)]  # prices around that of a block of one mean time between failures


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


@dataclass(frozen=True)
class Checkpoint:
    """A hint that is a checkpoint in every k-th repetition.

    Attributes:
        hint: its place among `hints_of` the tasks, from 0.
        every: k.
        count: checkpoints there in the whole program.
    """

    hint: int
    every: int
    count: int


@dataclass(frozen=True)
class EvenPlacement:
    """Checkpoints at the hints nearest to equal distances in time, as many as the same allowance has.

    Attributes:
        count: of checkpoints.
        cost_seconds: of all of them together.
        recovery_seconds: expected, of the whole program.
    """

    count: int
    cost_seconds: float
    recovery_seconds: float


@dataclass(frozen=True)
class Placement:
    """The chosen checkpoints, and what they cost; all times are expected seconds of the whole program.

    Attributes:
        checkpoints: in the order of the program.
        program_seconds: without checkpoints and failures.
        allowed_seconds: for checkpoints.
        cost_seconds: of the chosen ones.
        recovery_seconds: with the chosen ones.
        least_recovery_seconds: what no schedule is below, also of those that differ from repetition to repetition.
        unprotected_recovery_seconds: without any checkpoint.
        longest_block_seconds: between two of the chosen ones.
        even: evenly spaced ones beside it; None if there are too many hints to unroll.
    """

    checkpoints: tuple[Checkpoint, ...]
    program_seconds: float
    allowed_seconds: float
    cost_seconds: float
    recovery_seconds: float
    least_recovery_seconds: float
    unprotected_recovery_seconds: float
    longest_block_seconds: float
    even: EvenPlacement | None


def place(tasks: Sequence[Task], allowance: float, mtbf_seconds: float) -> Placement:
    """The hints that should be checkpoints, where the expected recovery time is least (CheckHint; docs/hints.md).

    Args:
        tasks: the program, in order.
        allowance: time for checkpoints as a fraction of the time of all tasks, from 0 to 1.
        mtbf_seconds: mean time between failures.

    Raises:
        ConfigError: a number is negative, zero or not finite where it cannot be, and the message names it; or with this
            allowance a block would be 700 mean times between failures long, so that it never ends.
    """
    _require("mtbf_seconds", mtbf_seconds, mtbf_seconds > 0, "above 0")
    _require("allowance", allowance, 0 <= allowance < math.inf, "finite, 0 or larger")
    _require_tasks(tasks)
    failures = Failures(1 / mtbf_seconds)
    seconds = math.fsum(task.total_seconds for task in tasks)
    costs = {task.cost_seconds for _, task in hints_of(tasks) if task.cost_seconds is not None}
    allowed = allowance * seconds
    if len(costs) == 1:
        (cost,) = costs
        allowed = cost * math.ceil(allowed / cost * (1 - ROUNDING))
    before_end = seconds * (1 - ROUNDING)
    elements = [[one for one in each if one.begin_seconds < before_end] for each in _elements(tasks, failures, 0.0, 0)]
    chain = Chain([one for one in elements if one], seconds, failures)
    schedule, bound = cheapest(chain, allowed)
    longest = max([*chain.blocks(schedule.path), *(step.segment.longest_seconds for step in schedule.path)])
    if not failures.ends(longest):
        raise ConfigError(
            f"{longest:.4g} s pass between two checkpoints, and the mean time between failures is {mtbf_seconds:.4g} "
            "s: the program would never end. Nothing was placed; raise the allowance, or give longer tasks hints inside"
        )
    unrolled = any(len(one) > 1 for one in chain.elements)
    return Placement(
        tuple(Checkpoint(use.hint, use.every, use.count) for step in schedule.path for use in step.segment.uses),
        seconds,
        allowance * seconds,
        schedule.cost_seconds,
        schedule.recovery_seconds,
        _ideal(failures, seconds, allowed, costs) if unrolled or not costs else bound,
        failures.recovery_seconds(seconds),
        longest,
        _evenly(tasks, failures, seconds, allowed),
    )


def _ideal(failures: Failures, seconds: float, allowed_seconds: float, costs: set[float]) -> float:
    """Of equal blocks, as many as the cheapest hint allows: the least, since the cost of a block is convex."""
    blocks = 1 + (math.floor(allowed_seconds / min(costs) * (1 + ROUNDING)) if costs else 0)
    return blocks * failures.recovery_seconds(seconds / blocks)


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
    """The tasks with a hint in the order of the program, each body once.

    Args:
        tasks: the program, in order.
        prefix: put before every name.

    Returns:
        Pairs of a name, `epoch / batch` within a loop, and the task.
    """
    found = []
    for task in tasks:
        name = f"{prefix}{task.name}"
        found += hints_of(task.body, f"{name} / ")
        if task.cost_seconds is not None:
            found.append((name, task))
    return found


def _elements(
    tasks: Sequence[Task], failures: Failures, start_seconds: float, first_hint: int
) -> Iterator[list[Segment]]:
    """The elements of a chain: a hint, or a loop with its alternatives; one without hints is empty."""
    for task in tasks:
        if task.repetitions > 1:
            yield [one.moved(start_seconds) for one in _alternatives(task, failures, first_hint)]
        else:
            yield from _once(task, failures, start_seconds, first_hint)
        start_seconds += task.total_seconds
        first_hint += len(hints_of([task])) if task.body else task.cost_seconds is not None


def _once(task: Task, failures: Failures, start_seconds: float, first_hint: int) -> Iterator[list[Segment]]:
    """The elements of one repetition."""
    yield from _elements(task.body, failures, start_seconds, first_hint)
    if task.cost_seconds is not None:
        at = start_seconds + task.once_seconds
        yield [Segment(at, at, task.cost_seconds, (Use(first_hint + len(hints_of(task.body)), 1, 1),))]


def _alternatives(task: Task, failures: Failures, first_hint: int) -> Iterator[Segment]:
    """What the checkpoints of a loop can be, from where it begins."""
    elements = [one for one in _once(task, failures, 0.0, first_hint) if one]
    body, count = task.once_seconds, task.repetitions
    for segment in (segment for element in elements for segment in element):
        if [(use.every, use.count) for use in segment.uses] == [(1, 1)]:  # a hint right in the body
            yield from (thinned(segment, every, count, body, failures) for every in periods(count))
        else:
            yield repeated(segment, count, body, failures)
    if len(elements) > 1 and body > 0:
        yield from (repeated(one, count, body, failures) for one in _bodies(elements, body, failures))


def _bodies(elements: Sequence[Sequence[Segment]], body_seconds: float, failures: Failures) -> list[Segment]:
    """Several checkpoints of a body that end with its last one: the cheapest at prices from nearly all to few."""
    *inner, last = elements
    end = last[0]
    chain = Chain(inner, end.begin_seconds, failures)
    scale = failures.recovery_seconds(body_seconds) / min(one.cost_seconds for each in elements for one in each)
    paths = [cheapest_at(chain, scale * price).path for price in LADDER]
    found = {tuple(step.element for step in path): path for path in paths if path}
    return [joined([*(step.segment for step in path), end], failures) for path in found.values()]


def _evenly(tasks: Sequence[Task], failures: Failures, seconds: float, allowed_seconds: float) -> EvenPlacement | None:
    """The comparison, with loops unrolled."""
    if sum(_reached(task) for task in tasks) > EVEN_HINTS_MAX:
        return None
    at, costs = _unrolled(tasks)
    is_inside = at < seconds * (1 - ROUNDING)
    at, costs = at[is_inside], costs[is_inside]
    count = int(allowed_seconds / costs.min() * (1 + ROUNDING)) if len(costs) else 0
    while True:
        ideal = seconds * np.arange(1, count + 1) / (count + 1)
        after = np.minimum(np.searchsorted(at, ideal), len(at) - 1)
        before = np.maximum(after - 1, 0)
        nearest = np.unique(np.where(np.abs(at[before] - ideal) <= np.abs(at[after] - ideal), before, after))
        cost = math.fsum(costs[nearest])
        if cost <= allowed_seconds * (1 + ROUNDING):
            break
        count = min(count - 1, int(count * allowed_seconds / cost))
    blocks = np.diff(np.concatenate([[0.0], at[nearest], [seconds]]))
    return EvenPlacement(len(nearest), cost, math.fsum(failures.recovery_seconds(float(one)) for one in blocks))


def _reached(task: Task) -> int:
    """How often the program comes to a hint of this task."""
    return task.repetitions * (sum(_reached(one) for one in task.body) + (task.cost_seconds is not None))


def _unrolled(tasks: Sequence[Task]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds from the start to every hint, and the cost of a checkpoint there."""
    at, costs, start = [np.zeros(0)], [np.zeros(0)], 0.0
    for task in tasks:
        once, cost = _unrolled(task.body)
        if task.cost_seconds is not None:
            once, cost = np.append(once, task.once_seconds), np.append(cost, task.cost_seconds)
        if len(once):
            offsets = start + task.once_seconds * np.arange(task.repetitions)
            at.append((offsets[:, None] + once).ravel())
            costs.append(np.tile(cost, task.repetitions))
        start += task.total_seconds
    return np.concatenate(at), np.concatenate(costs)
