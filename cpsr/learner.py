"""Lets the predictor learn from committed checkpoints beside the training: in a thread of its own, within a budget."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from cpsr.checkpoint.history import DiskHistory
from cpsr.predictor.protocol import StatePredictor

__all__ = ["Learner"]

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

THREAD_NAME = "cpsr-learner"
# Longer than any slice: a thread that does not end by then hangs in the file system, and the exit does not wait for it.
CLOSE_SECONDS = 5.0


class Learner:
    """Owns the predictor while training runs: whoever else uses it then holds it with `held()`.

    Between two slices it sleeps, so that its share of a core stays within the budget. Where checkpoints come faster
    than it can take them in, it goes on with the newest. A failure in it never reaches training: what was learned up
    to the last complete checkpoint is kept, learning ends for this life, and `failure` says why.

    Args:
        predictor: what learns.
        budget_fraction: of one core, in [0, 1]; 0 never starts the thread.
    """

    def __init__(self, predictor: StatePredictor, budget_fraction: float) -> None:
        self._predictor = predictor
        self._budget_fraction = budget_fraction
        self._lock = threading.Lock()
        self._wanted: tuple[int, int] | None = None  # newest checkpoint, and the first iteration of its history
        self._generation = 0  # grows whenever somebody else changed the predictor: work under way is then dropped
        self._checked: set[int] = set()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._failure: str | None = None
        self._thread: threading.Thread | None = None

    def start(self, store_directory: Path, rank: int) -> None:
        """Begin to follow the checkpoints of a run.

        Args:
            store_directory: the run's `checkpoints`.
            rank: whose part is read.
        """
        if self._budget_fraction > 0:
            arguments = store_directory, rank
            self._thread = threading.Thread(target=self._run, args=arguments, name=THREAD_NAME, daemon=True)
            self._thread.start()

    def notify(self, iteration: int, history_start: int) -> None:
        """This checkpoint is the newest one that this rank knows of; returns at once.

        Ranks other than 0 know when they have written theirs: where it is not committed yet, it is taken in with the
        next.

        Args:
            iteration: of the checkpoint.
            history_start: checkpoints before it do not lead here.
        """
        if self._wanted != (iteration, history_start):
            self._wanted = iteration, history_start
            self._wake.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """The predictor is not touched by the thread inside the block; waits for one slice at most.

        What the thread was about to take in is dropped: the block may change the predictor or the checkpoints.
        """
        self._generation += 1  # before the lock: the thread would otherwise take it again, slice after slice
        with self._lock:
            self._wanted = None
            self._wake.clear()
            yield

    def state_dict(self) -> dict[str, Any]:
        """What the predictor has learned from complete checkpoints; waits for one slice at most."""
        with self._lock:
            return self._predictor.state_dict()

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """Ask the predictor something that changes nothing; waits for one slice at most."""
        with self._lock:
            return question()

    def record(self, outcome: dict[str, Any]) -> None:
        """Hand the predictor an outcome; waits for one slice at most."""
        with self._lock:
            self._predictor.record(outcome)

    def failure(self) -> str | None:
        """Why learning has ended in this life, once; None otherwise."""
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """Stop after the present slice and join the thread."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                logger.warning("the learner's thread did not end within %g s; it is left behind", CLOSE_SECONDS)

    def _run(self, store_directory: Path, rank: int) -> None:
        try:
            while self._wake.wait():
                with self._lock:
                    self._wake.clear()
                    wanted, generation = self._wanted, self._generation
                if self._closing.is_set():  # looked at after clearing, or an end in between would be missed
                    return
                if wanted is not None:
                    self._take_in(store_directory, rank, *wanted, generation)
        except Exception as error:
            self._failure = (
                f"the predictor stopped learning for the rest of this life ({type(error).__name__}: {error}); what it "
                "had learned from complete checkpoints is kept, training is not affected"
            )
            logger.exception("learning from checkpoints failed")

    def _take_in(self, store_directory: Path, rank: int, iteration: int, history_start: int, generation: int) -> None:
        started = time.perf_counter()
        # Without partial checkpoints: what all ranks learn from was taken at one time.
        history = DiskHistory(
            store_directory, rank, before=iteration + 1, since=history_start, checked=self._checked, partial=False
        )
        try:
            self._checked = {entry.iteration for entry in history.entries}
            self._rest(time.perf_counter() - started)  # it has hashed what is new
            work = self._predictor.learn(history)
            while not self._closing.is_set():
                started = time.perf_counter()
                with self._lock:
                    if self._generation != generation:
                        self._checked = set()  # the same iterations may have been saved anew
                        return
                    if next(work, self) is self:  # a value that no slice yields
                        return
                self._rest(time.perf_counter() - started)
        finally:
            history.close()

    def _rest(self, used_seconds: float) -> None:
        """Pause for as long as keeps the budget."""
        self._closing.wait(used_seconds / self._budget_fraction - used_seconds)
