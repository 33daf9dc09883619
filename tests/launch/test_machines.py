"""A job goes on with the machines that are left, and with those that return; real networks, names and memories."""

import re
import time
from pathlib import Path

import pytest

from cpsr.checkpoint.store import verify_run
from cpsr.demo.machines import Machines
from cpsr.ranks.link import REFUSED_STATUS
from tests.launch.machine_jobs import MachineJob, kept, require_one_training


@pytest.mark.parametrize(
    ("number", "launcher"),
    [
        (2, "cpsr run"),
        pytest.param(3, "cpsr run", marks=pytest.mark.slow),
        pytest.param(2, "torchrun", marks=pytest.mark.slow),
    ],
)
def test_a_job_goes_on_without_a_machine_and_with_it_again(
    machines: Machines, tmp_path: Path, number: int, launcher: str
) -> None:
    job = MachineJob(machines, tmp_path, launcher=launcher)
    before = job.begin(number)
    if warm := launcher == "cpsr run":
        job.until(lambda: "Restarts fork their ranks" in job.output(0))
    machines.kill(number - 1)
    without = job.reached(number - 1, after=before)
    job.start(number - 1)
    again = job.reached(number, after=without)
    first = [row for row in job.rows() if row["machine"] == machines.names[0]]
    assert {row["forked"] for row in first if row["life"] in (without, again)} == {warm}
    assert set(job.finish().values()) == {0}, job.everything()
    begins = job.begins()
    assert begins[without]["method"] == begins[again]["method"] == "exact"
    assert begins[without]["iteration"] >= 5
    require_one_training(kept(job.rows(), begins))


def test_a_rank_that_hangs_on_another_machine_is_not_waited_for(machines: Machines, tmp_path: Path) -> None:
    """It cannot commit after SIGTERM, for which `cpsr run` would give it ten minutes."""
    job = MachineJob(machines, tmp_path, settings={"ranks": {"heartbeat_timeout_seconds": 8.0}}, nodes="2")
    before = job.begin(2)
    job.until(lambda: all("Restarts fork their ranks" in job.output(machine) for machine in range(2)))
    pid = re.findall(r"Started rank 1 \(pid (\d+)\)", job.output(0) + job.output(1))[-1]
    machine = 1 if f"(pid {pid})" in job.output(1) else 0
    machines.run(machine, "kill", "-STOP", pid)
    stopped = time.monotonic()
    again = job.reached(2, after=before)
    assert all(row["forked"] for row in job.rows() if row["life"] == again), job.everything()
    assert time.monotonic() - stopped < 120.0, job.everything()  # as a rule 15
    assert set(job.finish().values()) == {0}, job.everything()
    require_one_training(kept(job.rows(), job.begins()))


WATCHED = {"ranks": {"heartbeat_timeout_seconds": 30.0, "step_timeout_seconds": 10.0}}


@pytest.mark.slow
def test_a_machine_that_is_cut_off_is_left_and_joins_again(machines: Machines, tmp_path: Path) -> None:
    job = MachineJob(machines, tmp_path, settings=WATCHED)
    before = job.begin(3)
    machines.cut_off(2)
    without = job.reached(2, after=before)
    assert {row["machine"] for row in job.rows() if row["life"] > before} == set(machines.names[:2])
    machines.reconnect(2)
    if job.launchers[2].poll() is not None:  # it has given up the others meanwhile
        job.start(2)
    again = job.reached(3, after=without)
    assert set(job.finish().values()) == {0}, job.everything()
    assert job.begins()[again]["iteration"] >= 3
    require_one_training(kept(job.rows(), job.begins()))


@pytest.mark.slow
def test_a_machine_that_goes_on_alone_ends_when_the_others_take_over(machines: Machines, tmp_path: Path) -> None:
    """The launchers meet at the machine that is cut off: it goes on alone, until the others start anew elsewhere."""
    job = MachineJob(machines, tmp_path, settings=WATCHED)
    before = job.begin(3)
    machines.cut_off(0)
    alone = job.reached(1, after=before)
    job.kill(1, 2)
    for machine in (1, 2):
        job.start(machine, store=1)
    together = job.reached(2, after=alone)
    job.until(lambda: job.launchers[0].poll() is not None)
    assert job.launchers.pop(0).wait() == REFUSED_STATUS, job.output(0)
    assert "Another job has begun life" in job.output(0)
    machines.reconnect(0)
    job.start(0, store=1)
    job.reached(3, after=together)
    assert set(job.finish().values()) == {0}, job.everything()
    require_one_training(kept(job.rows(), job.begins()))
    assert verify_run(job.run_dir) == []


@pytest.mark.slow
def test_the_memory_of_a_machine_that_returns_is_out_of_date(machines: Machines, tmp_path: Path) -> None:
    """It holds later iterations of a life that the others have lost."""
    settings = {"checkpoint": {"interval_iterations": 50, "shared_memory": True}, "memory": {"interval_iterations": 1}}
    job = MachineJob(machines, tmp_path, settings=settings)
    before = job.begin(3, iterations=90)
    job.kill(0, 1, 2)
    for machine in (0, 1):
        machines.forget(machine)
        job.start(machine)
    without = job.reached(2, after=before)
    job.kill(0, 1)
    again = job.begin(3, after=without)
    assert set(job.finish().values()) == {0}, job.everything()
    begins = job.begins()
    assert begins[without]["iteration"] == 50
    assert begins[again]["method"] == "exact"
    assert 50 < begins[again]["iteration"] < begins[without]["failure_iteration"]
    require_one_training(kept(job.rows(), begins))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "2"])
def test_the_state_of_a_lost_machine_comes_from_its_replica(machines: Machines, tmp_path: Path, kind: str) -> None:
    settings = {
        "checkpoint": {"interval_iterations": 1000, "shared_memory": True},
        "memory": {"interval_iterations": 1},
        "peers": {"replicas": 1},
    }
    job = MachineJob(machines, tmp_path, kind, settings)
    before = job.begin(3, iterations=12)
    machines.kill(2)
    without = job.reached(2, after=before)
    began = job.begins()[without]
    assert began["method"] == "exact"
    assert began["iteration"] >= 4, job.everything()  # a replica of each few iterations, on a busy machine
    assert set(job.finish().values()) >= {0}, job.everything()
    require_one_training(kept(job.rows(), job.begins()), 1e-3 if kind == "ddp" else 0.1)
