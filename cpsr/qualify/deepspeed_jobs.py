"""Tiny jobs in DeepSpeed, by cell: engines, mixtures of experts and pipelines with their loops. Imports DeepSpeed."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from torch.nn import functional

from cpsr.engines import adapt
from cpsr.qualify.cells import STAGES, Cell
from cpsr.qualify.conformance import OVERFLOW, OVERFLOWING_STEPS
from cpsr.qualify.torch_jobs import BATCH, HIDDEN, VOCABULARY, WIDTH, TinyLM, adamw_of, optimizer_of, token_batch

__all__ = ["EXPERTS", "DeepSpeedJob", "Expert", "PipelineJob", "PipelineLoss", "TinyMoE", "configuration"]
__all__ += ["deepspeed_job", "initialize", "pipeline_engine"]

JSON_ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
BUCKET_ELEMENTS = 10**6  # DeepSpeed's own buckets take gigabytes of GPU memory for each engine
GATHERED_ON_DEMAND = 20  # ZeRO-3 keeps tensors of fewer elements whole, so that both kinds occur
EXPERTS = 4


def deepspeed_job(
    cell: Cell, ranks: int, micro_batches: int = 2, schedule: str = "cosine"
) -> "DeepSpeedJob | PipelineJob":
    """A rank of the job of a cell of DeepSpeed.

    Args:
        cell: of engine `deepspeed`, `mixture` or `pipeline`.
        ranks: of the job.
        micro_batches: of an iteration; a pipeline has two.
        schedule: as for `initialize`.
    """
    assert cell.zero is not None
    if cell.engine == "pipeline":
        return PipelineJob(pipeline_engine(cell.zero, cell.precision, cell.optimizer))
    module = TinyMoE(2 if ranks % 2 == 0 else 1) if cell.engine == "mixture" else TinyLM()
    config = configuration(cell.zero, cell.precision, micro_batches)
    return DeepSpeedJob(initialize(module, config, cell.optimizer, schedule))


def configuration(
    stage: int, precision: str, micro_batches: int = 2, offload: str = "", **extra: Any
) -> dict[str, Any]:
    """DeepSpeed's configuration.

    Args:
        stage: of ZeRO, 0 to 3.
        precision: `fp32`, `bf16`, `fp16`, or `bf16-fp32grad`.
        micro_batches: of an iteration.
        offload: `offload_optimizer`, or `offload_param` for both: to the host.
        extra: further sections.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.5,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = GATHERED_ON_DEMAND
    for name in ("offload_optimizer", "offload_param") if offload == "offload_param" else (offload,) if offload else ():
        config["zero_optimization"][name] = {"device": "cpu"}
        config["zero_force_ds_cpu_optimizer"] = False  # torch's optimizers, too
    if precision.startswith("bf16"):
        config["bf16"] = {"enabled": True}
    if precision == "bf16-fp32grad":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    return config | extra


def initialize(module: nn.Module, config: dict[str, Any], optimizer: str = "adamw", schedule: str = "cosine") -> Any:
    """An engine over the module's trained parameters.

    Args:
        module: DeepSpeed moves it to its device.
        config: as of `configuration`.
        optimizer: as for `torch_jobs.optimizer_of`, or `json`: what DeepSpeed builds for the `AdamW` of its
            configuration.
        schedule: `cosine`, `warmup` (DeepSpeed's own), or `none`.
    """
    if optimizer == "adamw-fused":
        module = module.to(deepspeed.accelerator.get_accelerator().current_device_name())  # it asks for the device
    given: list[Any] | None = None
    tuned: torch.optim.Optimizer | None = None
    parameters = [p for p in module.parameters() if p.requires_grad]
    if optimizer in ("sgd", "rmsprop"):
        tuned = optimizer_of(optimizer, nn.ParameterList(parameters))
    else:
        decayed, rest = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]
        if any(isinstance(layer, MoE) for layer in module.modules()):
            named = [{**group, "name": f"dense {index}"} for index, group in enumerate(groups)]
            groups = split_params_into_different_moe_groups_for_optimizer(named)
        if optimizer == "json":
            given, config = groups, config | {"optimizer": JSON_ADAMW}
        else:
            tuned = adamw_of(optimizer, groups)
    scheduler = None
    if schedule == "cosine":
        scheduler = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=20)
    if schedule == "warmup":
        params = {"warmup_num_steps": 3, "total_num_steps": 20, "warmup_max_lr": 0.02}
        config = config | {"scheduler": {"type": "WarmupDecayLR", "params": params}}
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=tuned, model_parameters=given, lr_scheduler=scheduler, config=config
    )
    return engine


