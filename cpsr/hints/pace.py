"""When a hint is a checkpoint, while the function runs.

All checkpoints so far and the next one together may take no more than the allowed fraction of the function's own time.
The next one may take twice as long as the longest of the last few, since a disk's time varies. Before the first one see
`KeptCheckpoints`; a call that goes on knows the costs of the calls before. What is spared while slow ones are among the
last few is not spent at once later: the next one is at least as far away as if all took their mean.

A hint is a checkpoint as soon as this allows it. In a loop whose length is known, and of which every hint was reached
once, the placement of `cpsr.hints.placement` chooses among them instead: by the times measured so far, for the
repetitions to come, as they are and not unrolled. It is used if it would repeat less after a failure than the allowance
alone, by both rules applied to the measured times: where hints cost different times. One that is chosen before the
allowance allows it is taken at the next hint. It places again after twice as many hints, since the first times are the
least certain, and once a hint's first checkpoint has said what it costs.
"""

import ast
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cpsr.errors import ConfigError
from cpsr.hints.placement import Task, hints_of, place
from cpsr.hints.source import FunctionSource

__all__ = ["Pace", "Round", "rounds_of"]

_RECENT = 8  # measured costs of a checkpoint that count
_SURPRISE = 2.0  # times the longest cost that the next one may take
_LIKE = 1.25  # costs that differ less are taken as equal: so far apart are those of one hint
# Failures so rare that the best places do not depend on how rare, in times of what is left of the loop.
_RARE = 100.0
_SIMULATED = 20_000  # hints to which the rules are applied, at most: 0.1 s


@dataclass(frozen=True)
class Round:
    """A loop whose every repetition comes to the same hints.

    Attributes:
        loop: its number among the loops with hints.
        parts: numbers of hints, and loops inside, in order.
    """

    loop: int
    parts: tuple["int | Round", ...]

    def hints(self) -> Iterator[int]:
        """Numbers of all hints inside, in order."""
        for part in self.parts:
            if isinstance(part, Round):
                yield from part.hints()
            else:
                yield part


def rounds_of(source: FunctionSource) -> list[Round]:
    """The outermost loops of a function with the same hints in every repetition: no branches, no early ends."""
    outer = [loop for loop in source.loops if not any(loop is not one and _inside(loop, one) for one in source.loops)]
    found = [_round(source, loop) for loop in outer]
    return [one for one in found if one is not None]


def _inside(loop: ast.For, other: ast.For) -> bool:
    return any(node is loop for node in ast.walk(other))


def _round(source: FunctionSource, loop: ast.For) -> Round | None:
    if any(isinstance(node, ast.Break | ast.Continue | ast.Return) for node in ast.walk(loop)):
        return None
    if source.numbers(loop.orelse) != (0, -1):
        return None
    parts: list[int | Round] = []
    for statement in loop.body:
        first, _ = source.numbers([statement])
        if statement in source.hints:
            parts.append(first)
        elif first:
            inner = _round(source, statement) if isinstance(statement, ast.For) else None
            if inner is None:
                return None
            parts.append(inner)
    return Round(source.loops.index(loop) + 1, tuple(parts))


@dataclass
class _Hint:
    """What is known of a hint: arrivals, seconds before them, costs, and arrivals since its loop began."""

    arrivals: int = 0
    seconds: float = 0.0
    since: int = 0
    costs: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))


