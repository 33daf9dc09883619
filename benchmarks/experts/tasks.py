"""What a job of several ranks measures; the job receives it as JSON."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from cpsr.benchmarks.experts.names import MODES, STALE
from cpsr.benchmarks.experts.policies import CONFIGURED, IN_TURN
from cpsr.demo.model import GPTConfig

__all__ = ["TASK", "FailingTask", "Failures", "Mixture", "StallTask", "Task", "Way", "WritesTask"]


_SMALL = GPTConfig(layers=4, heads=4, width=64, context=64)
_BATCH_WINDOWS = 8


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Mixture(_Plain):
    """Shape of a GPT whose every second feed-forward layer is a mixture of experts, and where the experts lie."""

    experts_per_token: Literal[1, 2] = Field(default=1, description="Top-1 or top-2.")
    expert_parallel: int = Field(default=1, ge=1, description="Ranks that share the experts.")
    ranks: int = Field(default=1, ge=1, description="Of the job.")
    experts: int = Field(default=8, ge=2, description="Of a layer.")
    gpt: GPTConfig = Field(default=_SMALL)
    batch_windows: int = Field(default=_BATCH_WINDOWS, ge=1, description="Of an iteration, over all ranks.")

    @model_validator(mode="after")
    def _shared_equally(self) -> Self:
        if self.experts % self.expert_parallel or self.ranks % self.expert_parallel or self.batch_windows % self.ranks:
            raise ValueError(
                f"{self.expert_parallel} ranks must share {self.experts} experts equally and divide all {self.ranks} "
                f"ranks, and these the {self.batch_windows} windows of a batch"
            )
        return self

    @property
    def label(self) -> str:
        """For tables."""
        sharing = f"ep {self.expert_parallel} of {self.ranks} ranks" if self.ranks > 1 else "one rank"
        deeper = "" if self.gpt.layers == _SMALL.layers else f", {self.gpt.layers} layers"
        wider = "" if self.gpt.width == _SMALL.width else f", width {self.gpt.width}, context {self.gpt.context}"
        batch = "" if self.batch_windows == _BATCH_WINDOWS else f", {self.batch_windows} windows a batch"
        return f"top-{self.experts_per_token}, {sharing}{deeper}{wider}{batch}"


class Failures(_Plain):
    """When a run fails, and what it has saved by then."""

    interval_iterations: int = Field(default=10, ge=2, description="Between checkpoints; validations fall on them.")
    at: tuple[int, ...] = Field(default=(305, 475, 645, 815), min_length=1, description="Ascending; none a checkpoint.")
    end: int = Field(default=970, description="Last iteration of a run that fails.")
    fault_free_end: int = Field(default=1010, description="Of the other, with which a run that is ahead is compared.")
    experts_per_layer: int = Field(default=1, ge=1, description="K, over all ranks.")
    policies: tuple[str, ...] = Field(default=(IN_TURN,), min_length=1, description="Which experts those are.")
    modes: tuple[str, ...] = Field(default=tuple(MODES.values()), description="What becomes of the others.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        ordered = [self.interval_iterations, *self.at, self.end, self.fault_free_end]
        if ordered != sorted(set(ordered)) or any(at % self.interval_iterations == 0 for at in self.at):
            raise ValueError(
                f"first checkpoint, failures and ends must ascend and no failure be at a checkpoint, not {ordered}"
            )
        return self

    @model_validator(mode="after")
    def _known(self) -> Self:
        if unknown := [name for name in self.policies if name not in CONFIGURED.values()]:
            raise ValueError(f"there is no policy {unknown[0]!r}")
        if unknown := [name for name in self.modes if name not in MODES.values()]:
            raise ValueError(f"there is no mode {unknown[0]!r}")
        if STALE not in self.modes:
            raise ValueError(f"every mode is compared with {STALE!r}, which is not among {self.modes}")
        return self

    def checkpoint_before(self, failure: int) -> int:
        """The newest checkpoint at a failure."""
        return failure - failure % self.interval_iterations


class FailingTask(_Plain):
    """A run without failures, and what failures make of it by every policy."""

    kind: Literal["failing"] = "failing"
    mixture: Mixture = Field(default_factory=Mixture)
    seed: int = Field(default=0, ge=0, description="Of initial weights and batches.")
    failures: Failures = Field(default_factory=Failures)


Way = Literal["all experts", "experts in turn"]


class StallTask(_Plain):
    """A snapshot after every iteration, in blocks with it and without."""

    kind: Literal["stall"] = "stall"
    mixture: Mixture = Field(default_factory=Mixture)
    pairs: int = Field(default=10, ge=2, multiple_of=2, description="Of blocks.")
    way: Way = Field(default="all experts", description="What a snapshot copies.")


class WritesTask(_Plain):
    """Checkpoints that ranks share out, and the same that each writes for itself."""

    kind: Literal["writes"] = "writes"
    mixture: Mixture = Field(default_factory=Mixture)
    rounds: int = Field(default=10, ge=1, description="Checkpoints by each way.")
    experts_per_layer: int = Field(default=1, ge=1, description="K, over all ranks.")


Task = FailingTask | StallTask | WritesTask
TASK: TypeAdapter[Task] = TypeAdapter(Annotated[Task, Field(discriminator="kind")])
"""Reads any from JSON."""
