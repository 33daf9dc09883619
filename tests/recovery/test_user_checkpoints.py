"""The user's own `save_checkpoint` and `load_checkpoint` beside CPSR, within one life."""

from typing import Any

from cpsr.journal import JournalReader
from tests.recovery.conftest import Uninterrupted
from tests.recovery.job import RANKS, Job


def test_a_kill_after_a_load_stays_on_the_new_branch(job: Job, uninterrupted: Uninterrupted) -> None:
    """The load goes to an iteration that CPSR itself is just saving: that save is of the branch that is given up."""
    saved_at, loaded_at, failure, checkpoint = 8, 9, 11, 8
    options: dict[str, Any] = {"load_back": (saved_at, loaded_at)}
    killed = job.launch(fault=f"step:1:{failure}", committed=checkpoint, **options)
    assert killed.statuses[1] == -9, killed.output
    assert "step-0000000008 is set aside as abandoned-step-0000000008" in killed.output[0]

    back = job.launch()
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    for rank in range(RANKS):
        mine, reference = back.result(rank), uninterrupted(**options).result(rank)
        assert mine["started"]["iteration"] == checkpoint
        # From the load on, the data goes on where the loader stood.
        assert mine["batches"] == reference["batches"][loaded_at + checkpoint - saved_at :]
        assert mine["state"] == reference["state"]
    with JournalReader(job.run_dir / "journal.db") as journal:
        messages = [event.message for event in journal.events() if event.kind == "external load" and event.rank == 0]
    assert len(messages) == 1
    assert f"went to iteration {saved_at}: that state is committed" in messages[0]
    assert f"the data continues after batch {loaded_at}, the loader's position" in messages[0]


def test_a_prediction_uses_nothing_from_before_the_load(job: Job) -> None:
    failure, checkpoint = 24, 22
    killed = job.launch(fault=f"step:1:{failure}", committed=checkpoint, load_back=(6, 10))
    assert killed.statuses[1] == -9, killed.output
    assert (job.run_dir / "checkpoints" / "step-0000000004").exists()  # it is there, and shows another training
    back = job.launch(mode="predict")
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    assert back.result()["started"]["method"] == "line"
    assert back.result()["started"]["iteration"] == failure
    with JournalReader(job.run_dir / "journal.db") as journal:
        recovery = journal.latest_recovery()
    assert recovery is not None
    assert recovery.settings["used_iterations"] == [14, 18, 22]
