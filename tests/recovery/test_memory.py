"""What outlives a process: snapshots in memory, and the state that healthy ranks leave when the group breaks."""

import contextlib
import json
import math
import shutil
import signal
from pathlib import Path

import pytest
import torch

from cpsr import CPSRRecovery
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.memory_states import SHARED_MEMORY
from cpsr.checkpoint.progress import read_progress
from cpsr.checkpoint.run_directory import IDENTITY
from cpsr.errors import RunMismatchError
from cpsr.journal.reader import JournalReader
from cpsr.service.plan import plan_of
from tests.committed import wait_until_committed
from tests.recovery.conftest import Uninterrupted
from tests.recovery.job import Job
from tests.recovery.test_faults import CrashError, Loop, config, loader, train

KILLED = -signal.SIGKILL
IN_MEMORY = {"checkpoint": {"shared_memory": True}}


def run_id(job: Job) -> str:
    return run_id_of(job.run_dir)


def run_id_of(run_dir: Path) -> str:
    return str(json.loads((run_dir / IDENTITY).read_text())["run_id"])


def sources(job: Job) -> list[tuple[str, int]]:
    """Of the newest recovery: where each rank's state came from."""
    with JournalReader(job.run_dir / "journal.db") as reader:
        return [(source.source, source.iteration) for source in reader.recoveries()[-1].sources]


def scopes(job: Job) -> list[str | None]:
    """What each failure has left."""
    with JournalReader(job.run_dir / "journal.db") as reader:
        return [failure.scope for failure in reader.failures()]


def sources_of(run_dir: Path) -> list[str]:
    with JournalReader(run_dir / "journal.db") as reader:
        return [source.source for source in reader.recoveries()[-1].sources]


def test_memory_that_is_gone_tells_of_the_failure_where_states_were_in_it(tmp_path: Path) -> None:
    settings = config(tmp_path, checkpoint={"shared_memory": True})
    loop = Loop()
    with pytest.raises(CrashError), CPSRRecovery(loop.adapter, settings) as recovery:
        train(recovery, loop, 32, crash=True)
    remove_memory_states(run_id_of(tmp_path))
    loop = Loop()
    with CPSRRecovery(loop.adapter, settings) as recovery:
        train(recovery, loop, 36)
    with JournalReader(tmp_path / "journal.db") as reader:
        assert [failure.scope for failure in reader.failures()] == ["everything"]


def test_a_snapshot_that_was_not_committed_yet_is_restored_exactly(job: Job, uninterrupted: Uninterrupted) -> None:
    killed = job.launch(fault="persist:0:12", committed=8, in_memory=12, settings=IN_MEMORY)
    assert KILLED in killed.statuses
    back = job.launch(settings=IN_MEMORY)
    back.require_rest_of(uninterrupted(), 12)
    assert (sources(job), scopes(job)) == ([("memory", 12)] * 2, ["process"])
    assert list(SHARED_MEMORY.glob(f"*{run_id(job)}*")) == []  # a clean end leaves nothing


@pytest.mark.parametrize(
    ("mode", "interval_iterations", "fault", "zero"),
    [
        ("exact", 1, "step:all:27", 1),
        ("auto", 3, "snapshot:1:26", 1),  # the other rank has sealed it, and dumps its state
        ("exact", 3, "snapshot:1:26", 0),  # of what both hold, each has copied its share
        ("auto", 1, "step:all:27", 0),
    ],
)
def test_when_all_processes_are_killed_as_many_iterations_are_lost_at_most(
    job: Job, uninterrupted: Uninterrupted, mode: str, interval_iterations: int, fault: str, zero: int
) -> None:
    settings = {
        "checkpoint": {"shared_memory": True, "interval_iterations": 10},  # compared at 10, and so shared from 20 on
        "memory": {"interval_iterations": interval_iterations},
        "verification": {"budget_fraction": 0.0},  # each rank copies all of what a repeated step begins with
    }
    killed = job.launch(mode, fault=fault, committed=20, settings=settings, zero=zero)
    assert killed.statuses[1] == KILLED
    assert (killed.statuses[0] == KILLED) == (":all:" in fault)
    snapshots = [state for state in Arena(run_id(job)).list() if state.kind == "snapshot"]
    assert {bool(state.lacking) for state in snapshots} == {zero == 0}
    back = job.launch(mode, settings=settings, zero=zero)
    assert back.statuses == [0, 0], back.output[0][-3000:]
    found = sources(job)
    assert {tier for tier, _ in found} == {"memory"}
    (at,) = {iteration for _, iteration in found}
    with JournalReader(job.run_dir / "journal.db") as reader:
        failure = reader.recoveries()[-1].failure_iteration
    assert failure is not None
    assert failure - at <= interval_iterations
    back.require_rest_of(uninterrupted(zero=zero), at)


