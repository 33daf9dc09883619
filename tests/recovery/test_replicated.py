"""Ranks that hold the same write a share of it each, in jobs that are killed: what comes back, and from whose files."""

from collections import Counter
from typing import Any

import pytest

from cpsr.benchmarks.harness.checkpoint_files import rank_part
from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.manifest import RankManifest, step_name
from cpsr.checkpoint.store import verify_run
from cpsr.journal import JournalReader
from tests.recovery.job import INTERVAL, RANKS, Job

CHECKPOINT, FAILURE, END = 20, 22, 30
MIXTURE: dict[str, Any] = {"experts": {"policy": "sequential", "experts_per_layer": 1}}
# The newest checkpoint alone, from which nothing can be predicted: the run goes on from it.
SHORT = {"disk_limit_bytes": 1}
SIGKILLED = -9


def manifests(job: Job, iteration: int) -> list[RankManifest]:
    directory = job.run_dir / "checkpoints" / step_name(iteration)
    return [RankManifest.parse(rank_part(directory, rank).read_bytes()) for rank in range(RANKS)]


def writers(job: Job, iteration: int) -> list[Counter[int]]:
    """For each rank, how many of its operators lie in the files of each rank."""
    return [
        Counter(rank if one.saved_by is None else one.saved_by for one in record.operators.values())
        for rank, record in enumerate(manifests(job, iteration))
    ]


def test_a_mixture_shares_what_its_ranks_hold_alike(job: Job) -> None:
    """With all experts on each of its ranks, those as well."""
    options: dict[str, Any] = {"zero": 0, "expert_parallel": 1, "iterations": END}
    sections = {**MIXTURE, "checkpoint": SHORT}
    killed = job.launch(mode="auto", fault=f"step:1:{FAILURE}", committed=CHECKPOINT, settings=sections, **options)
    assert killed.statuses[1] == SIGKILLED, killed.output[1][-3000:]
    assert verify_run(job.run_dir) == []
    found = manifests(job, CHECKPOINT)
    back = job.launch(mode="auto", settings=sections, **options)
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    assert {back.result(rank)["started"]["method"] for rank in range(RANKS)} == {"older experts"}
    written = Counter(name for one in found for name, operator in one.operators.items() if operator.saved_by is None)
    assert set(written.values()) == {1}
    assert written.keys() == {name for one in found for name in one.operators}


def drift_messages(job: Job) -> list[str]:
    with JournalReader(job.run_dir / "journal.db") as journal:
        return [event.message for event in journal.events() if event.kind == "ranks differ"]


def test_ranks_that_drift_apart_write_all_their_own(job: Job) -> None:
    """What one wrote for both would be no state that the other ever had."""
    options: dict[str, Any] = {"zero": 0, "iterations": END}
    killed = job.launch(fault=f"step:0:{FAILURE}", committed=CHECKPOINT, apart=6, mode="auto", **options)
    assert killed.statuses[0] == SIGKILLED, killed.output[0][-3000:]
    committed = [info.iteration for info in scan(job.run_dir / "checkpoints").checkpoints]
    assert 4 in committed
    assert 8 not in committed
    assert not any(one.saved_by for record in manifests(job, CHECKPOINT) for one in record.operators.values())
    (message,) = drift_messages(job)
    assert "ranks 0 and 1" in message
    assert "iteration 8" in message
    back = job.launch(mode="auto", **options)
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    assert back.result(0)["started"]["iteration"] >= CHECKPOINT - INTERVAL
    states = [back.result(rank)["state_at_start"] for rank in range(RANKS)]
    assert states[0] != states[1]  # each its own
    # It is known from the start of that life on, and nothing is lost to it again.
    assert len(drift_messages(job)) == 1
    assert "have differed before" in back.output[0]
    assert verify_run(job.run_dir) == []


@pytest.mark.parametrize("end", ["in order", "sigterm"])
def test_the_last_state_is_committed_where_it_is_the_first_to_differ(job: Job, end: str) -> None:
    fault = "" if end == "in order" else "sigterm:0:6"
    ended = job.launch(fault=fault, zero=0, iterations=7, apart=6)
    last = 7
    committed = [info.iteration for info in scan(job.run_dir / "checkpoints").checkpoints]
    assert committed[-1] == last, (ended.statuses, ended.output[0][-3000:])
    assert not any(one.saved_by for record in manifests(job, last) for one in record.operators.values())
    (message,) = drift_messages(job)
    assert f"iteration {last}" in message


