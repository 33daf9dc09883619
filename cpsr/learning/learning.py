"""The predictor in a running job, and its parts that learn beside the training."""

import logging

from cpsr.checkpoint.history import RankSlices
from cpsr.checkpoint.store import CheckpointStore
from cpsr.config import CPSRConfig
from cpsr.engines.adapter import EngineAdapter
from cpsr.job import Job, Rewind
from cpsr.journal import RankJournal
from cpsr.learning.bubbles import Bubbles
from cpsr.learning.exchange import Exchange
from cpsr.learning.learner import Learner
from cpsr.learning.memory_limit import Use, choose_use
from cpsr.learning.pace import pace_of
from cpsr.predictor.vitp import VITPPredictor

__all__ = ["Learning"]


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
        self.predictor = VITPPredictor(direction=config.predictor.direction)
        self._nothing_learned = self.predictor.state_dict()
        self.bubbles = Bubbles()
        self.learner = Learner(self.predictor)
        self._learns = False
        self._journal: RankJournal | None = None

    def open(self, job: Job, store: CheckpointStore) -> Use:
        """Find out whether the ranks can predict and learn within their memory; a collective.

        Returns:
            The same on every rank.
        """
        self._journal = job.journal
        self.predictor.ranks = Exchange(job.group, job.shard, job.adapter.data_parallel_ranks)
        on_disk: int = job.group.broadcast(len(store.catalogue()) if job.group.rank == 0 else None)
        use = choose_use(self.predictor, len(job.shard.operators), on_disk, job.config, job.group, job.journal.event)
        self._learns = use == "learning"
        return use

    def start(self, job: Job, store: CheckpointStore) -> None:
        """Begin to learn from checkpoints; on the training thread, before it trains."""
        fraction = job.config.learning.budget_fraction
        pace = pace_of(job.adapter, self.bubbles, fraction) if self._learns else None
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
