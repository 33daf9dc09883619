"""A job whose gradients are clipped and overflow is killed at each place of a window, and leaves gradients out."""

import re
from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.memory_removal import remove_memory_states
from cpsr.journal.reader import JournalReader
from tests.recovery.job import OF_THE_START, Ended, Job
from tests.recovery.test_memory import run_id
from tests.replay.test_conversion import SETTINGS

CLIPPED: dict[str, Any] = {"gradient_clipping": 0.05}
# The loss scale doubles after every second step, until a step overflows and halves it.
OVERFLOWING = CLIPPED | {"fp16": {"enabled": True, "initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 1}}
FP16: dict[str, Any] = {"zero": 2, "precision": "fp16", "optimizer": OVERFLOWING, "iterations": 30}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return Job(tmp_path_factory.mktemp("uninterrupted")).launch("exact", **FP16)


def calls_without(job: Job) -> list[int]:
    """By rank, how often a layer was called without gradients of its weights in the replay."""
    with JournalReader(job.run_dir / "journal.db") as reader:
        messages = [event.message for event in reader.events() if event.kind == "replayed"]
    return [int(re.findall(r"called (\d+) times", message)[0]) for message in messages]


def require_rest(back: Ended, reference: Ended, micro_batches: int = 1) -> None:
    """From the window on, both ranks are those of the uninterrupted job, bit for bit."""
    assert not any(back.statuses), back.output[0][-3000:]
    for rank in range(len(back.statuses)):
        mine, exact = back.result(rank), reference.result(rank)
        assert "window" in mine["started"]["reason"]
        assert mine["batches"] == exact["batches"][mine["started"]["iteration"] * micro_batches :]
        assert {**mine, **OF_THE_START} == {**exact, **OF_THE_START}


@pytest.mark.parametrize("at", [pytest.param(at, marks=pytest.mark.slow if at > 21 else ()) for at in (21, 22, 23, 24)])
def test_clipped_gradients_that_overflow_within_the_window(tmp_path: Path, uninterrupted: Ended, at: int) -> None:
    skipped = uninterrupted.result(0)["counters"]["counters"]["skipped_steps"]
    assert skipped >= 30 // 4, "each window of four is to have one"
    job = Job(tmp_path)
    job.launch("exact", fault=f"step:all:{at}", settings=SETTINGS, **FP16)
    try:
        back = job.launch("exact", settings=SETTINGS, **FP16)
    finally:
        remove_memory_states(run_id(job))
    require_rest(back, uninterrupted)
    assert min(calls_without(job)) > 0


def test_with_other_norms_the_state_differs_and_the_next_life_computes_every_gradient(
    tmp_path: Path, uninterrupted: Ended
) -> None:
    job = Job(tmp_path)
    job.launch("exact", fault="step:all:22", settings=SETTINGS, **FP16)
    try:
        refused = job.launch("exact", settings=SETTINGS, worker="tests.replay.wrong_norms", **FP16)
        back = job.launch("exact", settings=SETTINGS, **FP16)
    finally:
        remove_memory_states(run_id(job))
    assert all(refused.statuses)
    assert any("is not what it was the first time" in one for one in refused.output)
    assert any("the next start computes every gradient" in one for one in refused.output)
    require_rest(back, uninterrupted)
    assert calls_without(job) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"zero": 0, "optimizer": CLIPPED}, id="fp32, zero 0"),
        pytest.param(
            {"zero": 1, "precision": "bf16", "micro_batches": 2, "optimizer": CLIPPED}, id="bf16, accumulated"
        ),
        pytest.param({"zero": 2, "optimizer": CLIPPED, "ranks": 3}, id="three ranks, zero 2"),
        pytest.param({"zero": 1, "expert_parallel": 2, "optimizer": CLIPPED}, id="mixture of two ranks"),
        pytest.param({"zero": 1, "stages": 2, "micro_batches": 2, "optimizer": CLIPPED}, id="pipeline"),
    ],
)
def test_clipped_gradients(tmp_path: Path, options: dict[str, Any]) -> None:
    """With three ranks the place of a gradient in a bucket decides the order of its sum."""
    job = Job(tmp_path / "killed")
    job.launch("exact", fault="step:all:22", settings=SETTINGS, **options)
    try:
        back = job.launch("exact", settings=SETTINGS, **options)
    finally:
        remove_memory_states(run_id(job))
    reference = Job(tmp_path / "uninterrupted").launch("exact", **options)
    require_rest(back, reference, options.get("micro_batches", 1))
    assert min(calls_without(job)) > 0
