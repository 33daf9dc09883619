"""A machine is lost with its memory or its disk: its state is fetched from where a copy is."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from cpsr.benchmarks.harness.checkpoint_files import remove_checkpoint
from cpsr.checkpoint.arena import Arena
from tests.recovery.conftest import Uninterrupted
from tests.recovery.job import Job
from tests.recovery.test_memory import IN_MEMORY, KILLED, run_id, scopes, sources


# Without ZeRO both ranks own the same, and only the rest of a rank's state travels.
@pytest.mark.parametrize(("zero", "travels"), [(1, "snapshot"), (0, "small")])
def test_the_state_of_a_lost_machine_comes_back_from_another(
    job: Job, uninterrupted: Uninterrupted, tmp_path: Path, zero: int, travels: str
) -> None:
    killed = job.launch(fault="step:0:15", committed=12, in_memory=12, settings=IN_MEMORY, nodes=["a", "b"], zero=zero)
    assert KILLED in killed.statuses
    replicas = [state for state in Arena(run_id(job), tmp_path / "memory" / "a").list() if "replica" in state.path.name]
    assert {(state.rank, state.kind) for state in replicas} == {(1, travels)}
    remove_checkpoint(job.run_dir / "checkpoints" / "step-0000000012")  # the disk has not come so far
    shutil.rmtree(tmp_path / "memory" / "b")
    back = job.launch(settings=IN_MEMORY, nodes=["a", "c"], zero=zero)
    back.require_rest_of(uninterrupted(zero=zero), 12)
    assert (sources(job), scopes(job)) == ([("memory", 12)] * 2, ["machine"])
    assert [path for path in (tmp_path / "memory").rglob("*") if path.is_file()] == []  # a clean end leaves nothing


def test_ranks_that_share_their_copies_have_the_state_of_a_lost_machine(job: Job, tmp_path: Path) -> None:
    """Where that has one rank, which shares with none."""
    settings = {**IN_MEMORY, "memory": {"interval_iterations": 1}}
    options: dict[str, Any] = {"ranks": 3, "zero": 0, "settings": settings, "iterations": 18}
    killed = job.launch(fault="step:0:15", committed=12, in_memory=12, nodes=["a", "a", "b"], **options)
    assert KILLED in killed.statuses
    arena = Arena(run_id(job), tmp_path / "memory" / "a")
    snapshots = [state for state in arena.list() if state.kind == "snapshot" and state.iteration > 12]
    assert all(state.lacking for state in snapshots)
    assert {(state.rank, state.kind) for state in arena.list() if state.place == "replica"} == {(2, "small")}
    remove_checkpoint(job.run_dir / "checkpoints" / "step-0000000012")
    shutil.rmtree(tmp_path / "memory" / "b")
    back = job.launch(nodes=["a", "a", "c"], **options)
    (at,) = {iteration for _, iteration in sources(job)}
    assert at >= 12
    assert [tier for tier, _ in sources(job)] == ["memory"] * 3
    whole = Job(tmp_path / "whole").launch(**options)
    back.require_rest_of(whole, at)


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