def test_ranks_that_have_drifted_apart_in_memory_alone_are_not_joined(job: Job) -> None:
    """Half of one and half of the other would be equal on both, and no checkpoint would find the difference."""
    settings = {"checkpoint": {"shared_memory": True}, "memory": {"interval_iterations": 1}}
    options: dict[str, Any] = {"zero": 0, "iterations": 16, "settings": settings}
    killed = job.launch(fault="step:all:11", committed=8, apart=9, **options)
    assert killed.statuses == [SIGKILLED] * RANKS, killed.output[0][-3000:]
    back = job.launch(**options)
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    begun = [back.result(rank)["started"]["iteration"] for rank in range(RANKS)]
    assert begun[0] == begun[1] <= 9, "both were alike up to there"


@pytest.mark.parametrize(
    ("interval_iterations", "apart", "load_back", "end"),
    [
        (20, 2, None, 7),  # before the first commit
        (INTERVAL, 2, None, 7),  # after one that found them different
        (INTERVAL, 10, (9, 10), 11),  # after a `load_checkpoint`, behind one that found them equal
    ],
)
def test_ranks_that_no_commit_has_found_equal_come_back_each_with_its_own(
    job: Job, interval_iterations: int, apart: int, load_back: tuple[int, int] | None, end: int
) -> None:
    """They differ in one element, which no sample of a snapshot shows."""
    often = {"shared_memory": True, "interval_iterations": interval_iterations}
    settings = {"checkpoint": often, "memory": {"interval_iterations": 1}}
    options: dict[str, Any] = {
        "zero": 0,
        "settings": settings,
        "apart": apart,
        "load_back": load_back,
        "unsampled": True,
    }
    killed = job.launch(fault=f"step:all:{end}", in_memory=end - 1, iterations=end + 4, **options)
    assert killed.statuses == [SIGKILLED] * RANKS, killed.output[0][-3000:]
    back = job.launch(iterations=end + 4, **options)
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    (at,) = {back.result(rank)["started"]["iteration"] for rank in range(RANKS)}
    assert at >= end - 1
    whole = Job(job.directory / "whole").launch(iterations=at, **options)
    states = [back.result(rank)["state_at_start"] for rank in range(RANKS)]
    assert states == [whole.result(rank)["state"] for rank in range(RANKS)]
    assert states[0] != states[1]


LEARNING: dict[str, Any] = {"learning": {"budget_fraction": 1.0}}
LEARNED: dict[str, Any] = {
    "zero": 0,
    "settings": LEARNING,
    "window_iterations": 100,
    "turns": True,
}


def learned(job: Job) -> list[set[str]]:
    """Of each rank, the operators that it had learned of by any of the checkpoints."""
    found: list[set[str]] = [set() for _ in range(RANKS)]
    for info in scan(job.run_dir / "checkpoints").checkpoints:
        for rank in range(RANKS) if info.full else ():
            branch = info.small_state(rank, ("learned", "vitp", "statistics"))
            found[rank] |= branch["operators"].keys()
    return found


def test_each_rank_learns_from_its_share(job: Job) -> None:
    """And comes back by prediction in a learned direction, for all operators, and alike."""
    killed = job.launch(fault=f"step:1:{FAILURE}", committed=CHECKPOINT, **LEARNED)
    assert killed.statuses[1] == -9, killed.output
    one, other = learned(job)
    assert one
    assert other
    assert not one & other
    back = job.launch(mode="predict", **LEARNED)
    assert set(back.statuses) == {0}, back.output
    with JournalReader(job.run_dir / "journal.db") as journal:
        recovery = journal.latest_recovery()
    assert recovery is not None
    assert recovery.method == "vitp"
    assert recovery.settings["direction"] == "vitp"
    assert recovery.settings["line_operators"] == 0
    first, second = back.result(0), back.result(1)
    assert first["started"]["iteration"] == second["started"]["iteration"] == recovery.failure_iteration
    assert first["state_at_start"] == second["state_at_start"]
