"""Ranks with intervals of their own: partial checkpoints between the whole ones, and what a failure makes of them."""

from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.torch import load_file

from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.manifest import file_name
from cpsr.checkpoint.store import verify_run
from cpsr.checkpoint.verify import read_manifest, read_rank_manifest
from cpsr.journal import JournalReader
from tests.recovery.conftest import Killed, Uninterrupted
from tests.recovery.job import ITERATIONS, Job

# Whole at 4, 12, 20; between them rank 0 alone, at 8, 16, 24.
INTERVALS = (4, 8)
WHOLE, PARTIAL, FAILURE = 20, 24, 26
GAIN = 0.5
SETTINGS: dict[str, Any] = {
    "planner": {"intervals": "per_rank"},
    "predictor": {"window_iterations": 100, "gain": GAIN, "direction": "line"},
    "restart": {"displacement_limit": 1e9, "loss_tolerance_nats": 1e9},
}


def ages(run_dir: Path, rank: int) -> dict[int, int]:
    """Checkpoint -> iteration at which this rank's weights in it were taken."""
    found = {}
    for info in scan(run_dir / "checkpoints").checkpoints:
        operators = read_rank_manifest(info.directory, read_manifest(info.directory), rank).operators
        (found[info.iteration],) = {operator.iteration for operator in operators.values()}
    return found


@pytest.fixture
def failed(job: Job, killed: Killed) -> Job:
    """Killed after its last partial checkpoint."""
    killed(fault=f"step:1:{FAILURE}", committed=PARTIAL, settings=SETTINGS, rank_intervals=INTERVALS)
    return job


def test_partial_checkpoints_lie_between_the_whole_ones(failed: Job) -> None:
    checkpoints = scan(failed.run_dir / "checkpoints").checkpoints
    assert {info.iteration: info.partial for info in checkpoints} == {
        iteration: iteration % 8 == 0 for iteration in range(4, PARTIAL + 1, 4)
    }
    assert [info.iteration for info in checkpoints if info.full] == [12, WHOLE], "two whole ones are kept"
    assert ages(failed.run_dir, 0) == {iteration: iteration for iteration in range(4, PARTIAL + 1, 4)}
    assert ages(failed.run_dir, 1) == {4: 4, 8: 4, 12: 12, 16: 12, 20: 20, 24: 20}
    newest = checkpoints[-1].directory / file_name(1, "params")
    assert newest.samefile(checkpoints[-2].directory / file_name(1, "params")), "carried weights take no space"
    assert verify_run(failed.run_dir) == []
    with JournalReader(failed.run_dir / "journal.db") as journal:
        assert [row.iteration for row in journal.checkpoints()] == [4, 12, WHOLE]
        partial_iterations = [event.iteration for event in journal.events() if event.kind == "partial checkpoint"]
    assert partial_iterations == [8, 16, PARTIAL]


def test_each_rank_is_predicted_from_its_own_weights(failed: Job, uninterrupted: Uninterrupted) -> None:
    job = failed
    expected = [by_line(job, rank) for rank in range(2)]
    back = job.launch(mode="predict", settings=SETTINGS, began=True, rank_intervals=INTERVALS)
    assert back.statuses == [0, 0], back.output[0][-3000:]
    with JournalReader(job.run_dir / "journal.db") as journal:
        recovery = journal.latest_recovery()
    assert recovery is not None
    assert recovery.checkpoint_iteration == WHOLE
    assert recovery.settings["used_iterations"][-1] == PARTIAL
    assert recovery.settings["own_series_operators"] > 0
    for rank in range(2):
        assert back.result(rank)["started"]["iteration"] == FAILURE
        assert back.result(rank)["batches"] == uninterrupted().result(rank)["batches"][FAILURE:]
        assert back.result(rank)["learning_rate"] == uninterrupted().result(rank)["learning_rate"]
        began = load_file(job.directory / f"life-{job.lives}.{rank}.safetensors")
        times, series = expected[rank]
        target = times[PARTIAL] + recovery.settings["horizon_time"]
        assert series.keys() == began.keys()
        for name, (taken, values) in series.items():
            at = numpy.array([times[iteration] for iteration in taken])
            assert taken[-1] == (WHOLE, PARTIAL)[rank == 0]
            slope = numpy.polyfit(at - at[-1], values, 1)[0]
            line = GAIN * slope * (target - at[-1])
            factor = 1.0 if rank == 1 else float((began[name].numpy() - values[-1]) @ line / (line @ line))
            assert -1e-3 < factor < 2.001  # by how straight the operator's path is, where it has all checkpoints
            assert numpy.allclose(began[name].numpy(), values[-1] + factor * line, rtol=1e-5, atol=1e-6)
    assert verify_run(job.run_dir) == []


