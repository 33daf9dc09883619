"""Pipelines with MoE layers, two stages of two ranks: a rank killed, and the job brought back with every expert."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cpsr.checkpoint.history import DiskHistory
from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.store import verify_run
from cpsr.checkpoint.verify import read_manifest, read_rank_manifest
from cpsr.journal import JournalReader
from tests.device import NO_STAGES, cpu_only
from tests.recovery.job import Job
from tests.recovery.test_memory import IN_MEMORY, run_id, sources
from tests.recovery.test_mixtures import elements

pytestmark = cpu_only(NO_STAGES)

RANKS, MICRO_BATCHES = 4, 2
CHECKPOINT, FAILURE = 20, 22
# A fourth buffer: with three a kill goes back to the checkpoint that a busy disk still writes (docs/memory.md).
EACH_STEP: dict[str, Any] = {**IN_MEMORY, "memory": {"interval_iterations": 1}}
SHARED: dict[str, Any] = {"ranks": RANKS, "stages": 2, "micro_batches": MICRO_BATCHES}
SIGKILLED = -9
# expert-parallel ranks, ZeRO stage, precision, layers of experts of the two stages, rank that dies
CASES: list[Any] = [
    pytest.param(2, 1, "bf16", (1, 2), 3, id="ep2-zero1-bf16"),
    pytest.param(2, 0, "fp32", (0, 1), 1, marks=pytest.mark.slow, id="a-stage-without"),
    pytest.param(1, 0, "fp32", (2, 1), 2, id="ep1-zero0", marks=pytest.mark.slow),
    pytest.param(1, 1, "fp32", (1, 1), 0, id="ep1-zero1", marks=pytest.mark.slow),
    pytest.param(2, 0, "bf16", (2, 1), 0, id="ep2-zero0-bf16", marks=pytest.mark.slow),
    pytest.param(2, 0, "fp32", (2, 0), 2, id="a-last-stage-without", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("expert_parallel", "zero", "precision", "routed", "victim"), CASES)
def test_from_disk_and_from_memory_it_is_bitwise(
    tmp_path: Path, expert_parallel: int, zero: int, precision: str, routed: tuple[int, int], victim: int
) -> None:
    options = {**SHARED, "expert_parallel": expert_parallel, "zero": zero, "precision": precision, "routed": routed}
    reference = Job(tmp_path / "uninterrupted").launch(**options)
    assert reference.statuses == [0] * RANKS, reference.output[0][-3000:]

    disk = Job(tmp_path / "disk")
    killed = disk.launch(fault=f"step:{victim}:{FAILURE}", committed=CHECKPOINT, **options)
    assert killed.statuses[victim] == SIGKILLED, killed.output[victim][-3000:]
    saved = elements(disk.run_dir, CHECKPOINT)
    names = {name for name in saved if ".deepspeed_experts." in name and name.endswith(".0.weight")}
    numbers = [*range(1, 1 + routed[0]), *range(3, 3 + routed[1])]
    prefix = "experts.deepspeed_moe.experts.deepspeed_experts"
    assert names == {f"{layer}.{prefix}.{expert}.0.weight" for layer in numbers for expert in range(4)}
    back = disk.launch(**options)
    back.require_rest_of(reference, CHECKPOINT, MICRO_BATCHES)
    assert verify_run(disk.run_dir) == []

    memory = Job(tmp_path / "memory")
    try:
        fault = f"step:{victim}:{FAILURE}"
        killed = memory.launch(fault=fault, in_memory=FAILURE - 1, settings=EACH_STEP, **options)
        assert killed.statuses[victim] == SIGKILLED, killed.output[victim][-3000:]
        back = memory.launch(settings=EACH_STEP, **options)
    finally:
        remove_memory_states(run_id(memory))
    began = back.result()["started"]["iteration"]
    assert began in (FAILURE - 1, FAILURE)  # the others may have no time to complete the last
    back.require_rest_of(reference, began, MICRO_BATCHES)
    assert {source for source, _ in sources(memory)} == {"memory"}


def trained(job: Job, rank: int) -> dict[tuple[str, int], Any]:
    """Weights at every checkpoint of a job that saved all of them: (operator, iteration) -> values."""
    history = DiskHistory(job.run_dir / "checkpoints", rank)
    return {
        (name, entry.iteration): history.read(name, place, 0, history.numel(name)).clone()
        for name in history.operators
        for place, entry in enumerate(history.entries)
    }


@pytest.mark.parametrize(
    "routed", [(1, 2), pytest.param((0, 1), marks=pytest.mark.slow), pytest.param((2, 0), marks=pytest.mark.slow)]
)
def test_experts_of_all_stages_take_turns_and_come_back_with_their_ages(
    tmp_path: Path, routed: tuple[int, int]
) -> None:
    """One expert of each layer in a checkpoint, after a first one with all; ranks without experts choose them, too."""
    at, end = 24, 28
    options: dict[str, Any] = {**SHARED, "expert_parallel": 2, "zero": 0, "routed": routed, "iterations": end}
    dense = Job(tmp_path / "dense")
    assert dense.launch(**{**options, "iterations": at + 1}).statuses == [0] * RANKS
    job = Job(tmp_path / "sparse")
    settings = {"experts": {"policy": "sequential", "experts_per_layer": 1}}
    options["unpredicted"] = True  # the run goes on from the newest checkpoint
    killed = job.launch(mode="auto", fault=f"step:1:{at + 1}", committed=at, settings=settings, **options)
    assert killed.statuses[1] == SIGKILLED, killed.output[1][-3000:]
    back = job.launch(mode="auto", settings=settings, began=True, **options)
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    directory = job.run_dir / "checkpoints" / step_name(at)
    manifest = read_manifest(directory)
    taken: dict[str, int] = {}
    for rank in range(RANKS):
        ages = {name: one.iteration for name, one in read_rank_manifest(directory, manifest, rank).operators.items()}
        found, before = load_file(job.directory / f"life-2.{rank}.safetensors"), trained(dense, rank)
        for name, age in ages.items():
            assert torch.equal(found[name], before[name, age].view_as(found[name])), (name, age)
        assert {age for name, age in ages.items() if ".deepspeed_experts." not in name} == {at}
        taken |= ages
        assert (back.result(rank)["started"]["method"], back.result(rank)["started"]["iteration"]) == ("stale", at)
    layers = [f"{number}.experts" for number in (*range(1, 1 + routed[0]), *range(3, 3 + routed[1]))]
    for layer in layers:
        experts = [age for name, age in taken.items() if name.startswith(layer) and name.endswith(".0.weight")]
        assert sorted(experts) == [at - 12, at - 8, at - 4, at]
    with JournalReader(job.run_dir / "journal.db") as journal:
        lost = journal.recoveries()[-1].guard["lost_tokens"]["layers"]
    assert [one["layer"] for one in lost] == layers
    assert all(one["stale_experts"] == 3 and one["lost_tokens"] > 0 for one in lost)
    assert verify_run(job.run_dir) == []


@pytest.mark.parametrize("routed", [(0, 2), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_snapshots_in_memory_leave_out_experts_of_some_stages(tmp_path: Path, routed: tuple[int, int]) -> None:
    """Half of them in each; a stage without any copies all that it has, and goes back to the same iteration."""
    options: dict[str, Any] = {
        **SHARED,
        "expert_parallel": 2,
        "zero": 0,
        "routed": routed,
        "rounds": 2,
        "unpredicted": True,
    }
    settings = {
        "experts": {"policy": "sequential"},
        "checkpoint": {"shared_memory": True, "interval_iterations": 8},
        "memory": {"interval_iterations": 1},
    }
    job = Job(tmp_path)
    try:
        killed = job.launch(mode="auto", fault="step:all:23", in_memory=21, settings=settings, **options)
        assert killed.statuses == [SIGKILLED] * RANKS, killed.output[0][-3000:]
        back = job.launch(mode="auto", settings=settings, **options)
    finally:
        remove_memory_states(run_id(job))
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    started = [back.result(rank)["started"] for rank in range(RANKS)]
    assert [one["method"] for one in started] == ["stale"] * RANKS
    (began,) = {one["iteration"] for one in started}
    assert began > 16
    with JournalReader(job.run_dir / "journal.db") as journal:
        lost = journal.recoveries()[-1].guard["lost_tokens"]["layers"]
    assert [one["stale_experts"] for one in lost] == [2] * sum(routed)
    assert {one["oldest_iteration"] for one in lost} == {began - 1}
