"""Steps of a job that sends replicas take part in no collective of CPSR's."""

from pathlib import Path

from tests.peers.stepping import CHECKPOINT_ITERATIONS, COMPLETE, Job, main
from tests.rank_processes import found_by, free_port, start_ranks

SECONDS = 300.0  # the machine may be busy


def test_no_step_but_that_of_a_checkpoint_has_a_collective(tmp_path: Path) -> None:
    for found in found_by(start_ranks(main, Job(tmp_path, free_port(), 2), 2), tmp_path, SECONDS):
        assert found["arrived"] >= COMPLETE
        checkpoints = range(CHECKPOINT_ITERATIONS, found["iterations"] + 1, CHECKPOINT_ITERATIONS)
        assert set(found["taken"]) <= {*checkpoints}, found
