"""DeepSpeed MoE models: a rank killed, and the job brought back with every expert."""

import math
from pathlib import Path
from typing import Any

from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.verify import read_manifest, read_rank_manifest
from cpsr.journal import JournalReader
from tests.recovery.engines import EXPERTS
from tests.recovery.job import INTERVAL, Job

CHECKPOINT = 20
SIGKILLED = -9
EXPERT = "experts.deepspeed_moe.experts.deepspeed_experts"


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


def test_exact_is_bitwise(job: Job, tmp_path: Path) -> None:
    """Two pairs of ranks share the experts, and each is split over a rank of either.

    Those of the rank that dies are in no file yet: what the others wrote is no checkpoint.
    """
    options: dict[str, Any] = {"expert_parallel": 2, "ranks": 4, "zero": 1}
    restored = CHECKPOINT - INTERVAL
    killed = job.launch(fault=f"persist:1:{CHECKPOINT}", committed=restored, **options)
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
