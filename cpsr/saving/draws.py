"""Which of the batches that a loop has drawn its last step has trained."""

import ctypes
import random
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from cpsr.state.loader import ResumableLoader
from cpsr.state.scalars import DataPosition

__all__ = ["AHEAD_MAX", "LEARNED", "Draw", "Draws", "HostRandomStates"]

AHEAD_MAX = 8  # batches that a loop may draw ahead
LEARNED = 3  # steps of a life that tell how its loop draws
_MT19937_BYTES = 625 * 4  # what NumPy's documented `BitGenerator.ctypes.state_address` points to


@dataclass(frozen=True)
class Draw:
    """One batch that the loop has drawn.

    Attributes:
        stream: gave it.
        before: the position in the data before it.
        host: random states of the host from which it was drawn.
    """

    stream: ResumableLoader
    before: DataPosition
    host: dict[str, Any]


class HostRandomStates:
    """Captures what `capture_host_rng` does in ten microseconds; NumPy's state is read only if it has changed."""

    def __init__(self) -> None:
        self._address = 0
        self._generator: Any = None
        self._seen = b""
        self._numpy: Any = None

    def capture(self) -> dict[str, Any]:
        """The states as plain data."""
        return {"python": random.getstate(), "numpy": self._of_numpy(), "torch": torch.get_rng_state()}

    def _of_numpy(self) -> Any:
        generator = numpy.random.mtrand._rand._bit_generator  # set_bit_generator changes it
        if type(generator).__name__ != "MT19937":
            return numpy.random.get_state()
        if generator is not self._generator:
            self._generator, self._address, self._seen = generator, generator.ctypes.state_address, b""
        now = ctypes.string_at(self._address, _MT19937_BYTES)
        # The second number of a pair of Gaussian ones leaves the generator's own state as it is.
        if now != self._seen or self._numpy[3]:
            self._seen, self._numpy = now, numpy.random.get_state()
        return self._numpy


class Draws:
    """Follows the batches that a loop draws, and its steps: a state belongs to the batches that are trained by then.

    A plain loop has trained all that it has drawn when its step is complete; what it draws then belongs to the next
    step. A loop may draw ahead, and then begins by drawing more batches than its later steps do. So the restarted loop
    draws these batches again. How many there are follows from the draws and the training forwards of the first three
    steps of a life. After the first step alone, those drawn after its last forward are known to be ahead.

    Attributes:
        ahead: batches drawn by the end of the last step, and not trained by it.
        requested: the loop has drawn a batch, or asks for one, since the last step.
        drawn: batches of this life.
        repeats: the loop has taken several steps on one batch.
        by_another_thread: not the one that trains takes the batches.
    """

    def __init__(self) -> None:
        self.ahead = self.drawn = 0
        self.repeats = False
        self.requested = False
        self._thread = threading.get_ident()
        self.by_another_thread = False
        self._recent: deque[Draw] = deque(maxlen=AHEAD_MAX)
        self._ahead: list[Draw] = []
        self._next: Draw | None = None  # the first one since the last step
        self._counts: list[tuple[int, int, int]] = []  # of the first steps: draws, forwards, draws after the last one
        self._depth, self._surplus = 0, 0  # drawn ahead; draws per step without a forward of their own
        self._begin_step()

    def _begin_step(self) -> None:
        self._draws = self._forwards = self._late = 0

    @property
    def untrained(self) -> list[Draw]:
        """Batches drawn by the end of the last step and not trained by it, oldest first."""
        return self._ahead

    @property
    def taken(self) -> list[int]:
        """Batches drawn for each of the first steps of the life."""
        return [draws for draws, _, _ in self._counts]

    @property
    def next(self) -> Draw | None:
        """The first batch drawn since the last step."""
        return self._next

    @property
    def inside(self) -> bool:
        """Whether the loop has no other batch than that of its last step; while it trains, it repeats that one."""
        return self.drawn > 0 and not (self.requested or self._ahead or self.by_another_thread)

    @property
    def unknown(self) -> bool:
        """Whether the steps so far leave open which batches are trained."""
        if not 0 < len(self._counts) < LEARNED or self.by_another_thread:
            return False
        draws, forwards, late = self._counts[0]
        return draws > forwards > 0 and not late

    def add(self, draw: Draw) -> None:
        """The loop has drawn a batch."""
        self.by_another_thread |= threading.get_ident() != self._thread
        self.drawn += 1
        self._draws += 1
        self._late += 1
        self._next = self._next or draw
        self._recent.append(draw)

    def forward(self) -> None:
        """A training forward begins."""
        self._forwards += 1
        self._late = 0

    def step(self) -> None:
        """A step is complete."""
        self.repeats |= self.drawn > 0 and not self._draws and not self._ahead
        if len(self._counts) < LEARNED:
            self._learn()
        else:
            surplus = self._draws - self._forwards - self._surplus
            self.ahead = min(max(self.ahead + surplus, 0), self._depth)
        if self.by_another_thread:
            self.ahead = 0
        self._ahead = list(self._recent)[-self.ahead :] if self.ahead else []
        self._next, self.requested = None, False
        self._begin_step()

    def _learn(self) -> None:
        counts = self._counts
        counts.append((self._draws, self._forwards, self._late))
        (draws, forwards, late), (again, forwards_again, _) = counts[0], counts[-1]
        self._surplus = again - forwards_again
        excess = draws - forwards - self._surplus
        shown = late if forwards and all(one[2] == late for one in counts) else 0
        if len(counts) == 1:
            self.ahead = shown
        elif len(counts) < LEARNED:
            self.ahead = shown if excess == shown else 0
        else:
            steady = forwards > 0 and counts[1][0] - counts[1][1] == self._surplus
            alike = counts[1] == counts[2] and again > 0 and draws - again <= excess
            depth = shown if shown == excess else draws - again if alike else 0
            self._depth = self.ahead = depth if steady and 0 < depth <= AHEAD_MAX else 0

    def restart(self) -> None:
        """The state is another one, and no batch has been drawn from it."""
        self._recent.clear()
        self.ahead, self._ahead, self._next, self.requested = 0, [], None, False
        self._begin_step()
