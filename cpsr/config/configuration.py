"""Every tunable of CPSR, with its unit, default and effect: one section for each room that has any.

A configuration is a YAML file, a mapping, or the `"cpsr"` block of the DeepSpeed JSON. Unknown keys are refused by
name, with the nearest valid one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cpsr.config.reading import read_file, validated

__all__ = [
    "CPSRConfig",
    "CheckpointConfig",
    "ElasticConfig",
    "EnginesConfig",
    "ExpertsConfig",
    "RanksConfig",
    "ServiceConfig",
]


class Section(BaseModel):
    """Keys that are all known, whose values fit as they are."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CheckpointConfig(Section):
    """When and how the training state is saved."""

    interval_iterations: int | None = Field(
        default=None, ge=1, description="Iterations between checkpoints; null lets the planner decide."
    )
    save_timeout_seconds: float = Field(
        default=600.0, gt=0, description="Rank 0 abandons a checkpoint if other shards are missing after this time."
    )
    shared_memory: bool = Field(
        default=True,
        description="Host buffers lie in /dev/shm and outlive the process: a restart on the same machine finds the "
        "newest snapshots and emergency dumps there.",
    )
    disk_limit_bytes: int | None = Field(
        default=None, ge=1, description="Limit on all checkpoints of the run together; null: the size of the disk."
    )
    target: str | None = Field(
        default=None,
        min_length=1,
        description="An fsspec URL (s3://bucket/run, file:///mnt/x/run) to which committed checkpoints are copied in "
        "the background, and fetched from if the run directory has none; null copies nothing.",
    )
    target_keep_checkpoints: int = Field(
        default=2,
        ge=1,
        description="Newest copies that stay at the target; older ones go after the next commit.",
    )


class MemoryConfig(Section):
    """How often the state is copied to host memory between checkpoints; see docs/memory.md."""

    interval_iterations: int | None = Field(
        default=None,
        ge=1,
        description="Iterations between snapshots to host memory; null: planned. A restart of the processes loses as "
        "many at most. With experts.policy, each copies as many experts as fit behind a step.",
    )
    budget_fraction: float = Field(
        default=0.0025,
        ge=0,
        le=1,
        description="Share of the training time that a planned interval may spend on snapshots even if failures are "
        "too rare to repay it: every planner.interval_min_iterations, or as often as this share allows. 0: only the "
        "expected cost decides.",
    )


class ReplayConfig(Section):
    """Sparse snapshots of every iteration, which a restart replays; see docs/replay.md."""

    enabled: bool = Field(
        default=False,
        description="Each iteration copies a part of the state to host memory, and the compute weights of the rest. A "
        "restart repeats the iterations of one window, and then has all of it. Takes the place of memory.",
    )
    window_iterations: int | None = Field(
        default=None,
        ge=1,
        description="Iterations over which the state is spread; null: the fewest whose copies training hides.",
    )


class PlannerConfig(Section):
    """How the interval is chosen while `checkpoint.interval_iterations` is null."""

    policy: Literal["cpsr", "theorem1", "young", "daly"] = Field(
        default="cpsr", description="cpsr: the interval of least expected cost; else the rule of that name."
    )
    mtbf_hours: float = Field(
        default=12.0,
        gt=0,
        allow_inf_nan=False,
        description="Expected mean time between failures of the whole job.",
    )
    interval_min_iterations: int = Field(default=10, ge=1, description="Never checkpoint more often than this.")
    interval_max_iterations: int = Field(default=500, ge=1, description="Never checkpoint less often than this.")

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "PlannerConfig":
        if self.interval_min_iterations > self.interval_max_iterations:
            raise ValueError("interval_min_iterations is larger than interval_max_iterations")
        return self


class PredictorConfig(Section):
    """How the state at the failure is predicted."""

    move: bool = Field(
        default=False,
        description="In mode `auto`, a restart may also go back to the checkpoint, move its weights there, and "
        "recompute from them. A healthy run could gain as much by such a move.",
    )


class LearningConfig(Section):
    """What the predictor may take from the running job."""

    budget_fraction: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Share of one core that learning from checkpoints may take while training does not wait. 0 turns "
        "learning off, and recoveries follow the calibrated line. A pipeline over gloo learns only while its stage "
        "waits for another.",
    )


class RestartConfig(Section):
    """What a restart takes from the checkpoint, and when a restored state is refused."""

    hyperparameters: Literal["checkpoint", "script"] = Field(
        default="checkpoint",
        description="Whose learning rates, weight decay, betas, schedules and clipping a restart uses where the script "
        "sets others than the run began with. `checkpoint`: the run's, which is exact; one line lists what differs. "
        "`script`: the script's; its schedules are moved forward to the restored step.",
    )
    loss_tolerance_nats: float = Field(
        default=0.3,
        gt=0,
        description="A predicted state whose probe loss exceeds the checkpoint's by more is vetoed. One whose training "
        "loss then exceeds its level before the failure by 0.2 nats more than this is rolled back.",
    )
    probe_batches: int = Field(
        default=4,
        ge=0,
        description="Recent forward inputs kept with each checkpoint for the loss veto, shared among data-parallel "
        "ranks; each keeps at least one. 0 is off.",
    )
    on_difference: Literal["warn", "stop"] = Field(
        default="warn",
        description="What a step does that an exact restart repeats, and that differs from its first execution by more "
        "than rounding: `warn` reports it, `stop` also ends the job.",
    )


