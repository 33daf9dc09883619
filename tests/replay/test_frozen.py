"""A job whose gradients are clipped and overflow is killed within a window, and then leaves weight gradients out."""

import re
from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.journal.reader import JournalReader
from tests.recovery.job import OF_THE_START, Ended, Job
from tests.recovery.test_memory import run_id
from tests.replay.test_conversion import OVERFLOWING, SETTINGS

CLIPPED: dict[str, Any] = {"gradient_clipping": 0.05}
FP16: dict[str, Any] = {"zero": 2, "precision": "fp16", "optimizer": OVERFLOWING, "iterations": 30}


def calls_without(job: Job) -> list[int]:
    """By replay, how often a layer was called without gradients of its weights."""
    with JournalReader(job.run_dir / "journal.db") as reader:
        messages = [event.message for event in reader.events() if event.kind == "replayed"]
    return [int(re.findall(r"called (\d+) times", message)[0]) for message in messages]


def require_rest(back: Ended, reference: Ended, micro_batches: int = 1) -> None:
    """From the window on, all ranks are those of the uninterrupted job, bit for bit."""
    assert not any(back.statuses), back.output[0][-3000:]
    for rank in range(len(back.statuses)):
        mine, exact = back.result(rank), reference.result(rank)
        assert "window" in mine["started"]["reason"]
        assert mine["batches"] == exact["batches"][mine["started"]["iteration"] * micro_batches :]
        assert {**mine, **OF_THE_START} == {**exact, **OF_THE_START}


def test_gradients_are_left_out_once_where_they_are_clipped_and_overflow(tmp_path: Path) -> None:
    uninterrupted = Job(tmp_path / "uninterrupted").launch("exact", **FP16)
    skipped = uninterrupted.result(0)["counters"]["counters"]["skipped_steps"]
    assert skipped >= 30 // 4, "each window of four is to have one"
    once, twice = Job(tmp_path / "killed"), Job(tmp_path / "killed again")
    try:
        for job in (once, twice):
            job.launch("exact", fault="step:all:22", settings=SETTINGS, **FP16)
        twice.launch("exact", fault="step:all:19", settings=SETTINGS, **FP16)
        for job in (once, twice):
            require_rest(job.launch("exact", settings=SETTINGS, **FP16), uninterrupted)
    finally:
        for job in (once, twice):
            remove_memory_states(run_id(job))
    assert min(calls_without(once)) > 0
    assert calls_without(twice)[-1] == 0  # the life before may have failed of it


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
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
