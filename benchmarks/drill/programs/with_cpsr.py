"""CPSR around the loop of `plain.py`."""

import torch.distributed as dist

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.benchmarks.drill.job import Job, Record


def main() -> None:
    """Train to the end."""
    job = Job.of_arguments()
    rank = job.join()
    record = Record(job, rank)
    module = job.wrap(job.network())
    optimizer = job.optimizer(module)
    config = {
        "run_dir": job.directory / "run",
        "planner": {"mtbf_hours": job.mtbf_seconds / 3600},
        "ranks": {"heartbeat_timeout_seconds": job.hang_seconds},
    }
    with CPSRRecovery(TorchAdapter(module, optimizer), config) as recovery:
        for batch in recovery.resume(job.loader(rank, job.ranks)):
            optimizer.zero_grad()
            loss = module(batch)
            loss.backward()
            optimizer.step()
            record.step(recovery.iteration, loss)
    record.finish(module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
