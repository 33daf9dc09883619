"""Ranks killed at every kind of moment: the next life continues bitwise (mode exact)."""

from typing import Any

import pytest

from cpsr.checkpoint.verify import verify_run
from cpsr.journal import JournalReader
from tests.recovery.conftest import Uninterrupted
from tests.recovery.job import ITERATIONS, RANKS, Job

SIGKILLED = -9

# phase:rank:iteration -> the checkpoint that the next life must restore (an interval is 4 iterations).
FAULTS = {
    "step:1:14": 12,
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


# The conformance of the engines restores every other one; which one a kill meets makes no difference to it.
ENGINES: dict[str, dict[str, Any]] = {"zero 3": {"zero": 3}, "accumulating": {"micro_batches": 2}}


@pytest.mark.parametrize("engine", ENGINES)
def test_other_engines_come_back_likewise(job: Job, uninterrupted: Uninterrupted, engine: str) -> None:
    options = ENGINES[engine]
    # Where a step has two batches, the rank dies between them.
    phase = "step" if engine != "accumulating" else "micro"
    killed = job.launch(fault=f"{phase}:1:22", committed=20, **options)
    assert killed.statuses[1] == -9, killed.output
    back = job.launch(**options)
    back.require_rest_of(uninterrupted(**options), 20, options.get("micro_batches", 1))


def test_prediction_continues_with_the_next_micro_batch(job: Job, uninterrupted: Uninterrupted) -> None:
    """Two batches a step: what a step that was not finished has used is dealt again."""
    killed = job.launch(fault="micro:1:22", committed=20, micro_batches=2)
    assert killed.statuses[1] == -9, killed.output
    back = job.launch(mode="predict", micro_batches=2)
    assert back.statuses == [0, 0], back.output[0][-3000:]
    for rank in range(RANKS):
        assert back.result(rank)["started"]["iteration"] == 22
        assert back.result(rank)["started"]["method"] == "line"
        assert back.result(rank)["batches"] == uninterrupted(micro_batches=2).result(rank)["batches"][2 * 22 :]
        assert back.result(rank)["iteration"] == ITERATIONS
