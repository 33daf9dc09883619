"""Whole lives of a job whose run directory is lost, with a target that has copies."""

import shutil
from pathlib import Path

import torch

from cpsr.checkpoint.remote.place import open_place
from cpsr.journal import JournalReader
from tests.checkpoint.remote.conftest import committed_at
from tests.recovery.conftest import Uninterrupted
from tests.recovery.job import Job
from tests.recovery.test_faults import life, reference, same

__all__ = ["reference"]  # a fixture of that module


def kinds(run_dir: Path) -> list[str]:
    with JournalReader(run_dir / "journal.db") as journal:
        return [event.kind for event in journal.events()]


def test_a_lost_run_directory_comes_back_bitwise(tmp_path: Path, reference: list[torch.Tensor]) -> None:
    run, checkpoint = tmp_path / "run", {"target": f"file://{tmp_path}/target"}
    life(run, 12, checkpoint=checkpoint)
    assert committed_at(open_place(checkpoint["target"]))[-1] == 12
    shutil.rmtree(run)
    recovery, weights = life(run, 20, seed=5, checkpoint=checkpoint)
    assert (recovery.restored.method, recovery.restored.restored_iteration) == ("exact", 12)
    assert same(weights, reference)
    assert {"target adopted", "target fetched", "target copied"} <= set(kinds(run))
    assert committed_at(open_place(checkpoint["target"]))[-1] == 20


def test_two_ranks_lose_their_storage_after_a_kill(job: Job, uninterrupted: Uninterrupted) -> None:
    settings = {"checkpoint": {"target": f"file://{job.directory}/target"}}
    job.launch(settings=settings, iterations=12)  # its end waits for the copy
    assert -9 in job.launch(settings=settings, fault="step:1:14").statuses
    shutil.rmtree(job.run_dir)
    back = job.launch(settings=settings)
    assert back.statuses == [0, 0], back.output[0][-3000:]
    for rank in range(2):
        mine, expected = back.result(rank), uninterrupted().result(rank)
        assert mine["started"]["iteration"] == 12
        assert mine["batches"] == expected["batches"][12:]
        # The life that ended at 12 has drawn more of Python's and NumPy's numbers since.
        for key in ("state", "rng", "learning_rate", "iteration"):
            assert mine[key] == expected[key], key