class Pace:
    """Decides at each hint.

    Args:
        allowance: time for checkpoints as a fraction of the function's own; infinite: every hint is one.
        rounds: loops that can be placed.
        hints: how many there are.
        first_seconds: what the first checkpoint may take.
        clock: in seconds.

    Attributes:
        taken_seconds: the function's own time at each checkpoint.
        spent_seconds: for checkpoints.
    """

    def __init__(
        self,
        allowance: float,
        rounds: Sequence[Round],
        hints: int,
        first_seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._allowance, self._first, self._clock = allowance, first_seconds, clock
        self._outer = {one.loop: one for one in rounds}
        self._inner = {one.loop: one for outer in rounds for one in _all(outer)}
        self._hints = {number: _Hint() for number in range(1, hints + 1)}
        self._lengths: dict[int, int] = {}
        self._round: Round | None = None
        self._reached = self._next = 0  # hints of this round, and at how many of them it is placed
        self._every: dict[int, int] | None = None  # hint -> in which repetition it is a checkpoint
        self._pending = False
        self.taken_seconds: list[float] = []
        self.begin()

    def begin(self) -> None:
        """The function begins, or goes on, now."""
        self._began = self._mark = self._clock()
        self.spent_seconds = self._last = 0.0

    def costs(self) -> dict[str, list[float]]:
        """The last measured costs of checkpoints by hint, for a call that goes on."""
        return {str(number): list(hint.costs) for number, hint in self._hints.items() if hint.costs}

    def learn(self, costs: Mapping[str, Sequence[float]]) -> None:
        """Take the costs of the call before."""
        for number, known in costs.items():
            self._hints[int(number)].costs.extend(known)

    def own_seconds(self) -> float:
        """The function's own time, without checkpoints."""
        return self._clock() - self._began - self.spent_seconds

    def entered(self, loop: int, length: int) -> None:
        """A loop begins, with so many repetitions; 0: unknown."""
        self._lengths[loop] = length
        if loop in self._outer:
            self._round, self._every, self._reached, self._next = self._outer[loop], None, 0, 1
        if loop in self._inner and length != 1:
            for part in self._inner[loop].parts:
                if isinstance(part, int):
                    self._hints[part].since = 0

    def due(self, number: int) -> bool:
        """Whether this hint, at which the function has arrived, is a checkpoint."""
        now, hint = self._clock(), self._hints[number]
        hint.arrivals, hint.since = hint.arrivals + 1, hint.since + 1
        hint.seconds += now - self._mark
        self._mark = now
        if math.isinf(self._allowance):
            return True
        self._choose(number)
        so_far = self.spent_seconds, self.own_seconds(), self._last
        self._pending, due = self._rule(self._every, self._pending, number, hint.since, so_far)
        return due

    def _rule(
        self,
        every: Mapping[int, int] | None,
        pending: bool,
        number: int,
        since: int,
        so_far: tuple[float, float, float],
    ) -> tuple[bool, bool]:
        """Whether a chosen hint waits to be taken, and whether this one is taken.

        One that is not chosen is taken, too, where the next one that is can still be afforded. So far are the seconds
        for checkpoints, those of the function, and those at the last checkpoint.
        """
        spent, own, last = so_far
        pending = pending or every is None or (number in every and since % every[number] == 0)
        kept = 0.0 if pending or not every else max(map(self._cost, every))
        affordable = spent + self._cost(number) + kept <= self._allowance * own
        if affordable and every is None:
            costs = self._costs(number)
            affordable = sum(costs) / len(costs) <= self._allowance * (own - last)
        return pending, affordable

    def took(self, number: int, seconds: float, *, checkpoint: bool) -> None:
        """So long was spent at a hint, on a checkpoint or on finding out whether one can be made."""
        if checkpoint:
            self._last = self.own_seconds() - seconds
            self.taken_seconds.append(self._last)
            if not self._hints[number].costs:  # a guess has taken its place so far
                self._next = self._reached + 1
            self._hints[number].costs.append(seconds)
            self._pending = False
        self._spend(seconds)

    def _spend(self, seconds: float) -> None:
        self.spent_seconds += seconds
        self._mark = self._clock()

    def _cost(self, number: int) -> float:
        return _SURPRISE * max(self._costs(number))

    def _costs(self, number: int) -> Sequence[float]:
        """The last costs of a hint; without any of its own those of all."""
        own = self._hints[number].costs
        return own or [one for hint in self._hints.values() for one in hint.costs] or [self._first]

    def _choose(self, number: int) -> None:
        """Place the checkpoints of a loop once enough is known of it; forget them where it has ended."""
        current = self._round
        if current is None:
            return
        inside = list(current.hints())
        if number not in inside:
            self._round = self._every = None
            return
        self._reached += 1
        if self._reached < self._next or not all(self._hints[one].arrivals for one in inside):
            return
        started = self._clock()
        self._next = 2 * self._reached
        lengths = [self._lengths.get(one.loop, 0) for one in _all(current)]
        if all(lengths):
            self._place_rest(current, lengths[0] - self._reached // self._hints_in(current))
        self._spend(self._clock() - started)

    def _place_rest(self, current: Round, left: int) -> None:
        """Place the checkpoints of the repetitions that are left."""
        if left <= 0:
            return
        self._every = self._placed(current, left)
        for part in current.parts:
            if isinstance(part, int):
                self._hints[part].since = 0

    def _hints_in(self, one: Round) -> int:
        """Hints that one repetition comes to."""
        return sum(
            self._lengths[part.loop] * self._hints_in(part) if isinstance(part, Round) else 1 for part in one.parts
        )

    def _task(self, current: Round, repetitions: int) -> Task:
        costs = {number: sum(hint.costs) / len(hint.costs) for number, hint in self._hints.items() if hint.costs}
        known = list(costs.values()) or [self._first]
        mean = sum(known) / len(known)
        alike = max(known) <= _LIKE * min(known)
        body = tuple(
            self._task(part, self._lengths[part.loop])
            if isinstance(part, Round)
            else Task(
                str(part),
                self._hints[part].seconds / self._hints[part].arrivals,
                mean if alike else costs.get(part, mean),
            )
            for part in current.parts
        )
        return Task(f"loop {current.loop}", repetitions=repetitions, body=body)

    def _placed(self, current: Round, left: int) -> dict[int, int] | None:
        """Hints that are checkpoints, and in which of their repetitions; None: the allowance alone does as well."""
        task, inside = self._task(current, left), list(current.hints())
        seconds = task.total_seconds
        steps = self._steps(current)
        if seconds <= 0 or len(steps) > _SIMULATED:
            return None
        spare = self._allowance * (self.own_seconds() + seconds) - self.spent_seconds
        try:
            placement = place([task], min(1.0, max(0.0, spare / seconds)), _RARE * seconds)
        except ConfigError:
            return None
        every = {inside[one.hint]: one.every for one in placement.checkpoints}
        costs = {number: one.cost_seconds or 0.0 for number, (_, one) in zip(inside, hints_of([task]), strict=True)}
        many = min(left, _SIMULATED // len(steps))
        alone, chosen = (self._lost(steps * many, costs, rule) for rule in (None, every))
        return every if chosen < alone else None

    def _steps(self, current: Round) -> list[int]:
        """What one repetition comes to: hints, and the begins of loops as negative numbers."""
        steps: list[int] = []
        for part in current.parts:
            if isinstance(part, Round):
                steps += [-part.loop, *self._steps(part) * self._lengths[part.loop]]
            else:
                steps.append(part)
        return steps

    def _lost(self, steps: Sequence[int], costs: Mapping[int, float], every: Mapping[int, int] | None) -> float:
        """Sum of the squared times between checkpoints, to which the expected recovery time is proportional."""
        seconds = {number: hint.seconds / hint.arrivals for number, hint in self._hints.items() if hint.arrivals}
        since = dict.fromkeys(costs, 0)
        spent, own, lost, pending = self.spent_seconds, self.own_seconds(), 0.0, False
        last = self._last
        for step in steps:
            if step < 0:
                since |= {part: 0 for part in self._inner[-step].parts if isinstance(part, int)}
                continue
            own, since[step] = own + seconds[step], since[step] + 1
            pending, due = self._rule(every, pending, step, since[step], (spent, own, last))
            if due:
                lost, last, spent, pending = lost + (own - last) ** 2, own, spent + costs[step], False
        return lost + (own - last) ** 2


def _all(outer: Round) -> Iterator[Round]:
    yield outer
    for part in outer.parts:
        if isinstance(part, Round):
            yield from _all(part)
