"""A machine that computes wrongly leaves the job, and the others go on from a verified state without it."""

from pathlib import Path

from cpsr.demo.machines import Machines
from cpsr.journal import JournalReader
from cpsr.ranks.link import REFUSED_STATUS
from cpsr.verification.account import Account
from tests.launch.machine_jobs import MachineJob
from tests.launch.machines_job import FAULTY


def test_a_machine_that_is_wrong_twice_leaves_the_job(machines: Machines, tmp_path: Path) -> None:
    settings = {"checkpoint": {"interval_iterations": 2}, "verification": {"budget_fraction": 1.0}}
    job = MachineJob(machines, tmp_path, settings=settings)
    job.run_dir.mkdir()
    Account(trained_seconds=1e9).save(job.run_dir)
    before = job.begin(3)
    job.until(lambda: bool(Account.of_run(job.run_dir).verified))
    (tmp_path / FAULTY).write_text(machines.names[2])
    job.until(lambda: job.launchers[2].poll() is not None)
    assert job.launchers[2].returncode == REFUSED_STATUS, job.everything()
    assert "WrongArithmeticError: Arithmetic was wrong in step" in job.output(2)
    without = job.reached(2, after=before)
    assert set(job.finish().values()) == {0, REFUSED_STATUS}, job.everything()
    begins = job.begins()[without]
    assert begins["method"] == "exact"
    assert {row["machine"] for row in job.rows() if row["life"] == without} == set(machines.names[:2])
    with JournalReader(job.run_dir / "journal.db") as reader:
        wrong = [event for event in reader.events("wrong arithmetic") if event.rank == 0]
    assert len(wrong) == 2
    assert all(f"on rank 2 ({machines.names[2]}/cpu of rank 2)" in event.message for event in wrong)
    assert "goes back to iteration" in wrong[0].message