class DeepSpeedJob:
    """The usual loop, with an overflow at given steps when the precision is fp16.

    Where the loop decides when to step, its steps take one to three batches.

    Args:
        engine: of `initialize`.
        direct_backward: call `loss.backward()` in place of the engine's.
    """

    def __init__(self, engine: Any, direct_backward: bool = False) -> None:
        self.engine, self.module, self.direct_backward = engine, engine.module, direct_backward
        self.adapter = adapt(engine)
        self.after_micro_batch: Callable[[], None] = lambda: None
        self._scales = engine.fp16_enabled()

    def train_step(self, step: int) -> None:
        """Train one iteration on the batches of this step."""
        count = self.engine.gradient_accumulation_steps()
        batches = [token_batch(step, micro, self.adapter.rank) for micro in range(count)]
        self.train_on(batches, OVERFLOW if self._scales and step in OVERFLOWING_STEPS else 1.0)

    def train_on(self, batches: Sequence[Sequence[torch.Tensor]], factor: float = 1.0) -> torch.Tensor:
        """Train one iteration, with losses times a factor; returns the last micro-batch's loss."""
        loss = torch.zeros(())
        for batch in batches:
            loss = self.engine(*(one.to(self.engine.device) for one in batch), loss_factor=factor)
            if self.direct_backward:
                loss.backward()
            else:
                self.engine.backward(loss)
            self.engine.step()
            self.after_micro_batch()
        return loss.detach()


class PipelineJob:
    """The loop of a pipeline, in two stages.

    Args:
        engine: of `pipeline_engine`.
    """

    def __init__(self, engine: Any) -> None:
        self.engine, self.module = engine, engine.module
        self.adapter = adapt(engine)

    def train_step(self, step: int) -> None:
        """Train one iteration."""

        def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for micro in range(self.engine.gradient_accumulation_steps()):
                yield token_batch(step, micro, self.engine.grid.get_data_parallel_id())

        overflow = self.engine.fp16_enabled() and step in OVERFLOWING_STEPS
        PipelineLoss.factor = OVERFLOW if overflow else 1.0
        self.engine.train_batch(batches())


class PipelineLoss:
    """Cross-entropy, times a factor that is the same for all losses."""

    factor = 1.0

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of what the last stage gives."""
        loss: torch.Tensor = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return loss * self.factor


def project(embedding: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
    """Logits by the tied embedding."""
    return functional.linear(hidden, embedding.weight)


def pipeline_engine(
    stage: int,
    precision: str,
    optimizer: str = "adamw",
    offload: str = "",
    layers: Sequence[LayerSpec] | None = None,
    loss: PipelineLoss | None = None,
) -> Any:
    """A pipeline of two stages.

    Args:
        stage: of ZeRO, 0 or 1.
        precision: as of `configuration`.
        optimizer: as of `initialize`.
        offload: as of `configuration`.
        layers: None: those of a model whose first and last layer are tied.
        loss: of what the last layer gives; None: of logits.
    """
    layers = layers or [
        TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH),
        LayerSpec(nn.Linear, WIDTH, HIDDEN),
        LayerSpec(nn.Dropout, 0.2),
        LayerSpec(nn.Tanh),
        LayerSpec(nn.Linear, HIDDEN, WIDTH),
        TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=project),
    ]
    loss = loss or PipelineLoss()
    module = PipelineModule(layers, num_stages=STAGES, loss_fn=loss, partition_method="uniform", seed_layers=False)
    return initialize(module, configuration(stage, precision, offload=offload), optimizer)


class Expert(nn.Module):
    """Also holds a frozen parameter and a buffer that training changes, of which each expert has its own."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The expert's output for its tokens."""
        if self.training:
            with torch.no_grad():
                self.seen.mul_(0.9).add_(hidden.float().flatten(0, -2).mean(0).to(self.seen.dtype), alpha=0.1)
        output: torch.Tensor = self.down(torch.relu(self.up(hidden * self.scale + self.seen.to(hidden.dtype))))
        return output


class TinyMoE(nn.Module):
    """Two layers of experts: one picks tokens at random where experts are full, one samples the second expert.

    Args:
        expert_parallel: ranks that share the experts.
        options: more arguments of DeepSpeed's `MoE`.
    """

    drift: torch.Tensor

    def __init__(self, expert_parallel: int, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        sizes: dict[str, Any] = {"num_experts": EXPERTS, "ep_size": expert_parallel, "min_capacity": 0}
        self.first = MoE(WIDTH, Expert(), k=1, noisy_gate_policy="Jitter", **(sizes | options))
        self.second = MoE(WIDTH, Expert(), k=2, **(sizes | options))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("drift", torch.zeros(WIDTH))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, loss_factor: float = 1.0) -> torch.Tensor:
        """The loss of token sequences with the balance of the gates, times a factor."""
        hidden, balance = self.embed(tokens) + self.drift.to(self.embed.weight.dtype), 0.0
        for layer in (self.first, self.second):
            routed, layer_balance, _ = layer(hidden)
            hidden, balance = hidden + self.dropout(routed), balance + layer_balance
        if self.training:
            with torch.no_grad():
                self.drift.mul_(0.9).add_(hidden.float().mean((0, 1)).to(self.drift.dtype), alpha=0.1)
        loss = functional.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten())
        return (loss + 0.01 * balance) * loss_factor
