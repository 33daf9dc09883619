"""Whole lives of a job whose run directory is lost or damaged, with a target that has copies."""

import shutil
from pathlib import Path

import pytest
import torch

from cpsr.checkpoint.remote.place import open_place
from cpsr.errors import RecoveryError, RunMismatchError
from cpsr.journal import JournalReader
from tests.checkpoint.remote.conftest import FaultySystem, committed_at, faulty
from tests.recovery.conftest import Uninterrupted
from tests.recovery.job import Job
from tests.recovery.test_faults import life, reference, same

__all__ = ["faulty", "reference"]  # fixtures of these modules


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
        for key in ("state", "rng", "learning_rate", "iteration"):
            assert mine[key] == expected[key], key


def test_a_damaged_checkpoint_is_replaced_by_its_copy(tmp_path: Path, reference: list[torch.Tensor]) -> None:
    run, checkpoint = tmp_path / "run", {"target": f"file://{tmp_path}/target"}
    life(run, 12, checkpoint=checkpoint)
    for file in (run / "checkpoints").rglob("*.moments.safetensors"):
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
    recovery, weights = life(run, 20, seed=5, checkpoint=checkpoint)
    assert recovery.restored.restored_iteration == 12
    assert same(weights, reference)


def test_a_crash_in_the_first_copy_and_a_lost_disk_do_not_lock_the_run_out(
    tmp_path: Path, faulty: type[FaultySystem]
) -> None:
    run, checkpoint = tmp_path / "run", {"target": "faulty://bucket/target"}
    faulty.arm(12)
    life(run, 4, checkpoint=checkpoint)  # to its end, which waits for the copy: a crash may come before it is begun
    assert "target copy failed" in kinds(run)
    faulty.arm(None)
    shutil.rmtree(run)
    recovery, _ = life(run, 4, checkpoint=checkpoint)
    assert recovery.restored.method == "scratch"
    assert committed_at(open_place(checkpoint["target"]))[-1] == 4


def test_training_goes_on_without_the_target_and_nothing_starts_anew_without_it(
    tmp_path: Path, faulty: type[FaultySystem], reference: list[torch.Tensor]
) -> None:
    run, checkpoint = tmp_path / "run", {"target": "faulty://bucket/target"}
    life(run, 12, checkpoint=checkpoint)
    faulty.arm(1)
    _, weights = life(run, 20, seed=5, checkpoint=checkpoint)
    assert same(weights, reference)
    assert {"target not reachable", "target copy failed"} <= set(kinds(run))
    shutil.rmtree(run)
    with pytest.raises(RecoveryError, match="does not answer"):
        life(run, 20, checkpoint=checkpoint)


def test_another_runs_target_and_another_model_are_refused(tmp_path: Path) -> None:
    checkpoint = {"target": f"file://{tmp_path}/target"}
    life(tmp_path / "run", 4, checkpoint=checkpoint)
    with pytest.raises(RunMismatchError, match="the first tensor that differs"):
        life(tmp_path / "wide", 4, width=16, checkpoint=checkpoint)
    life(tmp_path / "other", 4)
    with pytest.raises(RunMismatchError, match="holds copies of another run"):
        life(tmp_path / "other", 8, checkpoint=checkpoint)
