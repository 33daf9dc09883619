"""Three kills in a row: every batch that is trained is that of the run left alone, to the bit of what workers drew."""

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.recovery.data_worker import LOADERS
from tests.recovery.job import INTERVAL, Job

WORKER = "tests.recovery.data_worker"
ITERATIONS, ACCUMULATE = 26, 2
PREDICTED_FROM, FAILED_AT = 20, 23


def batches(job: Job, life: int, rank: int) -> dict[tuple[int, int], list[str]]:
    """(iteration, micro-batch) -> hash of its items, and of all that it held."""
    lines = (job.directory / f"life-{life}.{rank}.batches").read_text().splitlines()
    return {(iteration, micro): hashes for iteration, micro, *hashes in map(json.loads, lines)}


def launch(job: Job, kind: str, **options: Any) -> Any:
    return job.launch(worker=WORKER, kind=kind, iterations=ITERATIONS, survivor_seconds=3.0, **options)


def kills(kind: str) -> list[str]:
    """Micro-batches before which a life ends, one after each of three checkpoints; the same whenever the test runs."""
    drawn = random.Random(kind)
    checkpoints = [2 * INTERVAL, 3 * INTERVAL, 5 * INTERVAL]
    return [f"{at + drawn.randrange(1, INTERVAL)}:{drawn.randrange(ACCUMULATE)}" for at in checkpoints]


def check(directory: Path, kind: str, ranks: int) -> None:
    alone, job = Job(directory / "alone"), Job(directory / "job")
    whole = launch(alone, kind, ranks=ranks)
    assert whole.statuses == [0] * ranks, whole.output
    for fault in kills(kind):
        committed = int(fault.partition(":")[0]) // INTERVAL * INTERVAL
        killed = launch(job, kind, ranks=ranks, fault=fault, committed=committed)
        assert killed.statuses[0] == -9, killed.output
    back = launch(job, kind, ranks=ranks)
    assert back.statuses == [0] * ranks, back.output
    for rank in range(ranks):
        expected = batches(alone, 1, rank)
        assert len(expected) == ITERATIONS * ACCUMULATE
        starts = []
        for life in range(1, job.lives + 1):
            trained = batches(job, life, rank)
            assert trained == {at: expected[at] for at in trained}, f"rank {rank}, life {life}"
            starts.append(min(trained))
        assert starts == [(0, 0), (2 * INTERVAL, 0), (3 * INTERVAL, 0), (5 * INTERVAL, 0)]
        assert max(batches(job, job.lives, rank)) == max(expected)
        assert back.result(rank) == whole.result(rank)


OFTEN = ("map-style, workers", "torchdata, stream", "written", "Hugging Face, shuffle buffer")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.slow) for kind in LOADERS]
)
def test_three_kills_in_a_row_lose_and_repeat_no_sample(tmp_path: Path, kind: str) -> None:
    if "Hugging Face" in kind and importlib.util.find_spec("datasets") is None:
        pytest.skip("datasets is not installed")
    check(tmp_path, kind, ranks=1)


@pytest.mark.parametrize("kind", ["torchdata, distributed", pytest.param("torchdata, stream", marks=pytest.mark.slow)])
def test_every_rank_continues_from_the_state_of_its_own_loader(tmp_path: Path, kind: str) -> None:
    check(tmp_path, kind, ranks=2)


@pytest.mark.parametrize("kind", ["torchdata, stream", pytest.param("torchdata, workers", marks=pytest.mark.slow)])
def test_a_predicted_restart_continues_after_the_batch_of_the_failure(tmp_path: Path, kind: str) -> None:
    alone, job = Job(tmp_path / "alone"), Job(tmp_path / "job")
    assert launch(alone, kind, ranks=1).statuses == [0]
    killed = launch(job, kind, ranks=1, fault=f"{FAILED_AT}:0", committed=PREDICTED_FROM)
    assert killed.statuses == [-9], killed.output
    back = launch(job, kind, ranks=1, mode="predict")
    assert back.statuses == [0], back.output
    trained, expected = batches(job, 2, 0), batches(alone, 1, 0)
    assert min(trained) == (FAILED_AT, 0)
    assert {at: items for at, (items, _) in trained.items()} == {at: expected[at][0] for at in trained}
    assert max(trained) == max(expected)
