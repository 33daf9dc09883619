"""Lets the predictor learn from committed checkpoints beside the training: in a thread of its own, at a pace."""

import copy
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from cpsr.checkpoint.history import DiskHistory, ReadManifest
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CheckpointError
from cpsr.predictor.protocol import StatePredictor

__all__ = ["BudgetPace", "Learner", "Pace"]

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

THREAD_NAME = "cpsr-learner"
# Longer than any slice. Who waits for one longer goes on without: it hangs, in the file system most likely. Nor does
# the exit wait longer for the thread.
SLICE_LIMIT_SECONDS = 5.0
# To look whether rank 0 has committed what this rank has written: often enough to learn from it before the next one,
# and more and more rarely where that does not come.
COMMIT_POLL_SECONDS = 0.1
COMMIT_POLL_MAX_SECONDS = 5.0
_LEARNED = object()  # what work yields when only tidying up is left
_DONE = object()  # no value that work yields


class Pace(Protocol):
    """When slices may run; called on the learner's thread."""

    def before_slice(self) -> None:
        """Wait until a slice may run, or until the pace was closed."""

    def after_slice(self, used_seconds: float, processor_seconds: float) -> None:
        """A slice has just ended: how long it took, and how much of that on a processor."""

    def close(self) -> None:
        """Let nobody wait any more; on any thread."""


