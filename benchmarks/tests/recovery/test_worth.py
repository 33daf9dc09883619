"""The worth of an iteration, from real trainings of other lengths."""

import dataclasses
from pathlib import Path

import pytest

from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.recovery.ending import Training
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.benchmarks.recovery.workload import Workload
from cpsr.benchmarks.recovery.worth import LENGTH_SHARES, trainings_for, worths
from cpsr.benchmarks.tests.recovery.tiny import TINY, one_thread
from cpsr.errors import CPSRError
from cpsr.fitter.end_cost import Ending, IterationWorth

SHORT = dataclasses.replace(TINY, name="short", iterations=200)


def worth_of(workload: Workload, cache: Path, seeds: int = 1, own: float = 0.1) -> IterationWorth:
    trainings = [one for seed in range(seeds) for one in trainings_for(workload, seed, cache, "cpu")]
    endings = [Ending(seed, workload.iterations, own) for seed in range(seeds)]
    with one_thread(), Workers(1) as pool:
        return worths({workload: trainings}, {workload: endings}, pool, lambda done: None)[workload.name]


def whole_run(cache: Path) -> Trajectory:
    run = Trajectory(SHORT, SHORT.task(), 0, cache)
    run.extend(SHORT.iterations)
    return run


def test_a_whole_run_ends_as_the_training_of_its_length(tmp_path: Path) -> None:
    with one_thread():
        losses = whole_run(tmp_path).final_losses()
        again = Training(SHORT, 0, tmp_path / "endings", "cpu").ended()
    assert float(losses.mean()) == again.loss


def test_trainings_are_shorter_and_longer_under_schedules_of_their_own(tmp_path: Path) -> None:
    trainings = trainings_for(SHORT, 3, tmp_path, "cpu")
    assert [one.workload.iterations for one in trainings] == [160, 180, 220, 240]
    assert len({one.workload.name for one in trainings}) == len(LENGTH_SHARES)
    assert all(one.workload.learning_rate(one.workload.iterations) < 1e-9 for one in trainings)


def test_a_longer_training_ends_lower(tmp_path: Path) -> None:
    with one_thread():
        own = float(whole_run(tmp_path).final_losses().mean())
    found = worth_of(SHORT, tmp_path, seeds=2, own=own)
    assert found.nats > 3 * found.standard_error_nats > 0
    assert found.iterations == 200
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "endings").iterdir()}
    assert len(times) == 8
    assert worth_of(SHORT, tmp_path, seeds=2, own=own) == found
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "endings").iterdir()} == times


def test_a_training_that_does_not_learn_has_no_worth(tmp_path: Path) -> None:
    with pytest.raises(CPSRError, match="short: one more iteration"):
        worth_of(dataclasses.replace(SHORT, peak_learning_rate=1e-12), tmp_path)


def test_a_training_that_diverges_is_named(tmp_path: Path) -> None:
    with pytest.raises(CPSRError, match="seed 0: the training without a failure diverged"):
        worth_of(dataclasses.replace(SHORT, peak_learning_rate=1e30), tmp_path)


def test_a_whole_run_that_diverged_is_named(tmp_path: Path) -> None:
    wild = dataclasses.replace(SHORT, peak_learning_rate=1e30)
    with one_thread():
        run = Trajectory(wild, wild.task(), 0, tmp_path)
        run.extend(wild.iterations)
        with pytest.raises(CPSRError, match="seed 0: the training without a failure diverged"):
            run.final_losses()
