"""No way back: the job alone, which every other program is compared with."""

import torch.distributed as dist

from cpsr.benchmarks.drill.job import Job, Record


def main() -> None:
    """Train to the end."""
    job = Job.of_arguments()
    rank = job.join()
    record = Record(job, rank)
    module = job.wrap(job.network())
    optimizer = job.optimizer(module)
    for step, batch in enumerate(job.batches(rank, job.ranks, 0), start=1):
        optimizer.zero_grad()
        loss = module(batch)
        loss.backward()
        optimizer.step()
        record.step(step, loss)
    record.finish(module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
