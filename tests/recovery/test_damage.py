"""Damage that one rank alone can see: all ranks take the same older checkpoint."""

from cpsr.benchmarks.harness.checkpoint_files import rest_file
from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.verify import verify_run
from tests.recovery.job import RANKS, Job


def test_ranks_never_restore_different_checkpoints(job: Job) -> None:
    job.launch(fault="step:all:14", committed=12)
    shard = rest_file(job.run_dir / "checkpoints" / step_name(12), 1)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert [problem.file for problem in verify_run(job.run_dir)] == [shard]
    back = job.launch(iterations=11)
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    assert [back.result(rank)["started"]["iteration"] for rank in range(RANKS)] == [8] * RANKS
    # Kept, and out of the way of the save of the same iteration that comes again.
    assert list((job.run_dir / "checkpoints").glob(f"damaged-{step_name(12)}-*"))
    assert verify_run(job.run_dir) == []
