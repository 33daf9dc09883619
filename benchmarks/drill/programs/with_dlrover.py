"""DLRover's flash checkpoint: to shared memory every N steps, and every fourth time to storage."""

import copy
import logging

from dlrover.python.common.log import default_logger
from dlrover.python.common.storage import KeepLatestStepStrategy
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

from cpsr.benchmarks.drill.job import Rank, Record

STORED_EVERY = 4  # saves, as its demo has it: 50 steps to memory, 200 to storage
KEPT = 2
# After SIGTERM both machines say that the one file is written, and the first waits for this long for them to be one.
SAVE_SECONDS = 10


class Notes(logging.Handler):
    """Notes what a checkpoint is loaded from, which DLRover says in its log alone."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def emit(self, record: logging.LogRecord) -> None:
        """Note one line of the log."""
        if record.getMessage().startswith("Load the state dict from"):
            self._record.note(record.getMessage())


def main() -> None:
    """Train from the newest checkpoint to the end."""
    rank = Rank()
    job, module, optimizer = rank.job, rank.module, rank.optimizer
    if rank.number == 0:
        default_logger.addHandler(Notes(rank.record))
    folder = str(job.directory / "checkpoints")
    checkpointer = DdpCheckpointer(
        folder, deletion_strategy=KeepLatestStepStrategy(KEPT, folder), save_timeout=SAVE_SECONDS
    )
    begin = 0
    if state := checkpointer.load_checkpoint():
        # A copy, which loading makes on CUDA devices alone: or the optimizer would train in the checkpoint's memory.
        state = copy.deepcopy(state)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    if rank.number == 0:
        rank.record.note(f"begins after step {begin}")

    def after(step: int) -> None:
        if step % job.interval_iterations:
            return
        stored = step % (STORED_EVERY * job.interval_iterations) == 0
        checkpointer.save_checkpoint(
            step,
            {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
            storage_type=StorageType.DISK if stored else StorageType.MEMORY,
        )

    rank.train(begin, after)
    rank.end()


if __name__ == "__main__":
    main()
