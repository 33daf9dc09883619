"""Results of workers keep their order, errors come out, and workers end with their parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cpsr.benchmarks.harness.processes import Workers, in_own_process
from cpsr.benchmarks.tests.harness.tiny_workers import square
from cpsr.benchmarks.tests.recovery.tiny import one_thread
from cpsr.errors import CPSRError

ROOT = Path(__file__).parents[3]
WAITING = """
from pathlib import Path
from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.tests.harness.tiny_workers import wait
if __name__ == "__main__":
    with Workers(2) as workers:
        workers.each(wait, [Path("{0}/0"), Path("{0}/1")])
"""


@pytest.mark.parametrize("count", [1, 2])
def test_results_keep_the_order_of_the_items_and_an_error_comes_out(count: int) -> None:
    done: list[int] = []
    with one_thread(), Workers(count) as workers:
        assert workers.each(square, [5, 1, 4], done.append) == [25, 1, 16]
        assert done == [1, 2, 3]
        with pytest.raises(CPSRError, match="two"):
            workers.each(square, [1, 2])
        if count > 1:
            with pytest.raises(CPSRError, match="a worker was killed"):
                workers.each(square, [0])
    with pytest.raises(CPSRError, match="_exit was ended from outside, perhaps for lack of memory"):
        in_own_process(os._exit, 9)


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text(WAITING.format(tmp_path))
    parent = subprocess.Popen([sys.executable, str(script)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    paths = [tmp_path / "0", tmp_path / "1"]
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in paths):
        assert parent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    workers = [psutil.Process(int(path.read_text())) for path in paths]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    gone, alive = psutil.wait_procs(workers, timeout=10)
    assert len(gone) == 2, alive