def by_line(job: Job, rank: int) -> tuple[dict[int, float], dict[str, tuple[list[int], Any]]]:
    """Iteration -> time, and operator -> when its snapshots were taken and their values, `(snapshots, numel)`."""
    times: dict[int, float] = {}
    snapshots: dict[int, dict[str, Any]] = {}
    for info in scan(job.run_dir / "checkpoints").checkpoints:
        record = read_rank_manifest(info.directory, read_manifest(info.directory), rank)
        times[info.iteration] = record.scalars["cumulative_learning_rate"]
        (taken,) = {operator.iteration for operator in record.operators.values()}
        snapshots[taken] = load_file(info.directory / file_name(rank, "params"))
    order = sorted(snapshots)
    names = [key.removeprefix("param/") for key in snapshots[order[0]]]
    return times, {
        name: (order, numpy.stack([snapshots[taken][f"param/{name}"].double().numpy() for taken in order]))
        for name in names
    }


@pytest.mark.parametrize("mode", ["exact", "rolled back"])
def test_exact_goes_back_to_the_newest_whole_one_bit_for_bit(
    failed: Job, uninterrupted: Uninterrupted, mode: str
) -> None:
    job = failed
    if mode == "exact":
        back = job.launch(settings=SETTINGS, rank_intervals=INTERVALS)
        assert back.result()["started"]["iteration"] == WHOLE
    else:
        back = job.launch(mode="predict", settings=SETTINGS, poison=True, rank_intervals=INTERVALS)
        assert back.result()["started"]["iteration"] == FAILURE
    assert back.statuses == [0, 0], back.output[0][-3000:]
    for rank in range(2):
        assert back.result(rank)["state"] == uninterrupted().result(rank)["state"]
        assert back.result(rank)["rng"] == uninterrupted().result(rank)["rng"]
    checkpoints = scan(job.run_dir / "checkpoints").checkpoints
    assert checkpoints[-1].iteration == ITERATIONS
    assert checkpoints[-1].full
    assert (24, False) in {(info.iteration, info.partial) for info in checkpoints}, "the first of a life is whole"
    assert verify_run(job.run_dir) == []


def test_a_run_ends_whole_and_the_next_life_keeps_the_intervals(job: Job, uninterrupted: Uninterrupted) -> None:
    """The first life ends at a partial checkpoint's iteration, whose place a whole one takes."""
    planner = {"intervals": "per_rank", "interval_min_iterations": 2, "interval_max_iterations": 4}
    settings: dict[str, Any] = {"checkpoint": {"interval_iterations": None}, "planner": planner}
    first = job.launch(settings=settings, rank_intervals=(2, 4), iterations=4)
    assert first.statuses == [0, 0], first.output[0][-3000:]
    assert ages(job.run_dir, 1) == {2: 2, 4: 4}
    assert [info.full for info in scan(job.run_dir / "checkpoints").checkpoints] == [True, True]
    second = job.launch(settings=settings, rank_intervals=())
    assert second.statuses == [0, 0], second.output[0][-3000:]
    assert ages(job.run_dir, 0) == {iteration: iteration for iteration in range(2, ITERATIONS + 1, 2)}
    # Whole at 6, and then every four.
    carried = {iteration: iteration - (iteration - 6) % 4 for iteration in range(6, ITERATIONS + 1, 2)}
    assert ages(job.run_dir, 1) == {2: 2, 4: 4} | carried
    for rank in range(2):
        assert second.result(rank)["started"]["iteration"] == 4
        assert second.result(rank)["state"] == uninterrupted().result(rank)["state"]
    assert verify_run(job.run_dir) == []


def test_copies_of_weights_have_one_interval(job: Job) -> None:
    """Without ZeRO every rank holds all weights: predicted from different ages these would no longer be the same."""
    ended = job.launch(settings=SETTINGS, rank_intervals=INTERVALS, zero=0, iterations=12)
    assert ended.statuses == [0, 0], ended.output[0][-3000:]
    assert [info.partial for info in scan(job.run_dir / "checkpoints").checkpoints] == [False] * 3
    with JournalReader(job.run_dir / "journal.db") as journal:
        (message,) = [event.message for event in journal.events() if event.kind == "one interval"]
    assert "ranks hold the same elements of 'layers.0." in message
