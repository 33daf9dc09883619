"""Types that the parts of a life share: the job, the ending of the life, and a rewind."""

from dataclasses import dataclass
from typing import Literal

from cpsr.checkpoint.run_directory import RunDirectory
from cpsr.config import CPSRConfig
from cpsr.engines.adapter import EngineAdapter
from cpsr.journal import RankJournal
from cpsr.ranks.group import Group
from cpsr.state.shard import Shard

__all__ = ["Ending", "Job", "Rewind"]


@dataclass(frozen=True)
class Job:
    """One rank of a training job, in one life of its run.

    Attributes:
        adapter: the engine.
        group: all ranks.
        config: the run's configuration, adjusted to what this life can follow.
        run: the run's directory and identity.
        shard: this rank's part of the state; zero-copy views.
        journal: this rank's side of the journal.
    """

    adapter: EngineAdapter
    group: Group
    config: CPSRConfig
    run: RunDirectory
    shard: Shard
    journal: RankJournal


@dataclass(frozen=True)
class Rewind:
    """The run continues from a state other than that after its newest steps.

    Attributes:
        iteration: of the new state.
        checkpoint_iteration: newest checkpoint that leads to this state; None if the state comes from outside of the
            run.
        reason: a clause, for checkpoints that are set aside.
    """

    iteration: int
    checkpoint_iteration: int | None
    reason: str

    @property
    def last_kept_iteration(self) -> int:
        """Checkpoints of later iterations are set aside."""
        return self.iteration - 1 if self.checkpoint_iteration is None else self.checkpoint_iteration


@dataclass
class Ending:
    """How a life ends; an error until set otherwise.

    Attributes:
        how: `clean` at the end of the loop, `sigterm` by agreement of all ranks, `error` anything else.
        iteration: the last one that counts, at an end in order.
        last_state_is_safe: whether the last state is on the disk.
    """

    how: Literal["clean", "sigterm", "error"] = "error"
    iteration: int = 0
    last_state_is_safe: bool = True

    @property
    def in_order(self) -> bool:
        """Whether all ranks end together."""
        return self.how != "error"
