"""The waits of pipeline stages, against the closed form and DeepSpeed's own schedule."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.learning.pipeline_schedule import (
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    idle_shares,
    stage_slots,
    stage_waits,
)

seconds = st.floats(0.001, 10.0)


@given(st.integers(1, 12), st.integers(1, 24), seconds, seconds)
def test_every_stage_idles_as_the_closed_form_says(
    stages: int, micro_batches: int, forward: float, backward: float
) -> None:
    for stage, waits in enumerate(stage_waits(stages, micro_batches, forward, backward)):
        assert math.isclose(waits.idle_seconds, (stages - 1) * (forward + backward), rel_tol=1e-9, abs_tol=1e-9)
        assert math.isclose(waits.iteration_seconds, (stages + micro_batches - 1) * (forward + backward))
        assert len(waits.activation_seconds) == (micro_batches if stage > 0 else 0)
        assert len(waits.gradient_seconds) == (micro_batches if stage < stages - 1 else 0)
        assert math.isclose(waits.tail_seconds, stage * backward, abs_tol=1e-9)


def test_the_order_is_that_of_deepspeed() -> None:
    schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    kinds = {schedule.ForwardPass: "forward", schedule.BackwardPass: "backward"}
    receives = {schedule.RecvActivation: RECEIVE_ACTIVATION, schedule.RecvGrad: RECEIVE_GRADIENT}
    for stages in range(1, 9):
        for micro_batches in (1, 2, 3, 8, 13):
            for stage in range(stages):
                steps = list(schedule.TrainSchedule(micro_batches, stages, stage).steps())
                instructions = [type(one) for step in steps for one in step]
                computed = [kinds[one] for one in instructions if one in kinds]
                assert computed == [kind for _, kind, _ in stage_slots(stages, micro_batches, stage)]
                received = [receives[one] for one in instructions if one in receives]
                shares = idle_shares(stages, micro_batches, stage)
                assert sorted(received) == sorted(kind for kind, one in shares.items() for _ in one)
