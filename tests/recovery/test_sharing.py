"""Real jobs whose ranks hold the same state: each learns from its share of the operators, and a lost one is no loss."""

from collections.abc import Sequence
from typing import Any

from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.loading import load_branch
from cpsr.checkpoint.verify import read_manifest
from cpsr.journal import JournalReader
from tests.recovery.job import RANKS, Job

CHECKPOINT, FAILURE = 20, 23
LEARNING: dict[str, Any] = {"predictor": {"direction": "vitp"}, "learning": {"budget_fraction": 1.0}}
SHARED: dict[str, Any] = {
    "zero": 0,
    "settings": LEARNING,
    "window_iterations": 100,
}


def learned(job: Job, ranks: int = RANKS) -> list[set[str]]:
    """Of each rank, the operators that it had learned of by any of the checkpoints."""
    found: list[set[str]] = [set() for _ in range(ranks)]
    for info in scan(job.run_dir / "checkpoints").checkpoints:
        manifest = read_manifest(info.directory)
        for rank in range(ranks) if info.full else ():
            branch = load_branch(info.directory, manifest, rank, ("learned", "vitp", "statistics"))
            found[rank] |= branch["operators"].keys()
    return found


def comes_back(job: Job, copies: Sequence[tuple[int, int]] = ((0, 1),), **options: Any) -> None:
    """By prediction in a learned direction, for all operators, and alike on ranks that hold copies."""
    back = job.launch(mode="predict", **SHARED | options)
    assert set(back.statuses) == {0}, back.output
    with JournalReader(job.run_dir / "journal.db") as journal:
        recovery = journal.latest_recovery()
    assert recovery is not None
    assert recovery.method == "vitp"
    assert recovery.settings["direction"] == "vitp"
    assert recovery.settings["line_operators"] == 0
    for one, other in copies:
        first, second = back.result(one), back.result(other)
        assert first["started"]["iteration"] == second["started"]["iteration"] == recovery.failure_iteration
        assert first["state_at_start"] == second["state_at_start"]  # copies are predicted bit for bit alike


def test_each_rank_learns_from_its_share(job: Job) -> None:
    killed = job.launch(fault=f"step:1:{FAILURE}", committed=CHECKPOINT, **SHARED)
    assert killed.statuses[1] == -9, killed.output
    first, second = learned(job)
    assert first
    assert second
    assert not first & second
    comes_back(job)


def test_a_rank_killed_while_it_learns(job: Job) -> None:
    killed = job.launch(fault="learn:1:16", iterations=10_000, **SHARED)
    assert killed.statuses[1] == -9, killed.output
    comes_back(job)
