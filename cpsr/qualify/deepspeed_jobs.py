"""The DeepSpeed jobs of the conformance cases: their configuration, engines and loops. Imports DeepSpeed."""

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
from cpsr.qualify.cells import STAGES
from cpsr.qualify.conformance import OVERFLOW, OVERFLOWING_STEPS
from cpsr.qualify.models import BATCH, HIDDEN, VOCABULARY, WIDTH, token_batch
from cpsr.qualify.torch_cases import adamw_of

__all__ = ["DeepSpeedJob", "PipelineJob", "PipelineLoss", "configuration", "initialize", "pipeline_engine"]

JSON_ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
BUCKET_ELEMENTS = 10**6  # DeepSpeed's own buckets take gigabytes of GPU memory for each engine
GATHERED_ON_DEMAND = 20  # ZeRO-3 keeps tensors of fewer elements whole, so that both kinds occur


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
        optimizer: `sgd`, `rmsprop`, `muon` (DeepSpeed's own, without a schedule), an implementation of AdamW as of
            `torch_cases.adamw_of`, or `json`: what DeepSpeed builds for the `AdamW` of its configuration.
        schedule: `cosine`, `warmup` (DeepSpeed's own), or `none`.
    """
    if optimizer == "adamw-fused":
        module = module.to(deepspeed.accelerator.get_accelerator().current_device_name())  # it asks for the device
    parameters = [p for p in module.parameters() if p.requires_grad]
    if optimizer == "muon":
        return _with_muon(module, config)
    tuned: torch.optim.Optimizer | None = None
    given: list[Any] | None = None
    if optimizer == "sgd":
        tuned = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    elif optimizer == "rmsprop":
        tuned = torch.optim.RMSprop(parameters)
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
        config = config | {
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_num_steps": 3, "total_num_steps": 20, "warmup_max_lr": 0.02},
            }
        }
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=tuned, model_parameters=given, lr_scheduler=scheduler, config=config
    )
    return engine


def _with_muon(module: nn.Module, config: dict[str, Any]) -> Any:
    """An engine with the optimizer from its configuration; other than matrices go to torch's AdamW."""
    params = {"muon_lr": 0.02, "adam_lr": 0.01, "weight_decay": 0.01, "torch_adam": True}
    config = config | {"optimizer": {"type": "Muon", "params": params}}
    config["zero_optimization"] = config["zero_optimization"] | {"reduce_scatter": False}  # as it demands at ZeRO 3
    engine, *_ = deepspeed.initialize(model=module, config=config)
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
        casts = engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16
        self._scales = engine.fp16_enabled() or casts

    def train_step(self, step: int) -> None:
        """Train one iteration."""
        overflow = self._scales and step in OVERFLOWING_STEPS
        managed = self.engine.managed_gradient_accumulation()
        micro_batches = self.engine.gradient_accumulation_steps() if managed else 1 + step % 3
        for micro in range(micro_batches):
            tokens, targets = (one.to(self.engine.device) for one in token_batch(step, micro, self.adapter.rank))
            loss = self.engine(tokens, targets=targets, loss_factor=OVERFLOW if overflow else 1.0)
            if self.direct_backward:
                loss.backward()
            else:
                self.engine.backward(loss)
            if managed or micro == micro_batches - 1:
                self.engine.step()
            self.after_micro_batch()


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
