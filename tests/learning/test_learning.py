"""What the predictor of a running job takes in over the lives of a run."""

import time
from pathlib import Path

from cpsr import CPSRRecovery
from tests.recovery.test_faults import Loop, config, train

PATIENCE_SECONDS = 60.0


def checkpoints_taken_in(run_dir: Path, until: int, checkpoints: int) -> int:
    """Of all lives so far, after one that ends once its predictor has taken in so many."""
    loop = Loop()
    with CPSRRecovery(loop.adapter, config(run_dir, learning={"budget_fraction": 1.0})) as recovery:
        train(recovery, loop, until)
        learner, deadline = recovery.life.loop.learning.learner, time.monotonic() + PATIENCE_SECONDS
        found: int = 0
        while (found := learner.state_dict()["vitp"]["checkpoints"]) < checkpoints:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    return found


def test_every_checkpoint_that_was_taken_in_is_counted_over_lives(tmp_path: Path) -> None:
    assert checkpoints_taken_in(tmp_path, until=10, checkpoints=3) == 3
    assert checkpoints_taken_in(tmp_path, until=16, checkpoints=5) == 5
