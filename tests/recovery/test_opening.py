"""How a life begins on several ranks: where its configuration comes from, and what happens when a rank cannot."""

import re
import shlex
import time

import pytest
from typer.testing import CliRunner

from cpsr.checkpoint.catalogue import scan
from cpsr.cli.main import app
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


def test_a_rank_that_cannot_begin_takes_the_others_with_it(job: Job) -> None:
    """Its counter cannot be opened: the peer is not left waiting, and nothing is committed."""
    (job.run_dir / "progress" / "rank-00001").mkdir(parents=True)
    started = time.monotonic()
    ended = job.launch()
    assert ended.statuses == [1, 1], "a rank that had to be killed was left waiting"
    assert time.monotonic() - started < 30
    assert "IsADirectoryError" in ended.output[1]
    assert "Connection" in ended.output[0]
    assert scan(job.run_dir / "checkpoints").checkpoints == []
    with JournalReader(job.run_dir / "journal.db") as journal:
        assert [life.ending for life in journal.lives()] == ["error"]


def test_another_number_of_ranks_is_shown_a_way_that_works(job: Job) -> None:
    first = job.launch(iterations=4)
    assert first.statuses == [0, 0], first.output[0][-3000:]
    refused = job.launch(iterations=8, ranks=1)
    assert refused.statuses == [1]
    out = follow_export(refused.output[0])
    elsewhere = {"run_dir": str(job.directory / "elsewhere")}
    went_on = job.launch(iterations=8, ranks=1, settings=elsewhere, load_universal=out)
    assert went_on.statuses == [0], went_on.output[0][-3000:]
    assert went_on.result()["started"]["iteration"] == 4
    assert went_on.result()["iteration"] == 8
    assert went_on.result()["learning_rate"] == pytest.approx([2e-2 / 1.08])  # the schedule of the eighth step


def follow_export(message: str) -> str:
    """Run the command that a refusal names; what it has written."""
    found = re.search(r"`cpsr (export [^`]+)`", message)
    assert found is not None, message
    arguments = shlex.split(found[1])
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return arguments[arguments.index("--out") + 1]
