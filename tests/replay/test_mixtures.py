"""Mixtures of experts with windows: their ranks share experts, and each has windows of its own part."""

from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.memory_removal import remove_memory_states
from tests.recovery.job import OF_THE_START, Job
from tests.recovery.test_memory import run_id

SETTINGS = {
    "checkpoint": {"shared_memory": True, "interval_iterations": 1000},
    "replay": {"enabled": True, "window_iterations": 4},
}


@pytest.mark.parametrize(
    ("expert_parallel", "zero", "fault"),
    [
        (2, 1, "step:all:22"),
        pytest.param(1, 2, "step:all:24", marks=pytest.mark.slow),
        pytest.param(2, 0, "step:all:23", marks=pytest.mark.slow),
        pytest.param(2, 2, "step:1:21", marks=pytest.mark.slow),
    ],
)
def test_the_state_is_that_of_a_job_that_nothing_happened_to(
    tmp_path: Path, expert_parallel: int, zero: int, fault: str
) -> None:
    options: dict[str, Any] = {"expert_parallel": expert_parallel, "zero": zero, "settings": SETTINGS}
    job = Job(tmp_path / "killed")
    job.launch("exact", fault=fault, **options)
    try:
        back = job.launch("exact", **options)
    finally:
        remove_memory_states(run_id(job))
    assert back.statuses == [0, 0], back.output[0][-3000:]
    reference = Job(tmp_path / "uninterrupted").launch("exact", expert_parallel=expert_parallel, zero=zero)
    for rank in range(2):
        mine, exact = back.result(rank), reference.result(rank)
        assert mine["started"]["iteration"] in (13, 17, 21)  # 21 if its window is sealed before a kill at 24
        assert "window" in mine["started"]["reason"]
        assert mine["batches"] == exact["batches"][mine["started"]["iteration"] :]
        assert {**mine, **OF_THE_START} == {**exact, **OF_THE_START}
