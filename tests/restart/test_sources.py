"""The first source that can be brought is the one that the run continues from."""

from dataclasses import dataclass

import pytest

from cpsr.checkpoint.tiers import Source
from cpsr.errors import CheckpointError, RecoveryError
from cpsr.journal import Beginning
from cpsr.restart.choice import Candidate
from cpsr.restart.restored import Recomputes, Refusal, Restored
from cpsr.restart.sources import RefusedError, StateSource, bring

REFUSAL = Refusal(Recomputes.PREDICTION_REFUSED, "the guard refused it")


@dataclass(frozen=True)
class Given:
    """A source that restores nothing but its own name, or fails with the given error."""

    iteration: int
    error: Exception | None = None

    @property
    def candidate(self) -> Candidate:
        return Candidate(Beginning.EXACT, (Source(0, "memory", self.iteration),))

    def bring(self, refusal: Refusal | None) -> Restored:
        if self.error is not None:
            raise self.error
        reason = "" if refusal is None else refusal.reason
        return Restored(Beginning.EXACT, self.iteration, None, None, reason)


def brought(*sources: StateSource, refusal: Refusal | None = None) -> Restored | None:
    return bring(list(sources), refusal)


def test_the_first_is_taken_and_hears_why_nothing_near_the_failure_is() -> None:
    restored = brought(Given(22), Given(20), refusal=REFUSAL)
    assert restored is not None
    assert (restored.restored_iteration, restored.reason) == (22, REFUSAL.reason)


def test_what_cannot_be_read_is_named_and_the_next_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    restored = brought(Given(22, CheckpointError("torn")), Given(20))
    assert restored is not None
    assert (restored.restored_iteration, restored.reason) == (20, "")
    assert "the state of iteration 22 in memory cannot be used, and the next state is tried: torn" in caplog.text


def test_a_refusal_goes_on_to_the_next_also_past_one_that_cannot_be_read() -> None:
    restored = brought(Given(23, RefusedError(REFUSAL)), Given(22, CheckpointError("torn")), Given(20))
    assert restored is not None
    assert (restored.restored_iteration, restored.reason) == (20, REFUSAL.reason)


def test_where_none_can_be_brought_there_is_none() -> None:
    assert brought(Given(22, CheckpointError("torn"))) is None


def test_what_ends_the_job_is_not_hidden_by_the_next_source() -> None:
    with pytest.raises(RecoveryError, match="start the job again"):
        brought(Given(23, RecoveryError("start the job again")), Given(20))
