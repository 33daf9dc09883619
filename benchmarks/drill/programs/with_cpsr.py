"""CPSR around the loop of `plain.py`."""

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.benchmarks.drill.job import Rank


def main() -> None:
    """Train to the end."""
    rank = Rank()
    job = rank.job
    config = {
        "run_dir": job.directory / "run",
        "planner": {"mtbf_hours": job.mtbf_seconds / 3600},
        "ranks": {"heartbeat_timeout_seconds": job.hang_seconds},
    }
    with CPSRRecovery(TorchAdapter(rank.module, rank.optimizer), config) as recovery:
        for batch in recovery.resume(job.loader(rank.number)):
            loss = rank.update(batch)
            rank.record.step(recovery.iteration, loss)
    rank.end()


if __name__ == "__main__":
    main()
