"""SIGTERM to some ranks of a job: all leave at one step, with their exact state committed."""

import json
from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.progress import read_progress
from cpsr.journal import JournalReader
from tests.recovery.conftest import Uninterrupted
from tests.recovery.job import RANKS, Job

AT = 13

WORKERS: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # fault, the loader's
    "rank 1": (f"sigterm:1:{AT}", {}),
    "twice": (f"sigterm-twice:all:{AT}", {}),
    "both ranks and their workers": (f"sigterm-group:all:{AT}", WORKERS),
}
STEPS_AFTER = 6  # within so many all leave: those of some milliseconds that pass until every rank has accepted


@pytest.mark.parametrize("case", CASES)
def test_all_leave_together_and_nothing_is_lost(job: Job, uninterrupted: Uninterrupted, case: str) -> None:
    fault, loading = CASES[case]
    left = job.launch(fault=fault, loading=loading)
    assert left.statuses == [128 + 15] * RANKS, left.output
    ended = json.loads((job.run_dir / "ended.json").read_text())
    assert ended["ending"] == "sigterm"
    left_at = ended["iteration"]
    assert AT < left_at <= AT + STEPS_AFTER
    progress = read_progress(job.run_dir, RANKS)
    assert progress is not None
    assert {max(published) for published in progress.ranks.values()} == {left_at}
    assert scan(job.run_dir / "checkpoints").checkpoints[-1].iteration == left_at
    assert "its state is committed" in left.output[0]

    back = job.launch(mode="predict", loading=loading)  # nothing was lost, so that there is nothing to predict
    back.require_rest_of(uninterrupted(), left_at)
    assert back.result()["started"]["method"] == "exact"
    check_journal(job.run_dir, left_at)


def check_journal(run_dir: Path, left_at: int) -> None:
    with JournalReader(run_dir / "journal.db") as journal:
        assert [life.ending for life in journal.lives()] == ["sigterm", "clean"]
        assert journal.failures() == []
        assert any(f"left after SIGTERM at iteration {left_at}" in event.message for event in journal.events())
