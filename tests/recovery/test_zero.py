"""Every ZeRO stage, bf16 and gradient accumulation: killed, and back at the checkpoint bit for bit."""

from typing import Any

import pytest

from tests.recovery.conftest import Uninterrupted
from tests.recovery.job import ITERATIONS, RANKS, Job

CHECKPOINT, FAILURE = 20, 22


def in_json(kind: str, **params: Any) -> dict[str, Any]:
    """The sections of a DeepSpeed configuration that names its optimizer and schedule itself."""
    warm_up = {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 5}}
    return {"optimizer": {"type": kind, "params": {"lr": 2e-2, **params}}, "scheduler": warm_up}


def offloading(zero: int, *kinds: str) -> dict[str, Any]:
    """The section that has DeepSpeed keep these on the host: `optimizer`, `param`."""
    offload = {f"offload_{kind}": {"device": "cpu"} for kind in kinds}
    return {"zero_optimization": {"stage": zero, **offload}, "zero_force_ds_cpu_optimizer": False}


ENGINES: dict[str, dict[str, Any]] = {
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
    "bf16": {"precision": "bf16"},
    "accumulating": {"micro_batches": 2},
    "AdamW of the JSON": {"optimizer": in_json("AdamW", torch_adam=True)},
    "offloaded parameters": {"precision": "bf16", "optimizer": offloading(3, "optimizer", "param")},
    "Adam of the JSON": {"optimizer": in_json("Adam", torch_adam=True, adam_w_mode=False), "zero": 3},
}


# The conformance of the engines restores each of them; which one a kill meets makes no difference to it.
EACH_CHANGE = ("zero 3", "accumulating")


@pytest.mark.parametrize(
    "engine", [one if one in EACH_CHANGE else pytest.param(one, marks=pytest.mark.slow) for one in ENGINES]
)
def test_exact_is_bitwise(job: Job, uninterrupted: Uninterrupted, engine: str) -> None:
    options = ENGINES[engine]
    # Where a step has two batches, the rank dies between them.
    phase = "step" if engine != "accumulating" else "micro"
    killed = job.launch(fault=f"{phase}:1:{FAILURE}", committed=CHECKPOINT, **options)
    assert killed.statuses[1] == -9, killed.output
    back = job.launch(**options)
    back.require_rest_of(uninterrupted(**options), CHECKPOINT, options.get("micro_batches", 1))


def test_prediction_continues_with_the_next_micro_batch(job: Job, uninterrupted: Uninterrupted) -> None:
    """Two batches a step: what a step that was not finished has used is dealt again."""
    killed = job.launch(fault=f"micro:1:{FAILURE}", committed=CHECKPOINT, micro_batches=2)
    assert killed.statuses[1] == -9, killed.output
    back = job.launch(mode="predict", micro_batches=2)
    assert back.statuses == [0, 0], back.output[0][-3000:]
    for rank in range(RANKS):
        assert back.result(rank)["started"]["iteration"] == FAILURE
        assert back.result(rank)["started"]["method"] == "line"
        assert back.result(rank)["batches"] == uninterrupted(micro_batches=2).result(rank)["batches"][2 * FAILURE :]
        assert back.result(rank)["iteration"] == ITERATIONS