class BudgetPace:
    """Rests between slices, so that they take a fixed share of the time.

    Args:
        fraction: of one core, in (0, 1].
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._due = 0.0
        self._closing = threading.Event()

    def rest_seconds(self) -> float:
        """How long until the next slice may run."""
        return max(self._due - time.perf_counter(), 0.0)

    def before_slice(self) -> None:
        """Rest for what is left."""
        self._closing.wait(self.rest_seconds())

    def after_slice(self, used_seconds: float, processor_seconds: float) -> None:
        """The next one may run when this one is a small enough share of the time."""
        self._due = max(self._due, time.perf_counter() + used_seconds / self._fraction - used_seconds)

    def close(self) -> None:
        """End the rest."""
        self._closing.set()


class Learner:
    """Owns the predictor while training runs: whoever else uses it then holds it with `held()`.

    The thread learns on a copy; what it has learned becomes the predictor's when a checkpoint is taken in, all at once.
    Where checkpoints come faster than that, it goes on with the newest. A failure in it never reaches training:
    nothing else ever waits for a slice longer than `SLICE_LIMIT_SECONDS`, what was learned up to the last complete
    checkpoint is kept and saved with the next ones, learning ends for this life, and `failure` says why. A recovery
    then predicts from what is kept; all ranks must do so alike, so that no rank falls back further by itself.

    Args:
        predictor: what learns; a plain object whose `learn` replaces attributes and changes none in place.
        pace: of the slices; None never starts the thread.
    """

    def __init__(self, predictor: StatePredictor, pace: Pace | None) -> None:
        self._predictor = predictor
        self._pace = pace
        self._lock = threading.Lock()  # of the predictor; another one after the thread was left behind with it
        self._replacing = threading.Lock()  # of the lock itself, and of what the thread hands over; never held for long
        self._wanted: tuple[int, int] | None = None  # newest checkpoint, and the first iteration of its history
        self._generation = 0  # grows whenever somebody else changed the predictor: work under way is then dropped
        self._known: dict[int, ReadManifest] = {}
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._failure: str | None = None
        self._slice_began: float | None = None
        self._ended = self._left_behind = self._told_unreadable = False
        self._complete: dict[str, Any] = {}  # the last state that could be had
        self._thread: threading.Thread | None = None

    def start(self, store: CheckpointStore, rank: int, *, learns: bool = True) -> None:
        """Begin to follow the checkpoints of a run; on the training thread, before it trains.

        Whether anything is learned or not, torch's number of threads is set to what it is: that changes a little of how
        the process computes (`_compute_alone`), which must not depend on whether it learns.

        Args:
            store: of this rank.
            rank: whose part is read.
            learns: False never starts the thread.
        """
        usual = torch.get_num_threads()
        if self._pace is not None and learns:
            self._complete = self._predictor.state_dict()
            alone = threading.Event()
            arguments = store, rank, alone
            self._thread = threading.Thread(target=self._run, args=arguments, name=THREAD_NAME, daemon=True)
            self._thread.start()
            alone.wait()
        torch.set_num_threads(usual)

    def notify(self, iteration: int, history_start: int) -> None:
        """This checkpoint is the newest one that this rank knows of; returns at once.

        Ranks other than 0 know when they have written theirs: it is taken in when it is committed. Where the next one
        is written before that, those before it are.

        Args:
            iteration: of the checkpoint.
            history_start: checkpoints before it do not lead here.
        """
        if self._wanted != (iteration, history_start):
            self._wanted = iteration, history_start
            self._wake.set()

    @contextmanager
    def held(self, *, other_checkpoints: bool = True) -> Iterator[None]:
        """The predictor is not touched by the thread inside the block; waits for one slice at most.

        What the thread was about to take in is dropped: the block may change the predictor or the checkpoints.

        Args:
            other_checkpoints: the same iterations may be saved anew after the block.
        """
        self._generation += 1  # before the lock: the thread would otherwise take it again, slice after slice
        with self._taken():
            self._wanted = None
            self._wake.clear()
            if other_checkpoints:
                self._known = {}
            yield

    def state_dict(self) -> dict[str, Any]:
        """What the predictor has learned from complete checkpoints; waits for one slice at most.

        Where the predictor cannot say, it is the last state that it could.
        """
        with self._taken():
            try:
                self._complete = self._predictor.state_dict()
            except Exception as error:  # whatever it is, the checkpoint can be saved without it
                logger.exception("the predictor could not say what it has learned")
                self._end(f"it could not say what it has learned: {_told(error)}")
            return self._complete

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """Ask the predictor something that changes nothing; waits for one slice at most."""
        with self._taken():
            return question()

    def record(self, outcome: dict[str, Any]) -> None:
        """Hand the predictor an outcome; waits for one slice at most."""
        with self._taken():
            try:
                self._predictor.record(outcome)
            except Exception as error:  # whatever it is, training goes on
                logger.exception("the predictor refused an outcome")
                self._end(f"it refused the outcome of a recovery: {_told(error)}")

    def failure(self) -> str | None:
        """Why learning has ended in this life, once; None otherwise."""
        lock = self._lock
        if self._hangs():
            self._leave_behind(lock)
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """Stop after the present slice and join the thread."""
        self._closing.set()
        self._wake.set()
        if self._pace is not None:
            self._pace.close()
        if self._thread is not None:
            self._thread.join(0.0 if self._left_behind else SLICE_LIMIT_SECONDS)
            if self._thread.is_alive():
                logger.warning("the learner's thread did not end within %g s; it is left behind", SLICE_LIMIT_SECONDS)

    # What the training thread and others do without the thread, where they must

    @contextmanager
    def _taken(self) -> Iterator[None]:
        """Hold the predictor; from a slice that does not end it is taken away."""
        while not (lock := self._lock).acquire(timeout=SLICE_LIMIT_SECONDS):
            if self._hangs():  # or it is held by a rehearsal, say, which takes as long as it takes
                self._leave_behind(lock)
        try:
            yield
        finally:
            lock.release()

    def _hangs(self) -> bool:
        began = self._slice_began
        return began is not None and time.perf_counter() - began > SLICE_LIMIT_SECONDS

    def _leave_behind(self, lock: threading.Lock) -> None:
        """Whoever holds this lock keeps it; what it does to its copy of the predictor will not count."""
        with self._replacing:
            if self._lock is not lock:
                return  # another thread did so a moment ago
            self._lock, self._slice_began = threading.Lock(), None
            self._left_behind = True
        self._end(f"a piece of its work did not end within {SLICE_LIMIT_SECONDS:g} s")

    def _end(self, why: str) -> None:
        """Learn no more in this life."""
        if not self._ended:
            self._ended = True
            self._failure = (
                f"the predictor stopped learning for the rest of this life ({why}); what it had learned from complete "
                "checkpoints is kept, saved with the next ones and used by a recovery, training is not affected"
            )

    # On the learner's thread

    def _run(self, store: CheckpointStore, rank: int, alone: threading.Event) -> None:
        try:
            try:
                _compute_alone()
            finally:
                alone.set()  # the training thread waits for it
            while not self._stopping() and self._wake.wait():
                with self._lock:
                    self._wake.clear()
                    wanted, generation = self._wanted, self._generation
                    student = copy.copy(self._predictor)
                if self._stopping():  # looked at after clearing, or an end in between would be missed
                    return
                if wanted is None:
                    continue
                self._await_commit(store, wanted[0], generation)
                if not self._stopping():
                    self._learn_from(student, self._work(student, store.directory, rank, *wanted), generation)
        except Exception as error:
            logger.exception("learning from checkpoints failed")
            self._end(_told(error))

    def _learn_from(self, student: StatePredictor, work: Generator[object, None, None], generation: int) -> None:
        """Take one checkpoint in; where the file system shows none of them now, the next one is waited for."""
        try:
            with closing(work):
                self._take_in(student, work, generation)
        except _NothingToSeeError as error:
            if not self._told_unreadable:
                logger.warning("nothing is learned until checkpoints can be read again: %s", error)
            self._told_unreadable = True
        else:
            self._told_unreadable = False

    def _await_commit(self, store: CheckpointStore, iteration: int, generation: int) -> None:
        """Until the checkpoint is committed or given up, or the next one is written.

        What was committed by then is taken in.
        """
        pause = COMMIT_POLL_SECONDS
        while not self._stopping() and self._generation == generation and not _is_settled(store, iteration):
            if self._wake.wait(pause):
                return
            pause = min(2 * pause, COMMIT_POLL_MAX_SECONDS)

    def _stopping(self) -> bool:
        return self._closing.is_set() or self._ended

    def _take_in(self, student: StatePredictor, work: Iterator[object], generation: int) -> None:
        """Learn from one checkpoint at the pace, and hand over what was learned."""
        before = dict(vars(student))
        while True:
            pace = self._pace
            assert pace is not None  # or there is no thread
            pace.before_slice()
            if self._stopping():  # a pace that was closed lets everybody pass
                return
            lock = self._lock
            if not lock.acquire(blocking=False):
                with lock:  # somebody else has the predictor; the pace's moment may be over when they are done
                    continue
            try:
                if self._generation != generation:
                    return
                done = self._slice(work, pace)
                if done is _LEARNED:
                    self._hand_over(student, before, lock)
                elif done is _DONE:
                    return
            finally:
                lock.release()

    def _work(
        self, student: StatePredictor, store_directory: Path, rank: int, iteration: int, history_start: int
    ) -> Generator[object, None, None]:
        # Without partial checkpoints: what all ranks learn from was taken at one time.
        history = DiskHistory(
            store_directory,
            rank,
            before=iteration + 1,
            since=history_start,
            known=self._known,
            partial=False,
            opened=False,
        )
        try:
            try:
                yield from history.open()
            except OSError as error:  # of the directory itself: what a single checkpoint refuses is left out
                raise _NothingToSeeError(_told(error)) from error
            self._known = history.known
            yield None
            yield from student.learn(history)
            yield _LEARNED
            yield from history.close_in_pieces()
        finally:
            history.close()

    def _slice(self, work: Iterator[object], pace: Pace) -> object:
        """One piece of work, and what it yields; `_DONE` when there is none left."""
        began, processor_began = time.perf_counter(), time.thread_time()
        self._slice_began = began
        try:
            return next(work, _DONE)
        finally:
            self._slice_began = None
            pace.after_slice(time.perf_counter() - began, time.thread_time() - processor_began)

    def _hand_over(self, student: StatePredictor, before: dict[str, Any], lock: threading.Lock) -> None:
        """What `learn` has replaced in the copy becomes the predictor's own; outcomes that came meanwhile stay."""
        learned = {name: value for name, value in vars(student).items() if before.get(name) is not value}
        with self._replacing:
            if self._lock is lock:  # else this thread was left behind, and the predictor is in use
                vars(self._predictor).update(learned)


class _NothingToSeeError(Exception):
    """The directory of checkpoints cannot be looked through now."""


def _is_settled(store: CheckpointStore, iteration: int) -> bool:
    try:
        return store.is_settled(iteration)
    except (CheckpointError, OSError, ValueError, TypeError, KeyError) as error:  # of a damaged marker, the last three
        logger.debug("whether checkpoint %d is committed cannot be said now: %s", iteration, error)
        return False


def _compute_alone() -> None:
    """Let torch compute on the calling thread only, so that a share of one core is not one of all cores.

    How many threads torch takes belongs to the thread that calls it, for OpenMP, MKL and oneDNN alike. But who has not
    computed yet begins with the number that was set last in the process, which is therefore to be set again at once.
    And whatever the number, setting it tells MKL in the whole process not to choose fewer threads by itself, which
    cannot be undone (seen with torch 2.13).
    """
    torch.get_num_threads()  # or the first computation here would begin with the process's number, too
    torch.set_num_threads(1)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
