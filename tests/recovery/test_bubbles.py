"""The predictor in the bubbles of a real pipeline of two stages."""

from typing import Any

import pytest

from cpsr.benchmarks.harness.checkpoint_files import remove_checkpoint
from cpsr.checkpoint.manifest import step_name
from tests.device import NO_STAGES, cpu_only
from tests.recovery.job import Ended, Job

pytestmark = cpu_only(NO_STAGES)

STAGES = 2
ITERATIONS = 56  # enough for the network to be trained
WORKER: dict[str, Any] = {"worker": "tests.recovery.bubble_worker"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The job without CPSR."""
    return Job(tmp_path_factory.mktemp("alone")).launch(alone=True, iterations=ITERATIONS, **WORKER)


def test_it_learns_in_bubbles_and_changes_nothing(job: Job, alone: Ended) -> None:
    ended = job.launch(iterations=ITERATIONS, **WORKER)
    assert ended.statuses == [0] * STAGES, ended.output[0][-3000:]
    for stage in range(STAGES):
        mine = ended.result(stage)
        for name in ("losses", "weights"):
            assert mine[name] == alone.result(stage)[name]
        account = mine["account"]
        assert mine["learned"]
        assert mine["trained"] == (stage == 0)  # by rank 0 for all
        assert account["slices"] > 0
        assert account["inside"] > account["outside"]
        assert mine["threads"] == alone.result(stage)["threads"]
    # The last checkpoint before the end was copied in waits; a life that begins there ends alike.
    remove_checkpoint(job.run_dir / "checkpoints" / step_name(ITERATIONS))
    back = job.launch(iterations=ITERATIONS, **WORKER)
    for stage in range(STAGES):
        mine, expected = back.result(stage), alone.result(stage)
        assert 0 < mine["started"] < ITERATIONS
        assert mine["losses"] == expected["losses"][mine["started"] :]
        assert mine["weights"] == expected["weights"]