class ElasticConfig(Section):
    """Restarts with another number of ranks than the run had (docs/elastic.md); refused unless min_ranks is set."""

    min_ranks: int | None = Field(
        default=None,
        ge=1,
        description="Fewest ranks that the run goes on with; null: only as many as it had.",
    )
    global_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Samples that all ranks together train on in an iteration. A start whose batches and accumulation "
        "give another number is refused; null: the number of the run's first life.",
    )

    def allows(self, ranks: int) -> bool:
        """Whether a run of another number of ranks may go on with this one."""
        return self.min_ranks is not None and ranks >= self.min_ranks


class EnginesConfig(Section):
    """How a job saves memory of a device that is short of it."""

    offload_activations_bytes: int = Field(
        default=0,
        ge=0,
        description="Upper limit of a rank's activations in host memory between forward and backward, and no more than "
        "the machine has free at the start; 0 is off. Not at ZeRO-3.",
    )


class ExpertsConfig(Section):
    """Which experts of a mixture a checkpoint saves, and what becomes of the others after a failure."""

    policy: Literal["none", "sequential", "load_aware", "dynamic_k", "moetion"] = Field(
        default="none",
        description="Which experts a checkpoint saves. none: all; sequential: K of each layer in turn; load_aware: the "
        "K with the most unsaved tokens; dynamic_k: the same, with a K that doubles before failures take too much; "
        "moetion: as many with the most unsaved tokens as the disk takes in an interval.",
    )
    experts_per_layer: int = Field(
        default=1,
        ge=1,
        description="K, experts of each layer in a checkpoint, over all ranks; for moetion until the disk's "
        "bandwidth has been measured.",
    )
    lost_portion_limit: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="dynamic_k doubles K before a failure could bring the run's lost tokens above this portion of its "
        "tokens so far.",
    )
    recovering_capacity_fraction: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Capacity that layers with stale experts have in addition until the lost tokens are made up; 0 is "
        "off.",
    )


class RanksConfig(Section):
    """How ranks agree, and when the job ends so that its launcher restarts it because a rank no longer answers."""

    heartbeat_timeout_seconds: float | None = Field(
        default=300.0,
        gt=0,
        description="All ranks leave if one sends no heartbeat for this time (stopped, its machine gone); null is off. "
        "Heartbeats come from a thread of their own, whatever the training does.",
    )
    step_timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        description="All ranks leave if no training makes progress for this time (a forward, a loss, an update) "
        "while heartbeats arrive; null is off. It must exceed any pause between steps, for example evaluations.",
    )
    sigterm_grace_seconds: float = Field(
        default=3.0,
        gt=0,
        description="After SIGTERM the state is dumped to host memory if no step ends for this time; launchers kill "
        "after 30 seconds.",
    )


class PeersConfig(Section):
    """How snapshots are replicated to the host memory of other nodes."""

    replicas: int = Field(
        default=2,
        ge=0,
        description="Other nodes that keep each rank's newest snapshots, if they have the memory; 0 is off.",
    )


class VerificationConfig(Section):
    """Steps that are repeated to see whether their arithmetic is right; see docs/verification.md."""

    budget_fraction: float = Field(
        default=0.002,
        ge=0,
        le=1,
        description="Share of the training time that repeated steps may take. 0: no step is repeated.",
    )


class ServiceConfig(Section):
    """The HTTP service as a child process of rank 0; `cpsr serve` starts it without the job."""

    enabled: bool = Field(default=False, description="Start and end it with the job. Training does not depend on it.")
    host: str = Field(default="127.0.0.1", description="Address to listen on; any but loopback needs a token.")
    port: int = Field(default=8712, ge=0, le=65535, description="Port; 0 takes a free one, which the log names.")
    token_file: Path | None = Field(
        default=None,
        strict=False,
        description="File with the token that every request needs; null takes the environment variable "
        "CPSR_SERVICE_TOKEN, if there is one.",
    )
    allow_writes: bool = Field(
        default=False, description="Without a token: everybody on this machine may report failures and override plans."
    )


class CPSRConfig(Section):
    """The whole configuration: every key with its unit, bounds and default is in docs/configuration.md.

    >>> CPSRConfig.load({"run_dir": "runs/gpt", "checkpoint": {"interval_iterations": 50}}).mode
    'auto'
    """

    run_dir: Path = Field(strict=False, description="Directory of this run; on storage that every rank shares.")
    mode: Literal["auto", "predict", "exact"] = Field(
        default="auto",
        description="auto: the cheapest feasible source; predict: restart near the failure; exact: recompute from c.",
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    memory: MemoryConfig = MemoryConfig()
    replay: ReplayConfig = ReplayConfig()
    planner: PlannerConfig = PlannerConfig()
    predictor: PredictorConfig = PredictorConfig()
    learning: LearningConfig = LearningConfig()
    restart: RestartConfig = RestartConfig()
    engines: EnginesConfig = EnginesConfig()
    elastic: ElasticConfig = ElasticConfig()
    experts: ExpertsConfig = ExpertsConfig()
    ranks: RanksConfig = RanksConfig()
    peers: PeersConfig = PeersConfig()
    verification: VerificationConfig = VerificationConfig()
    service: ServiceConfig = ServiceConfig()

    @classmethod
    def load(cls, source: "CPSRConfig | Mapping[str, Any] | str | Path") -> "CPSRConfig":
        """Read a configuration from a YAML or JSON file, or from a mapping.

        A file or mapping with a top-level `cpsr` key (the DeepSpeed JSON) is read from that block.

        Raises:
            ConfigError: the file is absent or not readable, a key is unknown or a value does not fit; the message
                names the key and, for an unknown one, the nearest valid key.
        """
        if isinstance(source, CPSRConfig):
            return source
        where, data = ("configuration", source) if isinstance(source, Mapping) else read_file(Path(source))
        if "cpsr" in data:
            data = data["cpsr"]
            where += ", block 'cpsr'"
        return validated(cls, where, data)
