"""What a job needs of its machines and of its disk."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cpsr.checkpoint.resources import kept_bytes, kept_checkpoints
from cpsr.config import CPSRConfig
from cpsr.replay.recorder import FILES as WINDOWS

__all__ = ["BYTES_PER_PARAMETER", "Launched", "Needs"]

BYTES_PER_PARAMETER = 12  # Adam with weights in fp32, or fp32 masters of others: a weight and two moments
_TENSORS_PER_PARAMETER = 3
# A rank writes weights, moments, the rest and its manifest; a checkpoint has a folder, COMMIT, THINNED and a manifest.
_FILES_OF_RANK, _FILES_OF_CHECKPOINT = 4, 4
# Beside the checkpoints: a rank's counter, heartbeat, events and exit; the journal, markers and folders of a run.
_RANK_FILES_BESIDE, _FILES_BESIDE = 5, 50
REPLICA_SLOTS = 2  # of each owner at each holder (docs/memory.md)


@dataclass(frozen=True)
class Launched:
    """How this process was started, as its environment has it.

    Attributes:
        ranks: of the job; 1 without a launcher.
        local_ranks: of them on this machine.
        machines: at least.
    """

    ranks: int = 1
    local_ranks: int = 1
    machines: int = 1

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> "Launched":
        """From the variables of torchrun; values that are no numbers count as absent."""
        ranks = _number(environment.get("WORLD_SIZE"))
        local = _number(environment.get("LOCAL_WORLD_SIZE", str(ranks)))
        return cls(ranks, min(local, ranks), -(-ranks // min(local, ranks)))


@dataclass(frozen=True)
class Needs:
    """A job, as far as it is known.

    Attributes:
        config: given, or the defaults.
        launched: ranks and machines.
        state_bytes: weights and moments of one rank; None: not known.
    """

    config: CPSRConfig
    launched: Launched
    state_bytes: int | None = None

    @property
    def run_dir(self) -> Path:
        """Of the run."""
        return self.config.run_dir

    @property
    def buffer_bytes(self) -> int | None:
        """Host memory of all snapshot buffers on this machine, without which a job refuses to start."""
        return self._here(self.config.memory.buffers)

    @property
    def window_bytes(self) -> int:
        """Host memory of all sparse windows of one iteration on this machine; a job without it goes on without them."""
        return (self._here(WINDOWS) or 0) if self.config.replay.enabled else 0

    @property
    def replica_bytes(self) -> int:
        """Host memory at most for what this machine keeps of ranks on others; a job takes less where there is less."""
        replicas = min(self.config.peers.replicas, self.launched.machines - 1)
        return REPLICA_SLOTS * replicas * (self.state_bytes or 0) * self.launched.local_ranks

    @property
    def disk_bytes(self) -> tuple[int, int] | None:
        """Of all checkpoints: at least, where all ranks hold the same; at most, where each has its part."""
        if self.state_bytes is None:
            return None
        one = kept_bytes(self.state_bytes, self.state_bytes // _TENSORS_PER_PARAMETER, self.config)
        shared = self.config.checkpoint.replicated == "shared"
        return one if shared else one * self.launched.ranks, one * self.launched.ranks

    @property
    def files(self) -> int:
        """Files and folders in the run directory at most."""
        whole, history = kept_checkpoints(self.config)
        of_checkpoint = _FILES_OF_RANK * self.launched.ranks + _FILES_OF_CHECKPOINT
        return (whole + history) * of_checkpoint + _RANK_FILES_BESIDE * self.launched.ranks + _FILES_BESIDE

    def _here(self, states: int) -> int | None:
        return None if self.state_bytes is None else states * self.state_bytes * self.launched.local_ranks

    def commit_seconds(self, write_bytes_per_second: float, read_bytes_per_second: float) -> float | None:
        """How long the ranks of this machine take to write a checkpoint and read it back."""
        if self.state_bytes is None:
            return None
        written = self.state_bytes * self.launched.local_ranks
        return written / write_bytes_per_second + written / read_bytes_per_second


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() and int(text) > 0 else 1
