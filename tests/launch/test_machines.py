"""A job goes on with the machines that are left, and with those that return; real networks, names and memories."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.machine_jobs import MachineJob, kept, require_one_training
from tests.machines import Machines, obstacle

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Machines(3, tmp_path) as found:
        yield found


def test_a_job_goes_on_without_a_machine_and_with_it_again(machines: Machines, tmp_path: Path) -> None:
    job = MachineJob(machines, tmp_path)
    for machine in range(3):
        job.start(machine)
    before = job.reached(3, iterations=7)
    machines.kill(2)
    without = job.reached(2, after=before)
    job.start(2)
    again = job.reached(3, after=without)
    assert job.finish() == {0: 0, 1: 0, 2: 0}, job.everything()
    begins = job.begins()
    assert begins[without]["method"] == begins[again]["method"] == "exact"
    assert begins[without]["iteration"] >= 5
    require_one_training(kept(job.rows(), begins))
