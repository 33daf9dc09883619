"""DeepSpeed with windows: experts that ranks share, slices of ZeRO, accumulated batches, stages of a pipeline."""

from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.memory_owners import remove_memory_states
from tests.recovery.job import OF_THE_START, Job
from tests.recovery.test_memory import run_id

SETTINGS = {
    "checkpoint": {"shared_memory": True, "interval_iterations": 1000},
    "replay": {"enabled": True, "window_iterations": 4},
}
MIXTURE: dict[str, Any] = {"expert_parallel": 2, "zero": 1}
# Gradients are clipped. The loss scale doubles after every second step, until a step overflows and halves it.
OVERFLOWING = {
    "gradient_clipping": 0.05,
    "fp16": {"enabled": True, "initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 1},
}
STAGES: dict[str, Any] = {**MIXTURE, "precision": "bf16", "ranks": 4, "stages": 2, "micro_batches": 2}


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        pytest.param(MIXTURE, "step:all:22", id="mixture of two ranks"),
        pytest.param({"expert_parallel": 1, "zero": 2}, "step:all:24", marks=pytest.mark.slow, id="mixture, zero 2"),
        pytest.param({"expert_parallel": 2, "zero": 0}, "step:all:23", marks=pytest.mark.slow, id="mixture, zero 0"),
        pytest.param({"expert_parallel": 2, "zero": 2}, "step:1:21", marks=pytest.mark.slow, id="one rank killed"),
        pytest.param(
            {"zero": 2, "precision": "fp16", "optimizer": OVERFLOWING}, "step:all:22", id="clipped, with overflows"
        ),
        pytest.param({"zero": 2, "micro_batches": 2}, "step:all:22", marks=pytest.mark.slow, id="accumulation"),
        pytest.param({"zero": 1, "stages": 2, "micro_batches": 2}, "step:1:22", marks=pytest.mark.slow, id="pipeline"),
        pytest.param(STAGES, "step:2:22", id="mixture in stages"),
        *(
            pytest.param(STAGES, f"step:all:{at}", marks=pytest.mark.slow, id=f"mixture in stages, {at}")
            for at in range(21, 25)
        ),
        pytest.param(
            {**STAGES, "zero": 0, "precision": "fp32", "routed": (0, 2)},
            "step:0:23",
            marks=pytest.mark.slow,
            id="mixture in one stage",
        ),
    ],
)
def test_the_state_is_that_of_a_job_that_nothing_happened_to(
    tmp_path: Path, options: dict[str, Any], fault: str
) -> None:
    job = Job(tmp_path / "killed")
    job.launch("exact", fault=fault, settings=SETTINGS, **options)
    try:
        back = job.launch("exact", settings=SETTINGS, **options)
    finally:
        remove_memory_states(run_id(job))
    ranks = options.get("ranks", 2)
    assert back.statuses == [0] * ranks, back.output[0][-3000:]
    reference = Job(tmp_path / "uninterrupted").launch("exact", **options)
    for rank in range(ranks):
        mine, exact = back.result(rank), reference.result(rank)
        began = mine["started"]["iteration"]
        assert began in (13, 17, 21)  # that of 21 where it is sealed before a kill at 24
        assert "window" in mine["started"]["reason"]
        assert mine["batches"] == exact["batches"][began * options.get("micro_batches", 1) :]
        assert {**mine, **OF_THE_START} == {**exact, **OF_THE_START}
