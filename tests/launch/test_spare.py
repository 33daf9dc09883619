"""A machine that waits takes the place of a lost one; real networks, names and memories."""

import math
import re
import signal
import time
from pathlib import Path

import pytest

from cpsr.demo.machines import Machines
from tests.launch.jobs import Launched
from tests.launch.machine_jobs import MachineJob, kept, require_one_training

# States are in memory alone, with a copy on the other machine; heartbeats of ranks would end them much too late.
SETTINGS = {
    "checkpoint": {"interval_iterations": 1000, "shared_memory": True},
    "memory": {"interval_iterations": 1},
    "peers": {"replicas": 1},
    "ranks": {"heartbeat_timeout_seconds": 300.0},
}
STARTED = re.compile(r"Started rank \d+ \(pid (\d+)\)")
QUIET_SECONDS = 12.0  # in which a spare that died, or a rank that was killed, would have had consequences


def begun(
    machines: Machines, directory: Path, *spares: int, nodes: str = "2", kind: str = "ddp"
) -> tuple[MachineJob, int]:
    """A job of machines 0 and 1, whose spares are warm; its life."""
    job = MachineJob(machines, directory, kind, SETTINGS, nodes=nodes)
    life = job.begin(2, iterations=12)
    for spare in spares:
        job.start(spare, 0, "--spare")
    job.until(lambda: all("Restarts fork their ranks" in job.output(spare) for spare in spares))
    return job, life


def on(job: MachineJob, life: int) -> set[str]:
    """The machines that train in a life."""
    return {row["machine"] for row in job.rows() if row["life"] == life}


def require_exact(job: MachineJob, lives: list[int], tolerance: float = 1e-3) -> None:
    """Each of these lives went on from memory, near the failure; by witnesses and losses all are one training."""
    begins = job.begins()
    for life in lives:
        assert (begins[life]["ranks"], begins[life]["method"]) == (2, "exact"), job.everything()
        assert begins[life]["failure_iteration"] - begins[life]["iteration"] < 10, job.everything()
    assert "Exact, checked over" in "".join(job.output(machine) for machine in job.launchers)
    require_one_training(kept(job.rows(), begins), tolerance)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("2", marks=pytest.mark.slow)])
def test_a_spare_takes_the_place_of_a_machine_that_vanishes(machines: Machines, tmp_path: Path, kind: str) -> None:
    job, life = begun(machines, tmp_path, 2, kind=kind)
    machines.cut_off(1)
    job.kill(1)
    after = job.reached(2, after=life)
    assert on(job, after) == {machines.names[0], machines.names[2]}
    if kind == "ddp":  # an import of DeepSpeed's may keep ranks from being forks
        assert all(row["forked"] for row in job.rows() if row["life"] == after), job.everything()
    assert job.finish() == {0: 0, 1: -signal.SIGKILL, 2: 0}, job.everything()
    require_exact(job, [after], 1e-3 if kind == "ddp" else math.inf)  # by itself DeepSpeed differs from plain torch


@pytest.mark.slow
def test_a_job_that_could_go_on_with_less_keeps_its_size(machines: Machines, tmp_path: Path) -> None:
    job, life = begun(machines, tmp_path, 2, nodes="1:2")
    job.lose(1)
    after = job.reached(2, after=life)
    assert on(job, after) == {machines.names[0], machines.names[2]}
    job.find(1)
    assert set(job.finish().values()) == {0}, job.everything()
    require_one_training(kept(job.rows(), job.begins()))


@pytest.mark.slow
def test_without_the_machine_at_which_the_launchers_meet_all_end(machines: Machines, tmp_path: Path) -> None:
    job, _ = begun(machines, tmp_path, 2)
    job.kill(0)
    job.until(lambda: all(job.launchers[machine].poll() is not None for machine in (1, 2)))
    assert [job.launchers[machine].wait() for machine in (1, 2)] == [1, 1], job.everything()
    assert "This spare does not reach the machine of --rdzv-endpoint" in job.output(2)


