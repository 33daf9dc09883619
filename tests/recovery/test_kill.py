"""Ranks killed at every kind of moment: the next life continues bitwise (mode exact)."""

import pytest

from cpsr.checkpoint.verify import verify_run
from cpsr.journal import JournalReader
from tests.recovery.conftest import Uninterrupted
from tests.recovery.job import Job

SIGKILLED = -9

# phase:rank:iteration -> the checkpoint that the next life must restore (an interval is 4 iterations).
FAULTS = {
    "step:1:14": 12,
    "step:all:14": 12,
    "step:1:2": None,
    "snapshot:1:12": 8,
    "persist:1:12": 8,
    "commit:0:12": 8,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_next_life_is_bitwise_the_uninterrupted_run(job: Job, uninterrupted: Uninterrupted, fault: str) -> None:
    killed = job.launch(fault=fault, committed=FAULTS[fault])
    assert SIGKILLED in killed.statuses, killed.output
    assert 0 not in killed.statuses
    assert verify_run(job.run_dir) == []

    back = job.launch()
    back.require_rest_of(uninterrupted(), FAULTS[fault] or 0)
    assert back.result()["started"]["method"] == ("scratch" if FAULTS[fault] is None else "exact")
    with JournalReader(job.run_dir / "journal.db") as journal:
        # Rank 0 writes the journal: killed itself it leaves its life running, else it notes the error of its dead peer.
        survived = fault.split(":")[1] == "1"
        assert [life.ending for life in journal.lives()] == ["error" if survived else "running", "clean"]
        if FAULTS[fault] is not None:
            (recovery,) = journal.recoveries()
            assert recovery.method == "exact"
            assert recovery.checkpoint_iteration == FAULTS[fault]


def test_killed_again_while_recovering(job: Job, uninterrupted: Uninterrupted) -> None:
    job.launch(fault="step:1:14", committed=12)
    assert SIGKILLED in job.launch(fault="load:0:12").statuses
    back = job.launch()
    back.require_rest_of(uninterrupted(), 12)
