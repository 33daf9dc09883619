"""Every tunable of CPSR, with its unit, default and effect.

A configuration is a YAML file, a mapping, or the `"cpsr"` block of the DeepSpeed JSON. Unknown keys are refused by
name, with the nearest valid one.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cpsr.errors import ConfigError

__all__ = [
    "CPSRConfig",
    "CheckpointConfig",
    "CoordinatorConfig",
    "ExpertsConfig",
    "FitterConfig",
    "GuardConfig",
    "JournalConfig",
    "LivenessConfig",
    "PeersConfig",
    "PlannerConfig",
    "PlannerPolicy",
    "PredictorConfig",
    "RehearsalConfig",
    "ServiceConfig",
    "read_mapping",
    "read_model",
]

Model = TypeVar("Model", bound=BaseModel)
PlannerPolicy = Literal["cpsr", "theorem1", "untruncated", "sinh", "young", "daly", "checkfreq", "pccheck", "gemini"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CheckpointConfig(_Section):
    """When and how the training state is saved."""

    interval_iterations: int | None = Field(
        default=None, ge=1, description="Iterations between checkpoints; null lets the planner decide."
    )
    final: bool = Field(default=True, description="Commit the last state at a clean end of the run.")
    fsync: bool = Field(
        default=True,
        description="Force every file to the disk before the commit record; false survives a process, not a machine.",
    )
    save_timeout_seconds: float = Field(
        default=600.0, gt=0, description="Rank 0 abandons a checkpoint whose other shards are not in after this time."
    )
    exit_grace_seconds: float = Field(
        default=10.0, ge=0, description="How long an exit after an error waits for a save that is under way."
    )
    shared_memory: bool = Field(
        default=True,
        description="Host buffers lie in /dev/shm and outlive the process: a restart on the same machine finds the "
        "newest snapshots there, and what ranks leave when the group breaks.",
    )
    history_span_iterations: int = Field(
        default=400, ge=0, description="Weights of checkpoints this far back are kept for the predictor."
    )
    history_min_checkpoints: int = Field(
        default=4, ge=2, description="Checkpoints kept for the predictor even where they span more."
    )
    full_checkpoints: int = Field(
        default=2, ge=2, description="Newest checkpoints that keep the moments: training can restart there."
    )
    replicated: Literal["shared", "each"] = Field(
        default="shared",
        description="What ranks hold alike (ZeRO-0, DDP). shared: each writes a share of it, by what experts it has to "
        "write, and rank 0 commits nothing where the ranks' hashes differ; each: every rank writes all of it.",
    )
    disk_limit_bytes: int | None = Field(
        default=None, ge=1, description="Cap on all checkpoints of the run together; null is what the disk holds."
    )
    target: str | None = Field(
        default=None,
        min_length=1,
        description="An fsspec URL (s3://bucket/run, file:///mnt/x/run) to which committed checkpoints are copied in "
        "the background, and from which they are fetched where the run directory has none; null copies nothing.",
    )
    target_every_checkpoints: int = Field(
        default=1, ge=1, description="A copy is due once so many checkpoints were committed since the last one."
    )
    target_keep_checkpoints: int = Field(
        default=2, ge=1, description="Newest copies that stay at the target; older ones go after the next is committed."
    )

    def history_checkpoints(self, interval_iterations: int, more_iterations: int = 0) -> int:
        """How many checkpoints are kept for the predictor.

        Args:
            interval_iterations: between two of them.
            more_iterations: that are kept beyond the span.
        """
        span = self.history_span_iterations + more_iterations
        return max(self.history_min_checkpoints, span // interval_iterations + 1)


class PlannerConfig(_Section):
    """How the interval is chosen while `checkpoint.interval_iterations` is null."""

    policy: PlannerPolicy = Field(
        default="cpsr", description="cpsr: the interval of least expected cost; else the rule of that name."
    )
    intervals: Literal["common", "per_rank"] = Field(
        default="common",
        description="One interval for all ranks; or a common base times a power of two for each, of weights alone "
        "between the checkpoints of all ranks.",
    )
    mtbf_hours: float = Field(
        default=12.0,
        gt=0,
        allow_inf_nan=False,
        description="Mean time between failures of the whole job, as expected beforehand.",
    )
    mtbf_prior_failures: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="mtbf_hours counts as much as so many failures that were seen.",
    )
    interval_min_iterations: int = Field(default=10, ge=1, description="Never checkpoint more often than this.")
    interval_max_iterations: int = Field(default=500, ge=1, description="Never checkpoint less often than this.")

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "PlannerConfig":
        if self.interval_min_iterations > self.interval_max_iterations:
            raise ValueError("interval_min_iterations is larger than interval_max_iterations")
        return self


class FitterConfig(_Section):
    """When a phase of the training ends, and with it the curves are fitted anew."""

    phase_change_fraction: float = Field(
        default=0.05, gt=0, description="Change of the mean second moment of the gradients that ends a phase."
    )
    phase_min_iterations: int = Field(default=100, ge=1, description="No phase is shorter, whatever the gradients do.")
    phase_max_iterations: int = Field(
        default=1000, ge=1, description="No phase is longer: the norm of clipped gradients tells of no phases at all."
    )

    @model_validator(mode="after")
    def _lengths_in_order(self) -> "FitterConfig":
        if self.phase_min_iterations > self.phase_max_iterations:
            raise ValueError("phase_min_iterations is larger than phase_max_iterations")
        return self


class PredictorConfig(_Section):
    """How the state at the failure is predicted; null leaves a choice to the prior."""

    window_iterations: int | None = Field(default=None, ge=2, description="Span of history the line is fitted over.")
    gain: float | None = Field(default=None, ge=0, le=1000, description="Factor on the fitted displacement.")
    base: Literal["checkpoint", "line"] | None = Field(
        default=None, description="Start from the checkpoint's weights or from the fitted line's value there."
    )
    direction: Literal["line", "vitp"] | None = Field(
        default=None, description="Direction of the displacement: the fitted line's, or as the network turns it."
    )
    chunk_elements: int = Field(
        default=1 << 18,
        ge=1024,
        description="Elements predicted at a time: bounds the predictor's memory. A MiB of each checkpoint stays in a "
        "processor's cache while it is combined; with four it took half as long again.",
    )
    learning_budget_fraction: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Share of one core that learning from checkpoints may take while training does not wait; 0 is off, "
        "in waits too, and recoveries follow the calibrated line. In a pipeline over gloo it learns only while its "
        "stage waits for another.",
    )
    memory_limit_bytes: int = Field(
        default=200_000_000,
        ge=1,
        description="Host memory of a rank that predicting and learning may take, by their arithmetic: where it does "
        "not suffice on any rank, learning is off in that life, and predicting too where the line alone needs more. On "
        "the device they take nothing.",
    )

    def settings(self) -> dict[str, Any]:
        """Keyword arguments of the predictor."""
        return self.model_dump(exclude={"learning_budget_fraction", "memory_limit_bytes"})


class GuardConfig(_Section):
    """When a predicted state is refused or given up."""

    loss_tolerance_nats: float = Field(
        default=0.3, gt=0, description="A predicted state whose probe loss exceeds the checkpoint's by more is vetoed."
    )
    displacement_limit: float = Field(
        default=1.0,
        gt=0,
        description="Largest step per tensor, in multiples of the path that its history took over the window.",
    )
    watch_iterations: int = Field(
        default=60, ge=0, description="Iterations after a predicted restart that are watched for divergence; 0 is off."
    )
    watch_tolerance_nats: float = Field(
        default=0.5, gt=0, description="Excess of the training loss over its level before the failure that rolls back."
    )
    probe_batches: int = Field(
        default=4, ge=0, description="Recent forward inputs kept with each checkpoint for the loss veto; 0 is off."
    )


class RehearsalConfig(_Section):
    """How often a recovery is rehearsed in the running job, to measure what one would cost."""

    budget_fraction: float = Field(
        default=0.005, ge=0, le=1, description="Share of the training time that rehearsals may take; 0 turns them off."
    )
    iterations: int = Field(
        default=60, ge=8, description="Iterations that a rehearsal goes back, and trains again from a predicted state."
    )
    min_interval_iterations: int = Field(
        default=500, ge=0, description="Iterations between rehearsals at least, whatever the budget has earned."
    )
    # Far above what 60 iterations of tokens take, and far below what a host that holds checkpoints has to spare.
    batches_limit_bytes: int = Field(
        default=1 << 30, ge=1, description="Host memory of a rank for the batches that a rehearsal trains on again."
    )


class CoordinatorConfig(_Section):
    """How the job makes room on a device that is short of memory."""

    offload_activations_bytes: int = Field(
        default=0,
        ge=0,
        description="Activations of a rank that lie in host memory between forward and backward, at most, and no more "
        "than the machine has free at the start; 0 is off. Not at ZeRO-3.",
    )


class ExpertsConfig(_Section):
    """Which experts of a mixture a checkpoint saves, and what becomes of the others after a failure."""

    policy: Literal["none", "sequential", "load_aware", "dynamic_k", "moetion", "window"] = Field(
        default="none",
        description="Which experts a checkpoint saves. none: all; sequential: K of each layer in turn; load_aware: the "
        "K with the most unsaved tokens; dynamic_k: the same, with a K that doubles as failures take tokens; moetion: "
        "as many with the most unsaved tokens as the disk takes in an interval; window: each once in the shortest "
        "round whose checkpoints it takes, the least popular first.",
    )
    experts_per_layer: int = Field(
        default=1,
        ge=1,
        description="K, experts of each layer in a checkpoint, over all ranks; for moetion and window until the disk's "
        "bandwidth has been measured.",
    )
    lost_portion_limit: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="dynamic_k doubles K once the recoveries under it have lost more than this portion of all tokens.",
    )
    popularity: Literal["hard", "soft", "decayed", "capacity"] = Field(
        default="hard",
        description="What window orders experts by: tokens, gating probability, tokens of late, tokens over capacity.",
    )
    stale: Literal["predict", "stale", "catch_up"] = Field(
        default="stale",
        description="Experts older than the checkpoint that the run goes on from do so as they are, with more capacity "
        "until the lost tokens are made up; or also with longer steps, until the iterations are made up; or they are "
        "predicted up to it from their own history, which was measured to be no better (docs/experts.md).",
    )
    catch_up_step_factor: float = Field(
        default=2.0,
        gt=1,
        le=4,
        description="How many times as far as the optimizer's own the steps of experts go that catch up; each makes up "
        "for the factor less one of the iterations that they missed. It is as if their learning rate was higher.",
    )
    memory: Literal["all", "overlapped", "saved"] = Field(
        default="all",
        description="Experts in the snapshots in host memory. all: every one copied anew, for an exact restart of a "
        "process that died; overlapped: as many copied anew as one iteration overlaps, the others as they were in the "
        "snapshot before; saved: those alone that go to the disk, which takes the least time to copy.",
    )
    recovering_capacity_fraction: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Capacity that layers with stale experts have in addition until the lost tokens are made up; 0 is "
        "off.",
    )


class LivenessConfig(_Section):
    """When ranks that no longer answer are given up, and the job leaves so that its launcher restarts it."""

    heartbeat_timeout_seconds: float | None = Field(
        default=300.0,
        gt=0,
        description="A rank that is not heard for so long (stopped, its machine gone) makes all leave; null is off. It "
        "beats in a thread of its own, whatever its training does.",
    )
    step_timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        description="All leave when no rank's training has moved for so long (a forward, a loss, an update) although "
        "all beat; null is off. Longer than anything between two steps: evaluations, checkpoints of your own.",
    )
    sigterm_grace_seconds: float = Field(
        default=3.0,
        gt=0,
        description="After SIGTERM the state is dumped to host memory where no step ends for so long; launchers kill "
        "after 30 seconds.",
    )


class PeersConfig(_Section):
    """How snapshots are replicated to the host memory of other nodes."""

    replicas: int = Field(
        default=2,
        ge=0,
        description="Other nodes that hold each rank's newest snapshots, as far as they have the memory; 0 is off.",
    )
    # Large enough that what is done for each in Python is lost beside the network, and small beside any state.
    chunk_bytes: int = Field(
        default=4 << 20, ge=1 << 12, description="Sent at a time; every sender and receiver has a buffer of this size."
    )
    rate_limit_bytes_per_second: int | None = Field(
        default=None,
        ge=1,
        description="What each rank sends to all its holders together; null is what the network does.",
    )
    timeout_seconds: float = Field(
        default=60.0,
        gt=0,
        description="A rank that takes or sends nothing for so long, in the middle of a state, is given up.",
    )


class JournalConfig(_Section):
    """What the run's journal records, and how often it is written."""

    flush_iterations: int = Field(
        default=20, ge=1, description="Losses stay on the device and are written this often, without a sync."
    )
    full_steps: int | None = Field(
        default=100_000,
        ge=20_000,  # the fit of the loss looks back as far
        description="The newest so many steps are all kept; of older ones every second, of those twice as old every "
        "fourth, and so on: 10 million steps become about 430,000 rows. null keeps every step.",
    )


