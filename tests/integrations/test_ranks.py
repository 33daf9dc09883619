"""Two ranks in the loops of other packages: one is killed, and the job continues bit for bit."""

from pathlib import Path
from typing import Any

import pytest

from tests.recovery.job import Job

STEPS, FAILURE, CHECKPOINT = 18, 10, 8
WORKER = "tests.integrations.ranks_worker"


@pytest.mark.parametrize(
    ("loop", "package"),
    [
        ("Trainer", "transformers"),
        ("Trainer with DeepSpeed", "transformers"),
        ("Trainer with FSDP", "transformers"),
        ("accelerate", "accelerate"),
        pytest.param("accelerate with DeepSpeed", "accelerate", marks=pytest.mark.slow),  # as the Trainer's, underneath
        pytest.param("accelerate with FSDP", "accelerate", marks=pytest.mark.slow),
        ("Lightning", "lightning"),
    ],
)
def test_a_killed_job_continues_bit_for_bit(tmp_path: Path, loop: str, package: str) -> None:
    pytest.importorskip(package)
    options: dict[str, Any] = {"worker": WORKER, "loop": loop, "iterations": STEPS}
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


@pytest.mark.slow
def test_checkpoints_of_the_trainer_go_on_working_under_fsdp(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    options: dict[str, Any] = {"worker": WORKER, "loop": "Trainer with FSDP", "iterations": STEPS, "save_steps": 12}
    job = Job(tmp_path)
    with_cpsr = job.launch(**options)
    assert with_cpsr.statuses == [0, 0], with_cpsr.output[0][-3000:]
    own = str(tmp_path / "life-1.trainer" / "checkpoint-12")
    resumed = job.launch(own_checkpoint=own, **options)
    assert resumed.statuses == [0, 0], resumed.output[0][-3000:]
    for name in ("steps", "state"):  # the Trainer's checkpoint lacks the losses since the last line of its log
        assert resumed.result()[name] == with_cpsr.result()[name]
