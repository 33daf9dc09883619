"""Copies of committed checkpoints at a target outside of the run directory, in one life."""

from cpsr.checkpoint.remote.target import CheckpointTarget
from cpsr.job import Ending, Job, Part
from cpsr.saving.saver import Saver

__all__ = ["Copies"]


class Copies(Part):
    """Notifies the target of the newest checkpoint, and reports the results of its copies.

    Args:
        job: this rank's.
        target: copies in the background.
        saver: knows the newest checkpoint.
    """

    def __init__(self, job: Job, target: CheckpointTarget, saver: Saver) -> None:
        self._journal = job.journal
        self._timeout_seconds = job.config.checkpoint.save_timeout_seconds
        self._target = target
        self._saver = saver
        target.start(saver.store)

    def at_step(self) -> None:
        """Copy the newest checkpoint if one is due; returns at once."""
        self._target.notify(self._saver.saved_iteration)
        self._report()

    def _report(self) -> None:
        for event in self._target.reports():
            self._journal.event(*event)

    def close(self, ending: Ending) -> None:
        """Copy the last checkpoint; not after an error, when a restart is waiting."""
        self._target.notify(self._saver.saved_iteration)
        self._target.close(self._timeout_seconds if ending.in_order else 0.0)
        self._report()
