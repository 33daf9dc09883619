"""How a life begins on several ranks: where its configuration comes from, and what happens when a rank cannot."""

import time

import pytest

from cpsr.checkpoint.catalogue import scan
from cpsr.journal import JournalReader
from tests.recovery.job import Job


@pytest.mark.parametrize("block", ["mapping", "file"])
def test_the_block_in_the_deepspeed_configuration(job: Job, block: str) -> None:
    ended = job.launch(block=block, iterations=4, ranks=1)
    assert ended.statuses == [0], ended.output[0][-3000:]
    assert [info.iteration for info in scan(job.run_dir / "checkpoints").checkpoints] == [4]


def test_ranks_with_different_models_are_refused_together(job: Job) -> None:
    ended = job.launch(odd_rank=1)
    assert ended.statuses == [1, 1]
    for output in ended.output:
        assert "'seen' has shape () on rank 0 and (2,) on rank 1" in output
    assert not job.run_dir.exists()


@pytest.mark.parametrize(
    ("obstacle", "cause"),
    [("a directory", "IsADirectoryError"), ("a link that leads nowhere", "Too many levels of symbolic links")],
)
def test_a_rank_that_cannot_begin_takes_the_others_with_it(job: Job, obstacle: str, cause: str) -> None:
    """Its counter cannot be opened: the peer is not left waiting, and nothing is committed."""
    counter = job.run_dir / "progress" / "ranks" / "rank-00001"
    if obstacle == "a directory":
        counter.mkdir(parents=True)
    else:
        counter.parent.mkdir(parents=True)
        counter.symlink_to(job.run_dir / "nowhere")
    started = time.monotonic()
    ended = job.launch()
    assert ended.statuses == [1, 1], "a rank that had to be killed was left waiting"
    assert time.monotonic() - started < 30
    assert cause in ended.output[1]
    assert "Connection" in ended.output[0]
    assert scan(job.run_dir / "checkpoints").checkpoints == []
    with JournalReader(job.run_dir / "journal.db") as journal:
        assert [life.ending for life in journal.lives()] == ["error"]
