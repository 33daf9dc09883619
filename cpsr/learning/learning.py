"""The predictor in a running job, its parts that learn beside the training, and its host memory."""

import logging
import math
from collections.abc import Callable
from typing import Literal

from cpsr.checkpoint.catalogue import Retention
from cpsr.checkpoint.history import RankSlices
from cpsr.checkpoint.store import CheckpointStore
from cpsr.config import CPSRConfig
from cpsr.engines.adapter import EngineAdapter
from cpsr.job import Job, Rewind
from cpsr.journal import RankJournal
from cpsr.learning.bubbles import Bubbles
from cpsr.learning.exchange import Exchange
from cpsr.learning.learner import Learner
from cpsr.learning.pace import pace_of
from cpsr.predictor.vitp import VITPPredictor, host_memory_bytes
from cpsr.ranks.group import Group

__all__ = ["LIMIT_BYTES", "Learning", "Use", "choose_use", "history_checkpoints"]

LIMIT_BYTES = 200_000_000  # of a rank, for predicting and learning
# Beside those of the history's span: one that was committed while an older one is still being removed, and one that a
# copy keeps.
EXTRA_CHECKPOINTS = 2
MEGABYTE = 1e6


Report = Callable[..., object]
Use = Literal["learning", "line", "nothing"]
"""What the predictor does in a life: learn and predict, predict by the calibrated line only, or nothing."""


class Learning:
    """Owns the predictor and the thread that trains it; usable alone until `open` makes it one of several ranks.

    Args:
        adapter: the engine.
        config: of the run.

    Attributes:
        predictor: predicts the state at a failure; use it inside `learner.locked()`.
        learner: the thread.
        bubbles: waits of the training thread.
    """

    def __init__(self, adapter: EngineAdapter, config: CPSRConfig) -> None:
        self.predictor = VITPPredictor()
        self._nothing_learned = self.predictor.state_dict()
        self.bubbles = Bubbles()
        self.learner = Learner(self.predictor)
        self._journal: RankJournal | None = None

    def open(self, job: Job, store: CheckpointStore) -> Use:
        """Find out whether the ranks can predict and learn within their memory; a collective.

        Returns:
            The same on every rank.
        """
        self._journal = job.journal
        self.predictor.ranks = Exchange(job.group, job.shard, job.adapter.data_parallel_ranks)
        on_disk: int = job.group.broadcast(len(store.catalogue()) if job.group.rank == 0 else None)
        use = choose_use(len(job.shard.operators), on_disk, job.config, job.group, job.journal.event)
        if use != "learning":
            self.predictor.follow_line()
        return use

    def start(self, job: Job, store: CheckpointStore) -> None:
        """Begin to learn from checkpoints; on the training thread, before it trains."""
        fraction = job.config.learning.budget_fraction
        pace = pace_of(job.adapter, self.bubbles, fraction) if self.predictor.learns else None
        self.learner.start(store, RankSlices.of(job.group.rank, job.group.size, job.shard), pace)

    def at_step(self, saved_iteration: int | None, history_start: int) -> None:
        """Notify the thread of the newest checkpoint, and report its failure.

        Args:
            saved_iteration: the newest checkpoint; None: there is none yet.
            history_start: checkpoints before this iteration do not lead here.
        """
        if saved_iteration is not None:
            self.learner.notify(saved_iteration, history_start)
        self._report_failure()

    def rewound(self, to: Rewind) -> None:
        """Reset the predictor if the new state comes from outside of the run: its weights do not lead there."""
        if to.checkpoint_iteration is None:
            with self.learner.locked():
                self.predictor.load_state_dict(self._nothing_learned)

    def close(self) -> None:
        """End the thread."""
        self.learner.close()
        self._report_failure()

    def _report_failure(self) -> None:
        failure = self.learner.failure()
        if failure is not None and self._journal is not None:
            self._journal.event("learning ended", failure, level=logging.ERROR)


def choose_use(operators: int, checkpoints_on_disk: int, config: CPSRConfig, group: Group, report: Report) -> Use:
    """Decide what the predictor does within `LIMIT_BYTES` of host memory; a collective.

    If learning does not fit on some rank, or is off, no rank learns and all follow the line. If even that does not fit,
    no rank uses the predictor.

    Args:
        operators: number of those of which this rank has a slice.
        checkpoints_on_disk: in the run directory, of any interval, since a recovery predicts from them.
        config: of the run.
        group: the ranks.
        report: records an event, by kind, message and `level`; called on rank 0.

    Returns:
        The same on every rank.
    """
    learns = config.learning.budget_fraction > 0
    if config.mode == "exact" and not learns:
        return "nothing"
    checkpoints = max(history_checkpoints(config), checkpoints_on_disk + EXTRA_CHECKPOINTS)
    own = [host_memory_bytes(operators, checkpoints, learns=one) for one in (True, False)]
    learning_bytes, line_bytes = (max(column) for column in zip(*group.gather(own), strict=True))
    use: Use = "nothing" if line_bytes > LIMIT_BYTES else "line"
    if learns and learning_bytes <= LIMIT_BYTES:
        use = "learning"
    if group.rank == 0:
        _report(use, learning_bytes if learns else None, line_bytes, checkpoints, config, report)
    return use


def history_checkpoints(config: CPSRConfig) -> int:
    """Most checkpoints in a history, at the shortest interval that the configuration allows."""
    kept = Retention()
    interval = config.checkpoint.interval_iterations or config.planner.interval_min_iterations
    return max(kept.history_checkpoints(interval), kept.full_checkpoints) + EXTRA_CHECKPOINTS


def _report(
    use: Use, learning_bytes: int | None, line_bytes: int, checkpoints: int, config: CPSRConfig, report: Report
) -> None:
    """One line for users; `learning_bytes` is None with learning off in the configuration."""
    over = f"of host memory for up to {checkpoints} checkpoints of this model"
    level = logging.WARNING
    if use == "nothing":
        message = (
            f"predicting is off: it takes {_megabytes(line_bytes)} {over}, {_megabytes(LIMIT_BYTES)} are allowed. "
            "Recoveries recompute from the newest checkpoint; training is not affected"
        )
    elif learning_bytes is not None and use == "line":
        message = (
            f"learning is off: it takes {_megabytes(learning_bytes)} {over}, {_megabytes(LIMIT_BYTES)} are allowed. "
            "Recoveries follow the calibrated line; training is not affected"
        )
    else:
        peak = line_bytes if learning_bytes is None else learning_bytes
        message = f"the predictor uses at most {_megabytes(peak)} {over} per rank"
        # Mode exact predicts nothing, and asks for no attention to what would.
        level = logging.DEBUG if config.mode == "exact" else logging.INFO
    report("predictor memory", message, level=level)


def _megabytes(count: int) -> str:
    return f"{math.ceil(count / MEGABYTE)} MB"