def test_of_one_lost_rank_only_its_shard_is_predicted(job: Job, uninterrupted: Uninterrupted) -> None:
    killed = job.launch("predict", fault="step:1:23", committed=20, settings=IN_MEMORY)
    assert killed.statuses[1] == KILLED
    (left,) = [state for state in Arena(run_id(job)).list() if state.kind == "departure"]
    assert (left.rank, left.iteration) == (0, 23)
    back = job.launch("predict", settings=IN_MEMORY)
    assert back.statuses == [0, 0], back.output[0][-3000:]
    assert sources(job) == [("departure", 23), ("predicted", 23)]
    with JournalReader(job.run_dir / "journal.db") as reader:
        settings = reader.recoveries()[-1].settings
    assert settings["lost_share"] == settings["context"]["lost_share"] == pytest.approx(0.5, abs=0.1)
    reference = uninterrupted(iterations=23)
    survivor, lost = (back.result(rank) for rank in range(2))
    assert survivor["started"]["iteration"] == lost["started"]["iteration"] == 23
    assert survivor["state_at_start"] == reference.result(0)["state"]
    assert lost["state_at_start"] != reference.result(1)["state"]


def test_where_all_ranks_hold_the_same_a_survivor_serves_all(job: Job, uninterrupted: Uninterrupted) -> None:
    killed = job.launch("auto", fault="step:1:23", committed=20, settings=IN_MEMORY, zero=0)
    assert killed.statuses[1] == KILLED
    back = job.launch("auto", settings=IN_MEMORY, zero=0)
    assert back.statuses == [0, 0], back.output[0][-3000:]
    assert sources(job) == [("departure", 23)] * 2
    for rank in range(2):
        mine, reference = back.result(rank), uninterrupted(zero=0).result(rank)
        assert (mine["started"]["iteration"], mine["started"]["method"]) == (23, "departure")
        assert mine["state_at_start"] == uninterrupted(zero=0, iterations=23).result(rank)["state"]
        # Each batch once; only the dropout is another, since a killed rank's random state is lost.
        assert mine["batches"] == reference["batches"][23:]
        assert mine["counters"] == reference["counters"]
    plan = plan_of(job.run_dir)
    assert plan is not None
    assert plan.last_recovery is not None
    assert plan.last_recovery["origin"] == "trained"
    assert plan.newest_checkpoint is not None
    assert (plan.newest_checkpoint["origin"], plan.descends_from_predicted) == ("trained", False)


def test_what_others_left_is_taken_also_after_the_newest_step_that_the_lost_rank_published(
    job: Job, uninterrupted: Uninterrupted
) -> None:
    """On a GPU it may have completed more; by four steps what it published is older than the checkpoint."""
    late = 4
    killed = job.launch("auto", fault="step:1:23", committed=20, settings=IN_MEMORY, zero=0, late=(1, late))
    assert killed.statuses[1] == KILLED
    progress = read_progress(job.run_dir, 2)
    assert progress is not None
    assert [max(progress.ranks[rank]) for rank in range(2)] == [23, 23 - late]
    back = job.launch("auto", settings=IN_MEMORY, zero=0)
    assert back.statuses == [0, 0], back.output[0][-3000:]
    assert sources(job) == [("departure", 23)] * 2
    with JournalReader(job.run_dir / "journal.db") as reader:
        assert reader.recoveries()[-1].failure_iteration == 23
    for rank in range(2):
        mine, reference = back.result(rank), uninterrupted(zero=0).result(rank)
        assert mine["state_at_start"] == uninterrupted(zero=0, iterations=23).result(rank)["state"]
        assert mine["batches"] == reference["batches"][23:]
        assert mine["counters"] == reference["counters"]


def test_what_broke_the_group_does_not_come_back_for_ever(tmp_path: Path) -> None:
    """A NaN that a step has left in the weights, and a loop that looks for it and ends."""

    def life() -> tuple[str, int]:
        loop = Loop()
        with CPSRRecovery(loop.adapter, config(tmp_path, mode="auto", checkpoint=IN_MEMORY["checkpoint"])) as recovery:
            restored = recovery.restored
            for x, y in recovery.resume(loader(), repeat=True):
                loop.step(loop.model(x, y) * (math.nan if recovery.iteration == 10 else 1.0))
                if recovery.iteration == 10:
                    wait_until_committed(tmp_path, 9)
                if not all(bool(torch.isfinite(weights).all()) for weights in loop.model.parameters()):
                    raise FloatingPointError("NaN")
                if recovery.iteration >= 13:
                    break
        return restored.method, restored.restored_iteration

    with pytest.raises(FloatingPointError):
        life()
    with pytest.raises(FloatingPointError):
        life()  # refuses what was left, and comes to the same place again
    assert sources_of(tmp_path) == ["disk"]
    remove_memory_states(run_id_of(tmp_path))


