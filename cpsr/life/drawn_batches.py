"""Which of the batches that a loop has drawn its last step has trained."""

import logging
import threading
from collections import deque

from cpsr.job import Job
from cpsr.state.loader import Draw

__all__ = ["AHEAD_MAX", "NO_BATCHES", "DrawWarnings", "Draws"]

AHEAD_MAX = 8  # batches that a loop may draw ahead
LEARNED = 3  # steps of a life that tell how its loop draws

NO_BATCHES = (
    "no batch came from recovery.resume in the first {} steps. If these steps train, checkpoints hold no position in "
    "the data: after a restart the script begins its data anew. Take the batches from recovery.resume(loader), or from "
    "recovery.resume(get_batch) where a function draws them at random. If these steps prepare the training, as a "
    "learning-rate finder does, take them before the run is opened: CPSR counts them as steps of the training"
)
OTHER_THREAD = (
    "another thread takes the batches: a restart goes on after the last batch that was taken, and those that wait for "
    "the training thread are never trained on. Iterate over recovery.resume(loader) in the training loop itself, and "
    "leave fetching ahead to the DataLoader: num_workers=..., prefetch_factor=..."
)


class Draws:
    """Follows the batches that a loop draws, and its steps: a state belongs to the batches that are trained by then.

    A plain loop has trained all that it has drawn when its step is complete; what it draws then belongs to the next
    step. A loop may draw ahead, and then begins by drawing more batches than its later steps do. So the restarted loop
    draws these batches again. How many there are follows from the draws and the training forwards of the first three
    steps of a life. After the first step alone, those drawn after its last forward are known to be ahead.

    Attributes:
        untrained: batches drawn by the end of the last step and not trained by it, oldest first.
        next: the first batch drawn since the last step.
        first: the first that is not trained, of both.
        requested: the loop has drawn a batch, or asks for one, since the last step.
        drawn: batches of this life.
        counts: of each of the first steps: draws, forwards, and draws after the last forward.
        repeats: the loop has taken several steps on one batch.
        by_another_thread: not the one that trains takes the batches.
    """

    def __init__(self) -> None:
        self.drawn = self._ahead = 0
        self.repeats = self.requested = self.by_another_thread = False
        self.untrained: list[Draw] = []
        self.next: Draw | None = None
        self.first: Draw | None = None
        self.counts: list[tuple[int, int, int]] = []
        self._thread = threading.get_ident()
        self._recent: deque[Draw] = deque(maxlen=AHEAD_MAX)
        self._depth, self._surplus = 0, 0  # drawn ahead; draws per step without a forward of their own
        self._draws = self._forwards = self._late = 0  # since the last step; draws since its last forward

    @property
    def inside(self) -> bool:
        """Whether the loop has no other batch than that of its last step; while it trains, it repeats that one."""
        return self.drawn > 0 and not (self.requested or self.untrained or self.by_another_thread)

    def add(self, draw: Draw) -> None:
        """The loop has drawn a batch."""
        self.by_another_thread |= threading.get_ident() != self._thread
        self.drawn += 1
        self._draws += 1
        self._late += 1
        self.next, self.first = self.next or draw, self.first or draw
        self._recent.append(draw)

    def forward(self) -> None:
        """A training forward begins."""
        self._forwards += 1
        self._late = 0

    def step(self) -> None:
        """A step is complete."""
        self.repeats |= self.drawn > 0 and not self._draws and not self.untrained
        if len(self.counts) < LEARNED:
            self._learn()
        elif self._depth:
            surplus = self._draws - self._forwards - self._surplus
            self._ahead = min(max(self._ahead + surplus, 0), self._depth)
        if self.by_another_thread:
            self._ahead = 0
        self._begin_step(list(self._recent)[-self._ahead :] if self._ahead else [])

    def _begin_step(self, untrained: list[Draw]) -> None:
        self.untrained, self.next, self.requested = untrained, None, False
        self.first = untrained[0] if untrained else None
        self._draws = self._forwards = self._late = 0

    def _learn(self) -> None:
        counts = self.counts
        counts.append((self._draws, self._forwards, self._late))
        (draws, forwards, late), (again, forwards_again, _) = counts[0], counts[-1]
        self._surplus = again - forwards_again
        excess = draws - forwards - self._surplus
        shown = late if forwards and all(one[2] == late for one in counts) else 0
        if len(counts) == 1:
            self._ahead = shown
        elif len(counts) < LEARNED:
            self._ahead = shown if excess == shown else 0
        else:
            steady = forwards > 0 and counts[1][0] - counts[1][1] == self._surplus
            alike = counts[1] == counts[2] and again > 0 and draws - again <= excess
            depth = shown if shown == excess else draws - again if alike else 0
            self._depth = self._ahead = depth if steady and 0 < depth <= AHEAD_MAX else 0

    def restart(self) -> None:
        """The state is another one, and no batch has been drawn from it."""
        self._recent.clear()
        self._ahead = 0
        self._begin_step([])


class DrawWarnings:
    """Reports, once and on rank 0, loops whose batches a checkpoint cannot follow.

    Attributes:
        learns: `after_step` is still to be called after each step.
    """

    def __init__(self, job: Job, draws: Draws) -> None:
        self._job, self._draws = job, draws
        self._first = job.adapter.iteration
        self._said = False
        self.learns = True

    def after_step(self) -> None:
        """A step is complete."""
        if self.learns and len(self._draws.counts) == LEARNED:
            self.learns = False
            if self._draws.drawn:
                self._compare([draws for draws, _, _ in self._draws.counts])

    def at_checkpoint(self) -> None:
        """A checkpoint begins; without a batch from `resume` it has no position in the data."""
        if not self._draws.drawn and self._job.config.mode == "exact" and self._job.adapter.pipeline is None:
            self._say("no batches from resume", NO_BATCHES.format(self._job.adapter.iteration - self._first))

    def _compare(self, taken: list[int]) -> None:
        adapter = self._job.adapter
        expected, later = adapter.micro_batches_per_iteration, taken[1:]  # the first may take some ahead
        if self._draws.by_another_thread:
            self._say("batches ahead", OTHER_THREAD)
        elif self._job.config.mode != "exact" and later != [expected] * len(later):
            # A restart near the failure continues without a checkpoint at its iteration.
            steady = f"Pass TorchAdapter(model, optimizer, scheduler, micro_batches_per_iteration={later[0]})"
            self._say(
                "batches per step",
                f"the loop takes {', '.join(map(str, taken))} batches for its first steps, and CPSR expects {expected} "
                "for each: a restart near the failure would continue at the wrong batch. "
                f"{steady if later[0] and len(set(later)) == 1 else 'Set mode: exact'}",
            )

    def _say(self, kind: str, message: str) -> None:
        if not self._said and self._job.group.rank == 0:
            self._job.journal.event(kind, message, self._job.adapter.iteration, logging.WARNING)
        self._said = True
