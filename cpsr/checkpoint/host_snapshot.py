"""One snapshot, once it is taken."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from cpsr.checkpoint.contents import WHOLE, Contents
from cpsr.checkpoint.paced import Split
from cpsr.state.shard import Shard

__all__ = ["Snapshot"]


@dataclass(eq=False)
class Snapshot:
    """One rank's state at one iteration, in host memory.

    Attributes:
        iteration: iteration at which it was taken.
        shard: views into one host buffer; empty until `SnapshotPool.finish` returned.
        scalars: plain data, a copy of its own; None until `SnapshotPool.finish` returned.
        stall_seconds: how long this snapshot has kept the training from its work so far, without the wait for steps
            that a GPU had still to compute.
        copy_seconds: how long the asynchronous copy itself took.
        overlap_seconds: from the begin of the snapshot until it had to be complete; 0 if a device cannot tell yet.
        contents: what it holds of each operator, and where on the disk that is written.
        split: when its bytes were copied, where the pool copies in waits.
        disk: whether it is to be written; else it is for host memory alone.
        taken_at: iteration of each part that the host buffer holds once the snapshot is sealed; empty without moments.
        source: buffer of the snapshot before, from which parts are carried over; None: all parts are copied.
        replicate: whether it goes to other machines.
        sealed: whether it survives the process, once that is known; None where that has not been asked for.
    """

    iteration: int
    shard: Shard
    scalars: Any = None
    stall_seconds: float = 0.0
    copy_seconds: float = 0.0
    overlap_seconds: float = 0.0
    contents: Contents = field(default=WHOLE)
    split: Split | None = None
    disk: bool = True
    taken_at: Mapping[str, int] = field(default_factory=dict)
    source: int | None = None
    replicate: bool = True
    sealed: "Future[bool] | None" = None

    def is_pending(self) -> bool:
        """Whether it is still to be sealed, or offered to other machines."""
        return self.sealed is not None and not self.sealed.done()