def test_the_label_of_a_predicted_state_survives_a_departure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpsr.predictor.divergence_watch.WATCH_ITERATIONS", 2)

    def life(until: int, mode: str, *, crash: bool = True) -> CPSRRecovery:
        loop = Loop()
        settings = {"mode": mode, "checkpoint": IN_MEMORY["checkpoint"]}
        recovery = CPSRRecovery(loop.adapter, config(tmp_path, **settings))
        with contextlib.suppress(CrashError), recovery:
            train(recovery, loop, until, crash=crash)
        return recovery

    life(23, "exact")
    for path in SHARED_MEMORY.glob(f"*{run_id_of(tmp_path)}*"):
        path.unlink()  # as where the machine was lost
    predicted = life(25, "predict")
    assert predicted.restored.predicted
    left = life(26, "auto")
    assert left.restored.method == "departure"
    plan = plan_of(tmp_path)
    assert plan is not None
    assert plan.descends_from_predicted
    life(27, "auto", crash=False)
    assert scan(tmp_path / "checkpoints").checkpoints[-1].manifest.label == "predicted"
    remove_memory_states(run_id_of(tmp_path))


def test_a_copy_of_a_run_directory_does_not_go_on_from_the_memory_of_the_original(tmp_path: Path) -> None:
    """The state there is of a later step than the copy, and would be lost to the original."""
    original, copy = tmp_path / "run", tmp_path / "copy"
    own = config(original, checkpoint=IN_MEMORY["checkpoint"])
    loop = Loop()
    with CPSRRecovery(loop.adapter, own) as recovery:
        train(recovery, loop, 8)
    shutil.copytree(original, copy)
    loop = Loop()
    with contextlib.suppress(CrashError), CPSRRecovery(loop.adapter, own) as recovery:
        train(recovery, loop, 12, crash=True)
    left = files_of(run_id_of(original))
    loop = Loop()
    with (
        pytest.raises(RunMismatchError, match=rf"{copy} is a copy of {original}, of which states are in the memory"),
        CPSRRecovery(loop.adapter, config(copy, checkpoint=IN_MEMORY["checkpoint"])) as recovery,
    ):
        raise AssertionError(f"begun at {recovery.restored}")
    assert files_of(run_id_of(original)) == left
    loop = Loop()
    with CPSRRecovery(loop.adapter, own) as recovery:
        assert recovery.iteration == 11, "a snapshot in memory"
        train(recovery, loop, 13)
    loop = Loop()
    with CPSRRecovery(loop.adapter, config(copy, checkpoint=IN_MEMORY["checkpoint"])) as recovery:
        assert recovery.iteration == 8


def crashed(run_dir: Path, **settings: object) -> str:
    """A life that ends with an error; its run's id."""
    loop = Loop()
    own = config(run_dir, checkpoint={**IN_MEMORY["checkpoint"], **settings})
    with contextlib.suppress(CrashError), CPSRRecovery(loop.adapter, own) as recovery:
        train(recovery, loop, 4, crash=True)
    return run_id_of(run_dir)


def files_of(run_id: str) -> list[str]:
    return sorted(path.name.partition(run_id)[2] for path in SHARED_MEMORY.glob(f"cpsr-{run_id}-*"))


@pytest.mark.parametrize("shared", [True, False])
def test_what_earlier_lives_of_other_shapes_have_left_goes_when_a_life_begins(tmp_path: Path, shared: bool) -> None:
    run_id = crashed(tmp_path)
    own, others = ("00000-3", "00000-small-0", "00000-fetched-00000-small"), ("00007-0", "00007-replica-00000-0")
    for slot in (*own, *others):
        (SHARED_MEMORY / f"cpsr-{run_id}-rank-{slot}").write_bytes(bytes(8192))
    assert crashed(tmp_path, shared_memory=shared) == run_id
    assert files_of(run_id) == (["-owner", *(f"-rank-00000-{slot}" for slot in range(3))] if shared else [])
    remove_memory_states(run_id)
