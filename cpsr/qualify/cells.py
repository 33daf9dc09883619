"""The cells of the table: which engine, ZeRO stage, precision and optimizer a check runs with."""

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ADAPTER", "CPU_OFFLOAD", "EMA", "HSDP", "LOADER", "OF_TORCH", "REPLICAS", "ROUTED", "STAGES", "TORCHDATA"]
__all__ += ["Cell", "cells_of"]

PRECISIONS = ("fp32", "bf16", "fp16")
OPTIMIZERS = ("adamw", "sgd")
FUSED = "fused"  # DeepSpeed's own
JSON = "json"  # AdamW by its name in DeepSpeed's configuration
CUDA_OPTIMIZERS = ("adamw-fused", "adamw-capturable", FUSED)
ZERO_STAGES = range(4)
SPLIT = {"fsdp2": ("fp32", "bf16"), "tp": ("fp32",)}  # engine -> precisions
STAGES = 2  # of a pipeline
REPLICAS = 2  # of HSDP
EMA, LOADER, TORCHDATA, ADAPTER = "ema", "stateful loader", "torchdata loader", "frozen weights"
HSDP, CPU_OFFLOAD = "hsdp", "cpu offload"  # of FSDP2
ROUTED = "experts"  # of a pipeline
OF_PACKAGES = {"lion": "lion_pytorch", "adamw-8bit": "bitsandbytes", "adamw-schedulefree": "schedulefree"}
OF_TORCH = {
    "adadelta": "Adadelta",
    "adagrad": "Adagrad",
    "adam": "Adam",
    "adamax": "Adamax",
    "asgd": "ASGD",
    "nadam": "NAdam",
    "radam": "RAdam",
    "rmsprop": "RMSprop",
    "rprop": "Rprop",
}
OFFLOADED = ((2, "adamw", "offload_optimizer"), (3, "adamw", "offload_param"), (2, JSON, "offload_optimizer"))


@dataclass(frozen=True)
class Cell:
    """One row of the table.

    Attributes:
        engine: `torch` (each rank by itself), `ddp`, `fsdp2`, `tp` (tensor parallelism), `deepspeed`, `mixture`
            (DeepSpeed with experts) or `pipeline`.
        zero: stage of ZeRO; None outside DeepSpeed.
        precision: `fp32`, `bf16`, or `fp16`, which in plain torch is autocast with a gradient scaler; `bf16` of FSDP2
            is that of forward and backward.
        optimizer: `sgd` with momentum, `adamw`, `adamw-fused`, `adamw-capturable`, `adafactor`,
            `muon+adamw`: two of torch in one job, `fused`: DeepSpeed's FusedAdam, `json`: what DeepSpeed
            builds for the AdamW of its configuration, one of `OF_TORCH`, or of the packages of `OF_PACKAGES`.
        feature: what the job has beside these; empty for nothing.
    """

    engine: str
    zero: int | None
    precision: str
    optimizer: str
    feature: str = ""

    @property
    def name(self) -> str:
        """The parts in one line, as in `deepspeed zero1 bf16 adamw`."""
        zero = "" if self.zero is None else f"zero{self.zero} "
        return f"{self.engine} {zero}{self.precision} {self.optimizer} {self.feature}".rstrip()

    @property
    def offload(self) -> str:
        """What keeps states on the host: `offload_optimizer`, or `offload_param` for both sections; or empty."""
        return self.feature if self.feature.startswith("offload") else ""

    @property
    def kernel(self) -> str:
        """The optimizer of DeepSpeed's whose kernel must be compiled; empty for none."""
        if self.optimizer == JSON and self.offload:
            return "DeepSpeedCPUAdam"
        return "FusedAdam" if self.optimizer in (FUSED, JSON) else ""

    @property
    def package(self) -> str:
        """The module that must be installed for it beside the product's own requirements; empty for none."""
        return "torchdata" if self.feature == TORCHDATA else OF_PACKAGES.get(self.optimizer, "")

    @property
    def alone(self) -> bool:
        """Whether ranks train without each other."""
        return self.engine == "torch"

    @property
    def is_split(self) -> bool:
        """Whether parameters are DTensors, which torch splits over ranks."""
        return self.engine in SPLIT

    @property
    def replicated(self) -> bool:
        """Whether each rank has all of the weights and moments."""
        return self.zero in (None, 0) and not self.is_split


def cells_of(device: str, ranks: int, stages_can_send: bool) -> list[Cell]:
    """Every cell that this job can run; pipelines are the last, since they change DeepSpeed's groups.

    Args:
        device: `cpu` or `cuda`.
        ranks: of the job.
        stages_can_send: whether the backend sends tensors of the device from rank to rank: gloo does not for CUDA.
    """
    return list(_cells(OPTIMIZERS + (CUDA_OPTIMIZERS if device == "cuda" else ()), ranks, stages_can_send))


def _cells(optimizers: tuple[str, ...], ranks: int, stages_can_send: bool) -> Iterator[Cell]:
    for engine in ("torch", "ddp") if ranks > 1 else ("torch",):
        yield from (Cell(engine, None, precision, name) for precision in PRECISIONS for name in optimizers)
    if ranks > 1 and stages_can_send:  # over gloo with CUDA tensors it is not tried
        for engine, precisions in SPLIT.items():
            yield from (Cell(engine, None, precision, name) for precision in precisions for name in OPTIMIZERS)
        yield Cell("fsdp2", None, "fp32", "adamw", CPU_OFFLOAD)
        if ranks % REPLICAS == 0:
            yield Cell("fsdp2", None, "fp32", "adamw", HSDP)
    for stage in ZERO_STAGES:
        yield from (Cell("deepspeed", stage, precision, name) for precision in PRECISIONS for name in optimizers)
    yield from _features(ranks)
    yield Cell("deepspeed", 2, "bf16", JSON)
    yield from (Cell("deepspeed", stage, "bf16", name, offload) for stage, name, offload in OFFLOADED)
    yield Cell("mixture", 0, "fp32", "adamw")
    yield Cell("mixture", 1, "bf16", "adamw")
    yield Cell("mixture", 2, "fp16", "adamw")
    if ranks % STAGES == 0 and stages_can_send:
        yield Cell("pipeline", 0, "fp32", "adamw")
        yield Cell("pipeline", 1, "bf16", "adamw")
        yield Cell("pipeline", 0, "fp32", "adamw", ROUTED)
        yield Cell("pipeline", 1, "bf16", "adamw", ROUTED)


def _features(ranks: int) -> Iterator[Cell]:
    """What users add to these engines, each once."""
    yield Cell("torch", None, "fp32", "adafactor")
    yield Cell("torch", None, "fp32", "muon+adamw")
    yield from (Cell("torch", None, "fp32", optimizer) for optimizer in (*OF_TORCH, *OF_PACKAGES))
    for feature in (ADAPTER, EMA, LOADER, TORCHDATA) if ranks > 1 else ():
        yield Cell("ddp", None, "fp32", "adamw", feature)
    yield Cell("deepspeed", 1, "fp32", "adamw", "torch_autocast")
    yield Cell("deepspeed", 1, "bf16", "adamw", "bf16_optimizer_states")
    yield Cell("deepspeed", 2, "bf16", "adamw", "unmanaged")
    yield Cell("deepspeed", 2, "fp32", "adamw", "compiled")