class ServiceConfig(_Section):
    """The HTTP service as a child process of rank 0; without it `cpsr serve` answers just as well."""

    enabled: bool = Field(
        default=False, description="Start it with the job, and end it with the job. Its death changes nothing."
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on; any but loopback needs a token.")
    port: int = Field(default=8712, ge=0, le=65535, description="Port; 0 takes a free one, which its log names.")
    token_file: Path | None = Field(
        default=None,
        strict=False,
        description="Holds the token that every request needs; null takes the environment variable CPSR_SERVICE_TOKEN, "
        "if there is one.",
    )
    allow_writes: bool = Field(
        default=False, description="Without a token: everybody on this machine may report failures and override plans."
    )
    connections_max: int = Field(
        default=256,
        ge=1,
        description="Connections open at a time; requests beyond get 503. Each is an open file of the service, of "
        "which systems often allow 1024; 32 event streams and some hundred pages that poll are fewer.",
    )
    idle_seconds: int = Field(
        default=5,
        ge=1,
        description="A connection that has brought no complete request for so long is closed, so that silent ones do "
        "not fill connections_max.",
    )


class CPSRConfig(_Section):
    """The whole configuration.

    >>> CPSRConfig.load({"run_dir": "runs/gpt", "checkpoint": {"interval_iterations": 50}}).mode
    'auto'
    """

    run_dir: Path = Field(strict=False, description="Directory of this run; on storage that every rank shares.")
    mode: Literal["auto", "predict", "exact"] = Field(
        default="auto",
        description="auto: the cheapest feasible source; predict: restart near the failure; exact: recompute from c.",
    )
    stop_check_iterations: int = Field(
        default=1, ge=1, description="How often ranks agree on leaving together after SIGTERM (asynchronous, 24 bytes)."
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    planner: PlannerConfig = PlannerConfig()
    fitter: FitterConfig = FitterConfig()
    predictor: PredictorConfig = PredictorConfig()
    guard: GuardConfig = GuardConfig()
    rehearsal: RehearsalConfig = RehearsalConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    experts: ExpertsConfig = ExpertsConfig()
    liveness: LivenessConfig = LivenessConfig()
    peers: PeersConfig = PeersConfig()
    journal: JournalConfig = JournalConfig()
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
        where, data = ("configuration", source) if isinstance(source, Mapping) else _read_file(Path(source))
        if "cpsr" in data:
            data = data["cpsr"]
            where += ", block 'cpsr'"
        return _validated(cls, where, data)


def read_model(model: type[Model], path: Path) -> Model:
    """Read another description than the configuration, of a job for example, from a YAML or JSON file.

    Args:
        model: what the file describes.
        path: of the file.

    Raises:
        ConfigError: as `CPSRConfig.load`.
    """
    return _validated(model, str(path), read_mapping(path))


def read_mapping(path: Path) -> Mapping[str, Any]:
    """The keys of a YAML or JSON file, as they are.

    Raises:
        ConfigError: the file is absent, not readable, or holds no mapping.
    """
    where, data = _read_file(path)
    return _mapping(where, data)


def _mapping(where: str, data: Any) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected a mapping of keys, found {type(data).__name__}")
    return data


def _validated(model: type[Model], where: str, data: Any) -> Model:
    try:
        return model.model_validate(dict(_mapping(where, data)))
    except ValidationError as error:
        raise ConfigError(f"{where}: " + "; ".join(_explain(model, error))) from error


def _read_file(path: Path) -> tuple[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    try:
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not valid {'JSON' if path.suffix == '.json' else 'YAML'}: {error}") from error
    return str(path), {} if data is None else data


def _explain(model: type[BaseModel], error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            yield f"unknown key '{key}'{_nearest(model, problem['loc'])}"
        elif problem["type"] == "missing":
            yield f"the key '{key}' is required"
        else:
            yield f"'{key}' = {problem.get('input')!r}: {problem['msg']}"


def _nearest(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    for part in location[:-1]:
        if isinstance(part, str):  # a number is a place in a list, whose model is known already
            model = _section_of(model.model_fields[part].annotation) or model
    # A low cutoff, so that a key with the wrong unit (`interval_seconds`) still finds its neighbour.
    close = difflib.get_close_matches(str(location[-1]), model.model_fields, n=1, cutoff=0.3)
    prefix = ".".join([*map(str, location[:-1]), ""])
    if close:
        return f"; did you mean '{prefix}{close[0]}'?"
    return f"; valid keys: {', '.join(sorted(model.model_fields))}"


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section in a field's type, also where it may be absent or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_of, get_args(annotation))), None)
