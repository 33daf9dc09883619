"""A killed job that restarts near the point of failure: where it continues, and when it is refused or given up."""

from typing import Any

from cpsr.checkpoint.catalogue import scan
from cpsr.journal import JournalReader, RecoveryRow
from tests.recovery.conftest import Killed, Uninterrupted
from tests.recovery.job import INTERVAL, ITERATIONS, Job

FAILURE, CHECKPOINT = 23, 20
KILL: dict[str, Any] = {"fault": f"step:1:{FAILURE}", "committed": CHECKPOINT}
NO_RISE = {"restart": {"loss_tolerance_nats": 1e-9, "probe_batches": 8}}  # of two ranks


def recovery_of(job: Job) -> RecoveryRow:
    with JournalReader(job.run_dir / "journal.db") as journal:
        recovery = journal.latest_recovery()
    assert recovery is not None
    return recovery


def test_restarts_at_the_failure(job: Job, killed: Killed, uninterrupted: Uninterrupted) -> None:
    killed(**KILL, zero=1)
    back = job.launch(mode="predict")
    assert back.statuses == [0, 0], back.output[0][-3000:]
    for rank in range(2):
        result = back.result(rank)
        assert result["started"]["iteration"] == FAILURE
        assert result["started"]["method"] == "line"
        # The batch after the failure's is the next; nothing is trained twice and nothing is left out.
        assert result["batches"] == uninterrupted().result(rank)["batches"][FAILURE:]
        assert result["learning_rate"] == uninterrupted().result(rank)["learning_rate"]
        assert result["iteration"] == ITERATIONS
        assert result["state"] != uninterrupted().result(rank)["state"]

    recovery = recovery_of(job)
    assert (recovery.failure_iteration, recovery.checkpoint_iteration) == (FAILURE, CHECKPOINT)
    assert recovery.method == "line"
    assert recovery.settings["used_iterations"][-1] == CHECKPOINT
    assert recovery.guard["loss"]["accepted"] is True
    assert recovery.guard["finite"]["not_finite"] == 0
    assert {source.rank for source in recovery.sources} == {0, 1}
    with JournalReader(job.run_dir / "journal.db") as journal:
        (failure,) = journal.failures()
        origins = {row.iteration: row.origin for row in journal.checkpoints() if row.status == "committed"}
    assert failure.iteration == FAILURE
    assert origins[CHECKPOINT] == "trained"
    assert origins[ITERATIONS] == "predicted"
    newest = scan(job.run_dir / "checkpoints").checkpoints[-1]
    assert newest.manifest.label == "predicted"


def test_auto_recomputes_where_a_prediction_is_not_worth_it(job: Job, uninterrupted: Uninterrupted) -> None:
    """Two checkpoints show no direction, and skipping costs more at the peak rate: auto is exact, and says so."""
    ended = job.launch(fault=f"step:1:{2 * INTERVAL + 1}", committed=2 * INTERVAL)
    assert -9 in ended.statuses
    back = job.launch(mode="auto")
    assert back.result()["started"] | {"reason": ""} == {"iteration": 2 * INTERVAL, "method": "exact", "reason": ""}
    assert "recomputing 1 iterations is the safer choice" in back.result()["started"]["reason"]
    assert back.result()["state"] == uninterrupted().result()["state"]


LATE: dict[str, Any] = {  # from iteration 8 on the rate is a twentieth of its peak
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-2}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 8, "warmup_num_steps": 2, "cos_min_ratio": 0.05},
    },
}


def test_late_in_a_falling_schedule_auto_goes_on_from_the_checkpoint_and_skips_the_iterations_since(
    job: Job, killed: Killed, uninterrupted: Uninterrupted
) -> None:
    interval = {"checkpoint": {"interval_iterations": 10}}
    killed(fault="step:1:13", committed=10, zero=1, optimizer=LATE, settings=interval)
    back = job.launch(mode="auto", optimizer=LATE, settings=interval, known_young=True)
    assert back.statuses == [0, 0], back.output[0][-3000:]
    reference = uninterrupted(iterations=10, optimizer=LATE, settings=interval)
    for rank in range(2):
        result = back.result(rank)
        assert result["started"] | {"reason": ""} == {"iteration": 13, "method": "stale", "reason": ""}
        assert result["state_at_start"] == reference.result(rank)["state"]
    recovery = recovery_of(job)
    assert recovery.guard["loss"] == {"accepted": True, "reason": "not evaluated: no weight was moved"}
    assert (recovery.settings["lost_share"], recovery.settings["move_iterations"]) == (1.0, 0.0)
    assert recovery.expected_end_cost_iterations == recovery.settings["skip_iterations"] < 3
    assert recovery.origin == "predicted"
    with JournalReader(job.run_dir / "journal.db") as journal:
        messages = [event.message for event in journal.events() if event.kind == "started" and event.rank == 0]
    assert "with the weights of checkpoint 10; 3 iterations are skipped. Stale state" in messages[-1]


