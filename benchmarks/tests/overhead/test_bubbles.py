"""From intervals to the predictor's work against the bubbles, measured and simulated."""

from dataclasses import replace
from typing import Any

import pytest

from cpsr.benchmarks.overhead.bubbles import DATA_PARALLEL, STAGES, BubbleResult, simulate, summarise_bubbles
from cpsr.benchmarks.overhead.interval import IntervalSample

# Ten iterations of two micro-batches: 0.6 s of computing, 0.4 s of waits, 0.1 s of work.
INTERVAL = IntervalSample(1.0, 0.4, 0.1, 0.0, 0.0, slices=50, late_slices=0, taken_in=True)


def result(first: IntervalSample, second: IntervalSample) -> BubbleResult:
    return summarise_bubbles([[[first] * 3, [second] * 3]], [1000, 900], interval_iterations=10, micro_batches=2)


def test_each_stage_is_summed_up_and_work_that_fits_meets_every_aim() -> None:
    found = result(INTERVAL, replace(INTERVAL, used_seconds=0.05))
    assert [stage.parameters for stage in found.stages] == [1000, 900]
    assert found.stages[1].work.value == pytest.approx(0.05)
    assert found.stages[0].inside_share == 1.0
    assert set(found.aims().values()) == {True}


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({"taken_in": False}, "every checkpoint is learned from before the next"),
        ({"used_seconds": 0.41}, "the work fits into the bubbles"),
        ({"late_seconds": 0.001, "late_slices": 1}, "all of the work lies inside bubbles"),
        ({"outside_seconds": 0.001}, "all of the work lies inside bubbles"),
    ],
)
def test_one_stage_that_falls_short_misses_the_aim(changed: dict[str, Any], missed: str) -> None:
    found = result(INTERVAL, replace(INTERVAL, **changed))
    assert [aim for aim, met in found.aims().items() if not met] == [missed]


def test_late_and_outside_work_counts_as_work() -> None:
    found = result(replace(INTERVAL, late_seconds=0.02, late_slices=5, outside_seconds=0.08), INTERVAL)
    stage = found.stages[0]
    assert stage.work.value == pytest.approx(0.2)
    assert stage.inside_share == pytest.approx(0.5)
    assert stage.late_slices_share == pytest.approx(0.1)
    assert stage.outside_seconds == pytest.approx(0.24)


def test_simulated_bubbles_grow_with_the_stages_and_sharing_divides_the_work() -> None:
    found = result(INTERVAL, replace(INTERVAL, used_seconds=0.05))
    jobs = simulate(found.stages, interval_iterations=10, micro_batches=2)
    assert {(job.stages, job.data_parallel) for job in jobs} == {(s, d) for s in STAGES for d in DATA_PARALLEL}
    alone = [job for job in jobs if job.data_parallel == 1]
    # 30 ms a micro-batch, 10 of them forward. The last stage waits for the first activation at least, which is one
    # forward for every stage before it.
    for job in alone:
        assert job.bubble_seconds >= 10 * (job.stages - 1) * 0.010 - 1e-9
        assert job.bubble_seconds <= 10 * (job.stages - 1) * 0.030 + 1e-9
    assert [job.bubble_seconds for job in alone] == sorted(job.bubble_seconds for job in alone)
    assert all(job.work_seconds == pytest.approx(0.1 / job.data_parallel) for job in jobs)