def test_a_spare_has_to_know_where_the_launchers_meet(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with Launched(tmp_path, ["cpsr", "run", "--spare", "train.py"]) as launched:
        assert launched.wait() == 2
        assert "--spare needs --rdzv-endpoint" in launched.output


@pytest.mark.slow
def test_a_machine_that_was_given_up_becomes_a_spare(machines: Machines, tmp_path: Path) -> None:
    """No connection ends and no lock is released: what notices it is the keep-alive of the launchers."""
    job, life = begun(machines, tmp_path, 2)
    job.lose(1)
    after = job.reached(2, after=life)
    assert "Nothing is heard of machine-1. All ranks start again" in job.output(0)
    job.find(1)
    job.until(lambda: "Waiting as a spare" in job.output(1))
    job.lose(2)
    again = job.reached(2, after=after)
    assert on(job, again) == {machines.names[0], machines.names[1]}
    job.find(2)
    job.until(lambda: job.output(2).count("Waiting as a spare") == 2)
    assert job.finish() == {0: 0, 1: 0, 2: 0}, job.everything()
    require_exact(job, [after, again])


@pytest.mark.slow
def test_two_losses_take_two_spares(machines: Machines, tmp_path: Path) -> None:
    job, life = begun(machines, tmp_path, 2, 3)
    job.kill(1)
    after = job.reached(2, after=life)
    assert on(job, after) in ({machines.names[0], machines.names[2]}, {machines.names[0], machines.names[3]})
    second = machines.names.index((on(job, after) - {machines.names[0]}).pop())
    job.kill(second)
    again = job.reached(2, after=after)
    assert on(job, again) == {machines.names[0], machines.names[5 - second]}
    assert {job.finish()[machine] for machine in (0, 5 - second)} == {0}, job.everything()
    require_exact(job, [after, again])


@pytest.mark.slow
def test_a_lost_machine_comes_back_as_a_spare(machines: Machines, tmp_path: Path) -> None:
    job, life = begun(machines, tmp_path, 2)
    job.kill(1)
    after = job.reached(2, after=life)
    machines.forget(1)  # it was started again
    job.start(1, 0, "--spare")
    job.until(lambda: "Waiting as a spare" in job.output(1))
    job.kill(2)
    again = job.reached(2, after=after)
    assert on(job, again) == {machines.names[0], machines.names[1]}
    assert job.finish() == {0: 0, 1: 0, 2: -signal.SIGKILL}, job.everything()
    require_exact(job, [after, again])


@pytest.mark.slow
def test_a_spare_that_dies_or_leaves_while_it_waits_changes_nothing(machines: Machines, tmp_path: Path) -> None:
    job, life = begun(machines, tmp_path, 2, 3)
    job.kill(2)
    machines.run(3, "pkill", "-TERM", "--full", "--oldest", "cpsr run")
    job.until(lambda: job.launchers[3].poll() is not None)
    time.sleep(QUIET_SECONDS)
    job.reached(2, iterations=len(job.rows()) // 2 + 5)
    assert list(job.begins()) == [life]
    assert job.finish() == {0: 0, 1: 0, 2: -signal.SIGKILL, 3: 128 + signal.SIGTERM}, job.everything()
    assert "This spare left after SIGTERM; the job goes on without it" in job.output(3)
    require_one_training(kept(job.rows(), job.begins()))


@pytest.mark.slow
def test_a_spare_that_starts_first_takes_no_place_of_a_machine_that_is_there(
    machines: Machines, tmp_path: Path
) -> None:
    """Not at the start, and not while a machine starts its ranks again; the launchers meet at the spare's machine."""
    job = MachineJob(machines, tmp_path, settings=SETTINGS, nodes="2")
    job.start(0, 0, "--spare")
    job.until(lambda: "Waiting as a spare" in job.output(0))
    job.start(1, 0)
    time.sleep(QUIET_SECONDS)
    job.start(2, 0)
    life = job.reached(2, iterations=12)
    for machine in (1, 2):
        pids = STARTED.findall(job.output(machine))
        machines.run(machine, "kill", "-KILL", pids[-1])
        life = job.reached(2, iterations=12, after=life)
    assert {row["machine"] for row in job.rows()} == {machines.names[1], machines.names[2]}
    assert job.finish() == {0: 0, 1: 0, 2: 0}, job.everything()
    assert "The job has ended; this spare was not needed" in job.output(0)
    require_exact(job, [life - 1, life])
