"""A user's default device for new tensors is not where CPSR makes its own."""

from typing import Any

import pytest

from tests.recovery.job import Ended, Job

WORKER = "tests.recovery.default_device_worker"
FAILURE, CHECKPOINT = 23, 20
MEMORY: dict[str, Any] = {"checkpoint": {"shared_memory": True}}


def lives(job: Job, default_device: str, mode: str, settings: dict[str, Any]) -> Ended:
    """The second life of a job of which rank 1 is killed after its last checkpoint."""
    options: dict[str, Any] = {"worker": WORKER, "default_device": default_device, "settings": settings}
    killed = job.launch(mode, fault=str(FAILURE), committed=CHECKPOINT, **options)
    assert -9 in killed.statuses, killed.output
    back = job.launch(mode, **options)
    assert back.statuses == [0, 0], back.output[0][-3000:] + back.output[1][-3000:]
    return back


@pytest.mark.parametrize(("mode", "settings"), [("exact", {}), ("exact", MEMORY), ("predict", {}), ("predict", MEMORY)])
def test_a_job_recovers_as_without_it(tmp_path_factory: pytest.TempPathFactory, mode: str, settings: Any) -> None:
    other, usual = (lives(Job(tmp_path_factory.mktemp(device)), device, mode, settings) for device in ("meta", "cpu"))
    assert other.results == usual.results
    assert other.result()["started"]["iteration"] >= CHECKPOINT
