"""Two jobs in one run directory: the newer one goes on, and the older one ends and spoils nothing."""

import signal
from pathlib import Path

from cpsr.checkpoint.store import verify_run
from cpsr.ranks.link import REFUSED_STATUS
from tests.launch.jobs import SCRIPT, Launched, has_reached, iterations


def test_a_second_job_takes_the_run_over(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = ["cpsr", "run", "--nproc-per-node=1", "train.py", "run", "100000", "0.5"]
    with Launched(tmp_path, run) as first:
        first.until(lambda job: has_reached(job, 6))
        with Launched(tmp_path, run) as second:
            assert first.wait() == REFUSED_STATUS, first.output[-3000:]
            second.until(lambda job: len(iterations(job)) > 5)
            second.process.terminate()
            assert second.wait() == 128 + signal.SIGTERM, second.output[-3000:]
    assert "Another job has begun life 1 of the run" in first.lines()[-1]
    assert iterations(second)[0] in range(6, iterations(first)[-1] + 2)
    assert verify_run(tmp_path / "run") == []
