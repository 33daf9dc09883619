"""The outcome of the recovery that began this life, for the journal and the predictor."""

from typing import Any, Literal

from cpsr.job import Job
from cpsr.learning.learner import Learner
from cpsr.restart.report import report_recovery
from cpsr.restart.restore import Restored

__all__ = ["RecoveryOutcome"]


class RecoveryOutcome:
    """Records the recovery, and later its measurements.

    Args:
        job: this rank's.
        learner: gets the measurements for the predictor.
        restored: how this life began.
        cause: how the last life ended, as a clause; None if it ended in good order.
        watching: whether the predicted state is being watched.
    """

    def __init__(self, job: Job, learner: Learner, restored: Restored, cause: str | None, watching: bool) -> None:
        self._journal = job.journal
        self._learner = learner
        self._restored = restored
        self._watched: dict[str, Any] = {}
        self._recovery_id = report_recovery(job.journal, restored, cause, job.config.mode, watching)

    @property
    def settings(self) -> dict[str, Any]:
        """The predictor's settings; empty if it was not used."""
        return {} if self._restored.forecast is None else dict(self._restored.forecast.settings)

    def rolled_back(self, restored: Restored) -> None:
        """The predicted state was discarded: the life continues from this one."""
        self._restored = restored

    def end_watch(self, outcome: Literal["kept", "rolled_back"], watch: dict[str, Any]) -> None:
        """The watch has ended."""
        self._watched = watch
        self._update(outcome, **({"rolled_back_to": self._restored.method} if outcome == "rolled_back" else {}))
        self._learner.record({"outcome": outcome, "settings": self.settings, "watch": watch})

    def measured(self, lag: dict[str, float], settings: dict[str, Any]) -> None:
        """Record the lag that the losses after the failure show.

        Args:
            lag: `lag_iterations` and `standard_error_iterations`.
            settings: of rank 0, for every rank.
        """
        self._learner.record({"kind": "recovery", "settings": settings, **lag})
        self._update("kept", lag=lag)

    def _update(self, outcome: Literal["kept", "rolled_back"], **more: Any) -> None:
        if self._recovery_id:
            guard = {**self._restored.guard, "watch": self._watched, **more}
            self._journal.update_recovery(self._recovery_id, outcome, guard)
