"""Two ranks in the loops of other packages: one is killed, and the job continues bit for bit."""

from pathlib import Path
from typing import Any

import pytest

from tests.recovery.job import Job

STEPS, FAILURE, CHECKPOINT = 18, 10, 8


@pytest.mark.parametrize(
    ("loop", "package"),
    [
        ("Trainer", "transformers"),
        ("Trainer with DeepSpeed", "transformers"),
        ("accelerate", "accelerate"),
        ("Lightning", "lightning"),
    ],
)
def test_a_killed_job_continues_bit_for_bit(tmp_path: Path, loop: str, package: str) -> None:
    pytest.importorskip(package)
    options: dict[str, Any] = {"worker": "tests.integrations.ranks_worker", "loop": loop, "iterations": STEPS}
    whole = Job(tmp_path / "whole").launch(**options)
    assert whole.statuses == [0, 0], whole.output[0][-3000:]
    job = Job(tmp_path / "killed")
    killed = job.launch(fault=str(FAILURE), committed=CHECKPOINT, **options)
    assert killed.statuses[1] == -9, killed.output[1][-3000:]
    back = job.launch(**options)
    assert back.statuses == [0, 0], back.output[0][-3000:]
    assert f"continue at iteration {CHECKPOINT}" in back.output[0]
    for rank in range(2):
        assert back.result(rank) == whole.result(rank)
        assert back.result(rank)["steps"] == STEPS