def test_on_request_all_ranks_move_the_checkpoint_and_recompute(
    job: Job, killed: Killed, uninterrupted: Uninterrupted
) -> None:
    move = {"predictor": {"move": True}}
    killed(**KILL, zero=1, settings=move)
    back = job.launch(mode="auto", settings=move, known_young=True, costs=(1.5, -0.1))
    assert back.statuses == [0, 0], back.output[0][-3000:]
    for rank in range(2):
        result = back.result(rank)
        assert (result["started"]["iteration"], result["started"]["method"]) == (CHECKPOINT, "line")
        assert result["batches"] == uninterrupted().result(rank)["batches"][CHECKPOINT:]
        assert result["state"] != uninterrupted().result(rank)["state"]
    recovery = recovery_of(job)
    assert recovery.settings["skip_iterations"] == 0.0
    assert recovery.expected_end_cost_iterations is not None
    assert recovery.expected_end_cost_iterations < FAILURE - CHECKPOINT


def test_a_vetoed_displacement_is_tried_at_shorter_lengths(job: Job, killed: Killed) -> None:
    killed(**KILL, zero=1, settings=NO_RISE)
    back = job.launch(mode="predict", settings=NO_RISE, gain=7.0)
    assert back.statuses == [0, 0], back.output[0][-3000:]
    recovery = recovery_of(job)
    tried = recovery.guard["tried"]
    assert [one["length"] for one in tried] == [1.0, 0.5, 0.25][: len(tried)]
    assert [one["accepted"] for one in tried] == [False] * (len(tried) - 1) + [True]
    assert len(tried) > 1, tried
    assert f"at {tried[-1]['length']:g} of the displacement's length" in back.result()["started"]["reason"]
    assert back.result()["started"]["iteration"] == FAILURE


def test_a_prediction_that_is_worse_at_any_length_is_vetoed(
    job: Job, killed: Killed, uninterrupted: Uninterrupted
) -> None:
    killed(**KILL, zero=1)
    back = job.launch(mode="predict", settings=NO_RISE, gain=1000.0)
    recovery = recovery_of(job)
    assert recovery.guard["loss"]["accepted"] is False, recovery.guard
    assert [one["length"] for one in recovery.guard["tried"]] == [1.0, 0.5, 0.25]
    assert recovery.outcome == "vetoed"
    assert "vetoed" in back.result()["started"]["reason"]
    assert back.result()["started"]["iteration"] == CHECKPOINT
    for rank in range(2):
        assert back.result(rank)["state"] == uninterrupted().result(rank)["state"]


def test_a_diverging_state_is_rolled_back(job: Job, killed: Killed, uninterrupted: Uninterrupted) -> None:
    """In the same life, to the checkpoint, dealing its batches again: in the end nothing has happened."""
    killed(**KILL, zero=1)
    back = job.launch(mode="predict", poison=True)
    assert back.statuses == [0, 0], back.output[0][-3000:]
    recovery = recovery_of(job)
    assert recovery.outcome == "rolled_back", recovery.guard
    assert recovery.guard["watch"]["status"] == "diverged"
    for rank in range(2):
        mine, exact = back.result(rank), uninterrupted().result(rank)
        assert mine["started"]["iteration"] == FAILURE
        # The step that ended in the roll-back is noted at the checkpoint's iteration; from there on all is as it was.
        rolled_back_at = next(place for place, batch in enumerate(mine["batches"]) if batch[0] <= CHECKPOINT)
        assert mine["batches"][rolled_back_at + 1 :] == exact["batches"][CHECKPOINT:]
        assert mine["state"] == exact["state"]
        assert mine["rng"] == exact["rng"]


def test_a_diverging_state_without_a_way_back_is_reported(
    job: Job, killed: Killed, uninterrupted: Uninterrupted
) -> None:
    """A one-shot data iterator: training goes on, and a restart does what this life could not."""
    killed(**KILL, one_shot=True)
    diverged = job.launch(mode="predict", fault="step:1:28", poison=True, one_shot=True)
    assert diverged.statuses[1] == -9, diverged.output
    recovery = recovery_of(job)
    assert recovery.outcome == "kept"
    assert recovery.guard["watch"]["status"] == "diverged"
    with JournalReader(job.run_dir / "journal.db") as journal:
        (message,) = [event.message for event in journal.events() if event.kind == "diverged" and event.rank == 0]
    assert f"restart it with mode 'exact' to recompute from checkpoint {CHECKPOINT}" in message

    back = job.launch(mode="exact", one_shot=True)
    for rank in range(2):
        mine, reference = back.result(rank), uninterrupted(one_shot=True).result(rank)
        assert mine["started"]["iteration"] == CHECKPOINT
        assert mine["batches"] == reference["batches"][CHECKPOINT:]
        assert mine["state"] == reference["state"]


def test_killed_again_during_the_watch(job: Job, killed: Killed, uninterrupted: Uninterrupted) -> None:
    """Before the next checkpoint: predicted once more from the same one, to where the second life came."""
    killed(**KILL, zero=1)
    again = FAILURE + 2
    ended = job.launch(mode="predict", fault=f"step:1:{again}")
    assert ended.statuses[1] == -9, ended.output
    assert scan(job.run_dir / "checkpoints").checkpoints[-1].iteration == CHECKPOINT
    back = job.launch(mode="predict")
    assert back.statuses == [0, 0], back.output[0][-3000:]
    for rank in range(2):
        assert back.result(rank)["started"]["iteration"] == again
        assert back.result(rank)["started"]["method"] == "line"
        assert back.result(rank)["batches"] == uninterrupted().result(rank)["batches"][again:]
    recovery = recovery_of(job)
    assert (recovery.failure_iteration, recovery.checkpoint_iteration) == (again, CHECKPOINT)
    assert recovery.outcome == "kept"
    assert recovery.guard["watch"]["status"] == "unfinished"  # the run ended before the watch
