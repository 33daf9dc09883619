"""lm-resiliency's GEMINI around the loop of `plain.py`, with `torch.save` behind it."""

import torch.distributed as dist
from lm_resiliency import InMemoryCkptConfig, enable_resiliency

from cpsr.benchmarks.drill.job import MACHINES, Rank
from cpsr.benchmarks.drill.programs.torch_save import Files

DURABLE_EVERY = 10  # captures, the ratio of its documentation's intervals of capture and disk


def main() -> None:
    """Train to the end."""
    rank = Rank()
    job, files = rank.job, Files(rank)
    step, source = 0, "the start"

    def load_durable() -> int:
        nonlocal step, source
        step = files.load()
        source = "the durable checkpoint" if step else source
        return step

    def load_captured(extra: dict[str, int]) -> None:
        nonlocal step, source
        step, source = extra["step"], "GEMINI's files"

    # Processes that are killed keep no memory, so what was captured is on the disk that all machines share, where a
    # rank also finds the copy that its peer has written as it left.
    gemini = InMemoryCkptConfig(
        replication_jump=job.ranks // MACHINES,
        disk_folder=str(job.directory / "gemini"),
        disk_flush_interval=job.interval_iterations,
        run_id="drill",
    )
    resiliency = enable_resiliency(
        rank.module,
        rank.optimizer,
        interval=job.interval_iterations,
        enable_detection=False,  # it replays layers on CUDA devices alone
        checkpoint=gemini,
        group=dist.group.WORLD,  # or it makes one with NCCL
        extra_state_fn=lambda: {"step": step + 1},  # it is called within the optimizer's step
        load_extra_state_fn=load_captured,
        load_fallback=load_durable,
    )
    if rank.number == 0:
        rank.record.note(f"begins after step {step} from {source}; without SCOUT, which needs CUDA devices")

    def after(complete: int) -> None:
        nonlocal step
        step = complete
        if step % (DURABLE_EVERY * job.interval_iterations) == 0:
            files.save(step)

    rank.train(step, after)
    resiliency.close()
    rank.end()


if __name__ == "__main__":
    main()
