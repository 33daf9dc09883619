"""The thread in which the predictor learns from committed checkpoints beside the training."""

import copy
import logging
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.history import DiskHistory, RankSlices, ReadManifest
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CheckpointError
from cpsr.learning.pace import Pace
from cpsr.predictor.line import LinePredictor

__all__ = ["Learner"]

logger = logging.getLogger(__name__)

THREAD_NAME = "cpsr-learner"
# Longer than any slice. A slice that takes longer hangs, most likely in the file system: it is reported, and the exit
# does not wait longer for the thread.
SLICE_LIMIT_SECONDS = 5.0
# Polls for rank 0's commit of what this rank has written: often enough to learn from it before the next checkpoint, and
# less and less often if it does not come.
COMMIT_POLL_SECONDS = 0.1
COMMIT_POLL_MAX_SECONDS = 5.0
_DONE, _UNREADABLE = object(), object()  # the end of the work, and that nothing can be read now


class Learner:
    """Owns the predictor while training runs; other users change it inside `locked()` only.

    The thread learns on a copy, and the predictor gets what each slice of work has replaced there: nobody waits for a
    slice. If a checkpoint is newer, the thread takes the one under way in, leaves out the rest of its training, and
    continues with the newest. Its failures never reach training: learning ends for this life, and `failure` returns
    why. What was learned is kept, saved with the next checkpoints, and a recovery predicts from it.

    Args:
        predictor: learns; a plain object whose `learn` replaces attributes and changes none in place.

    Attributes:
        pace: of the slices; None before the start, and if nothing is learned.
    """

    def __init__(self, predictor: LinePredictor) -> None:
        self._predictor = predictor
        self.pace: Pace | None = None
        self._lock = threading.Lock()  # of the predictor; the thread holds it for a hand-over, which is microseconds
        self._wanted: tuple[int, int] | None = None  # newest checkpoint, and the first iteration of its history
        self._generation = 0  # grows when another thread may change the predictor, which drops the work under way
        self._handed_over = 0  # how often the predictor got what was learned
        self._known: dict[int, ReadManifest] = {}
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._failure: str | None = None
        self._slice_began: float | None = None
        self._ended = self._unreadable_logged = False
        self._thread: threading.Thread | None = None

    def start(self, store: CheckpointStore, part: RankSlices, pace: Pace | None) -> None:
        """Begin to follow the checkpoints of a run; on the training thread, before it trains.

        In every case this sets torch's number of threads to its present value. Setting it changes some results of the
        process (`_compute_alone`), and these must not depend on whether it learns.

        Args:
            store: of this rank.
            part: what the rank owns.
            pace: of the slices; None starts no thread.
        """
        usual, self.pace = torch.get_num_threads(), pace
        if pace is not None:
            alone = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(store, part, alone), name=THREAD_NAME, daemon=True)
            self._thread.start()
            alone.wait()
        torch.set_num_threads(usual)

    def notify(self, iteration: int, history_start: int) -> None:
        """Set the newest checkpoint that this rank knows of; returns at once.

        Ranks other than 0 only know that they have written their part: the thread waits for the commit. If the next one
        is written before that, the thread learns from the checkpoints committed by then.

        Args:
            iteration: of the checkpoint.
            history_start: checkpoints before this iteration do not lead here.
        """
        if self._wanted != (iteration, history_start):
            self._wanted = iteration, history_start
            self._wake.set()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the thread from changing the predictor inside the block.

        The thread drops its work under way: the block may change the predictor or the checkpoints.
        """
        with self._lock:
            self._generation += 1
            self._wanted = None
            self._wake.clear()
            self._known = {}
            yield

    def state_dict(self) -> dict[str, Any]:
        """What the predictor has learned from complete checkpoints; nothing if it fails to say."""
        with self._lock:
            try:
                return self._predictor.state_dict()
            except Exception as error:  # after any error the checkpoint can be saved without it
                logger.exception("the predictor failed to return what it has learned")
                self._end(f"it failed to return what it has learned: {_description(error)}")
                return {}

    def failure(self) -> str | None:
        """Why learning has ended in this life, once; None otherwise."""
        began = self._slice_began
        if began is not None and time.perf_counter() - began > SLICE_LIMIT_SECONDS:
            self._end(f"a piece of its work did not end within {SLICE_LIMIT_SECONDS:g} s")
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """Stop after the current slice and join the thread."""
        self._closing.set()
        self._wake.set()
        if self.pace is not None:
            self.pace.close()
        if self._thread is not None:
            self._thread.join(0.0 if self._ended and self._slice_began is not None else SLICE_LIMIT_SECONDS)
            if self._thread.is_alive():
                logger.warning("the learner's thread did not end within %g s; it is abandoned", SLICE_LIMIT_SECONDS)

    def _end(self, why: str) -> None:
        """End learning for this life."""
        if not self._ended:
            self._ended = True
            self._failure = (
                f"the predictor stopped learning for the rest of this life ({why}); a recovery uses what it had "
                "learned from complete checkpoints, training is not affected"
            )

    # On the learner's thread

    def _run(self, store: CheckpointStore, part: RankSlices, alone: threading.Event) -> None:
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
                if self._stopping():  # checked after clearing, or an end in between would be missed
                    return
                if wanted is None:
                    continue
                self._await_commit(store, wanted[0], generation)
                if not self._stopping():
                    self._learn_from(student, self._work(student, store.directory, part, *wanted), generation)
        except Exception as error:
            logger.exception("learning from checkpoints failed")
            self._end(_description(error))

    def _stopping(self) -> bool:
        return self._closing.is_set() or self._ended

    def _await_commit(self, store: CheckpointStore, iteration: int, generation: int) -> None:
        """Wait until the checkpoint is committed or given up, or the next one is written.

        The thread then learns from the checkpoints committed by then.
        """
        pause = COMMIT_POLL_SECONDS
        while not self._stopping() and self._generation == generation and not _is_settled(store, iteration):
            if self._wake.wait(pause):
                return
            pause = min(2 * pause, COMMIT_POLL_MAX_SECONDS)

    def _learn_from(self, student: LinePredictor, work: Generator[object, None, None], generation: int) -> None:
        """Learn from one checkpoint at the pace; if the directory cannot be read now, wait for the next one."""
        assert self.pace is not None  # or there is no thread
        before = dict(vars(student))
        done: object = None
        with closing(work):
            while done is not _DONE:
                self.pace.before_slice()
                if self._stopping():  # a closed pace does not wait
                    return
                done = self._slice(work, self.pace)
                if done is _UNREADABLE:
                    return
                if not self._hand_over(student, before, generation):
                    return

    def _work(
        self, student: LinePredictor, directory: Path, part: RankSlices, iteration: int, history_start: int
    ) -> Generator[object, None, None]:
        history = DiskHistory(
            directory, part, before=iteration + 1, since=history_start, known=self._known, opened=False
        )
        try:
            try:
                yield from history.open()
            except OSError as error:  # of the directory itself; a single unreadable checkpoint is left out
                if not self._unreadable_logged:
                    logger.warning("the predictor learns nothing until checkpoints can be read again: %s", error)
                self._unreadable_logged = True
                yield _UNREADABLE
                return
            self._unreadable_logged = False
            self._known = history.known
            yield None
            handed_over = self._handed_over
            for _ in student.learn(history):
                yield None
                if self._wake.is_set() and self._handed_over != handed_over:
                    break  # this one is taken in, and a newer one waits for that
            yield from history.close_in_pieces()
        finally:
            history.close()

    def _slice(self, work: Iterator[object], pace: Pace) -> object:
        """Run one piece of work and return what it yields; `_DONE` at its end."""
        began, processor_began = time.perf_counter(), time.thread_time()
        self._slice_began = began
        done = next(work, _DONE)
        self._slice_began = None
        pace.after_slice(time.perf_counter() - began, time.thread_time() - processor_began)
        return done

    def _hand_over(self, student: LinePredictor, before: dict[str, Any], generation: int) -> bool:
        """Give the predictor what `learn` has replaced in the copy since `before`, and note it there.

        False if the work was in vain: the predictor or the checkpoints may be others.
        """
        learned = {name: value for name, value in vars(student).items() if before.get(name) is not value}
        before.update(learned)
        with self._lock:
            if self._generation != generation or self._ended:
                return False
            if learned:
                vars(self._predictor).update(learned)
                self._handed_over += 1
        return True


def _is_settled(store: CheckpointStore, iteration: int) -> bool:
    try:
        return store.is_settled(iteration)
    except (CheckpointError, OSError, ValueError, TypeError, KeyError) as error:  # of a damaged marker, the last three
        logger.debug("cannot see now whether checkpoint %d is committed: %s", iteration, error)
        return False


def _compute_alone() -> None:
    """Let torch compute on the calling thread only, so that the budget is a share of one core, not of all.

    Torch's number of threads belongs to the calling thread, for OpenMP, MKL and oneDNN alike. But a thread that has not
    computed yet starts with the number set last in the process. So the caller must set that again at once. Setting any
    number also stops MKL, in the whole process, from choosing fewer threads by itself. That cannot be undone (observed
    with torch 2.13).
    """
    torch.get_num_threads()  # or the first computation here would start with the number of the process
    torch.set_num_threads(1)


def _description(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
