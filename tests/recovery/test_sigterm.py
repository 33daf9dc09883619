"""SIGTERM to some ranks of a job: all leave at one step, with their exact state committed."""

import json
from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.progress import read_progress
from cpsr.journal import JournalReader
from tests.recovery.conftest import Uninterrupted
from tests.recovery.job import OF_THE_START, RANKS, Job

AT = 13
WORKERS: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}

LEFT_AT = 15  # the vote that is cast in one step is counted in the next
# fault, and the loader's settings
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rank 1": (f"sigterm:1:{AT}", {}),
    "both ranks": (f"sigterm:all:{AT}", {}),
    "twice": (f"sigterm-twice:all:{AT}", {}),
    "both ranks and their workers": (f"sigterm-group:all:{AT}", WORKERS),
}


@pytest.mark.parametrize("case", CASES)
def test_all_leave_together_and_nothing_is_lost(job: Job, uninterrupted: Uninterrupted, case: str) -> None:
    fault, loading = CASES[case]
    left = job.launch(fault=fault, loading=loading)
    assert left.statuses == [128 + 15] * RANKS, left.output
    assert json.loads((job.run_dir / "ended.json").read_text()) == {"ending": "sigterm", "iteration": LEFT_AT}
    progress = read_progress(job.run_dir, RANKS)
    assert progress is not None
    assert progress.iteration == progress.newest == LEFT_AT
    assert scan(job.run_dir / "checkpoints").checkpoints[-1].iteration == LEFT_AT
    assert "its state is committed" in left.output[0]

    back = job.launch(mode="predict", loading=loading)  # nothing was lost, so that there is nothing to predict
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    for rank in range(RANKS):
        mine, reference = back.result(rank), uninterrupted().result(rank)
        assert mine["started"]["iteration"] == LEFT_AT
        assert mine["started"]["method"] == "exact"
        assert mine["batches"] == reference["batches"][LEFT_AT:]
        assert {**mine, **OF_THE_START} == {**reference, **OF_THE_START}
    check_journal(job.run_dir)


def check_journal(run_dir: Path) -> None:
    with JournalReader(run_dir / "journal.db") as journal:
        assert [life.ending for life in journal.lives()] == ["sigterm", "clean"]
        assert journal.failures() == []
        assert any(f"left after SIGTERM at iteration {LEFT_AT}" in event.message for event in journal.events())
