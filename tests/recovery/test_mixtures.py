"""DeepSpeed MoE models: a rank killed, and the job brought back with every expert."""

import math
from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.verify import read_manifest, read_rank_manifest
from cpsr.journal import JournalReader
from tests.recovery.engines import EXPERTS
from tests.recovery.job import INTERVAL, Job

CHECKPOINT, FAILURE = 20, 22
SIGKILLED = -9
EXPERT = "experts.deepspeed_moe.experts.deepspeed_experts"

# ranks that share the experts, all ranks, ZeRO stage, where rank 1 dies -> the checkpoint that the next life restores.
KILLS: dict[tuple[int, int, int, str], int] = {
    (1, 2, 2, f"step:1:{FAILURE}"): CHECKPOINT,
    # Two pairs of ranks share them, and each is split over a rank of either.
    (2, 4, 1, f"step:1:{FAILURE}"): CHECKPOINT,
    # Its experts are in no file yet: what the other rank wrote is no checkpoint.
    (2, 2, 0, f"persist:1:{CHECKPOINT}"): CHECKPOINT - INTERVAL,
}


def losses(run_dir: Path) -> list[tuple[int, float | None]]:
    with JournalReader(run_dir / "journal.db") as journal:
        return [(step.iteration, step.loss) for step in journal.losses()]


def elements(run_dir: Path, iteration: int) -> dict[str, tuple[int, list[tuple[int, int]]]]:
    """Operator -> elements of the whole, and the slices that the checkpoint's ranks have saved of it."""
    directory = run_dir / "checkpoints" / step_name(iteration)
    manifest = read_manifest(directory)
    found: dict[str, tuple[int, list[tuple[int, int]]]] = {}
    for rank in range(manifest.world_size):
        for name, record in read_rank_manifest(directory, manifest, rank).operators.items():
            _, slices = found.setdefault(name, (math.prod(record.global_shape), []))
            slices.append((record.offset, record.numel))
    return found


@pytest.mark.parametrize(
    ("expert_parallel", "ranks", "zero", "fault"),
    [pytest.param(*one, marks=pytest.mark.slow if one[0] == 1 else ()) for one in KILLS],
)
def test_exact_is_bitwise(job: Job, tmp_path: Path, expert_parallel: int, ranks: int, zero: int, fault: str) -> None:
    options: dict[str, Any] = {"expert_parallel": expert_parallel, "ranks": ranks, "zero": zero}
    restored = KILLS[expert_parallel, ranks, zero, fault]
    killed = job.launch(fault=fault, committed=restored, **options)
    assert killed.statuses[1] == SIGKILLED, killed.output
    saved = elements(job.run_dir, restored)
    experts = {name for name in saved if name.startswith(EXPERT) and name.endswith(".0.weight")}
    assert experts == {f"{EXPERT}.{index}.0.weight" for index in range(EXPERTS)}
    for total, slices in map(saved.__getitem__, experts):
        assert sum(numel for _, numel in slices) == total

    back = job.launch(**options)
    uninterrupted = Job(tmp_path / "uninterrupted")
    reference = uninterrupted.launch(**options)
    back.require_rest_of(reference, restored)
    assert back.result()["started"]["method"] == "exact"
    assert losses(job.run_dir) == losses(uninterrupted.run_dir)
    assert len(losses(job.run_dir)) == reference.result()["iteration"]


def test_experts_shared_by_other_ranks_are_refused(job: Job) -> None:
    """The same names and shapes over all ranks, but not the same ones on each."""
    assert job.launch(expert_parallel=2, zero=0, iterations=INTERVAL).statuses == [0, 0]
    refused = job.launch(expert_parallel=1, zero=0)
    assert 0 not in refused.statuses
    assert "another split over ranks" in refused.output[0]
    assert f"param/{EXPERT}." in refused.output[0]
