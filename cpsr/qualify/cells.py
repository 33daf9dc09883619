"""The cells of the table: which engine, ZeRO stage, precision and optimizer a check runs with."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

__all__ = ["ADAPTER", "CPU_OFFLOAD", "EMA", "HSDP", "JSON", "LOADER", "MUON", "OPTIMIZERS", "REPLICAS", "ROUTED"]
__all__ += ["STAGES", "TORCHDATA", "Cell", "cells_of", "lacking", "no_cpu_sharding", "no_muon"]

PRECISIONS = ("fp32", "bf16", "fp16")
ZERO_STAGES = range(4)
SPLIT = {"fsdp2": ("fp32", "bf16"), "tp": ("fp32",)}  # engine -> precisions
STAGES = 2  # of a pipeline
REPLICAS = 2  # of HSDP
EMA, LOADER, TORCHDATA, ADAPTER = "ema", "stateful loader", "torchdata loader", "frozen weights"
HSDP, CPU_OFFLOAD = "hsdp", "cpu offload"  # of FSDP2
ROUTED = "experts"  # of a pipeline
FUSED = "fused"  # DeepSpeed's own
JSON = "json"  # AdamW by its name in DeepSpeed's configuration
MUON = "muon+adamw"  # two of torch in one job
EIGHT_BIT_ELEMENTS = 64  # of a parameter whose moments have 8 bits: by default tiny ones, as all of these, have 32
USUAL = ("adamw", "sgd")
USUAL_ON_CUDA = ("adamw-fused", "adamw-capturable", FUSED)
# Name -> module, class and arguments of an optimizer over all parameters; AdamW's implementations have groups.
OPTIMIZERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sgd": ("torch.optim", "SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adafactor": ("torch.optim", "Adafactor", {"lr": 0.01}),
    **{
        name.lower(): ("torch.optim", name, {"lr": 0.01})
        for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
    "lion": ("lion_pytorch", "Lion", {"lr": 1e-3, "weight_decay": 0.1}),
    "adamw-8bit": ("bitsandbytes.optim", "AdamW8bit", {"lr": 0.01, "min_8bit_size": EIGHT_BIT_ELEMENTS}),
    "adamw-schedulefree": ("schedulefree", "AdamWScheduleFree", {"lr": 0.01}),
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
        optimizer: one of `OPTIMIZERS`; `adamw`, `adamw-fused`, `adamw-capturable`, `fused` (DeepSpeed's FusedAdam),
            `json` (what DeepSpeed builds for the AdamW of its configuration) or `muon+adamw`.
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
    def is_alone(self) -> bool:
        """Whether ranks train without each other."""
        return self.engine == "torch"

    @property
    def is_split(self) -> bool:
        """Whether parameters are DTensors, which torch splits over ranks."""
        return self.engine in SPLIT

    @property
    def is_replicated(self) -> bool:
        """Whether each rank has all of the weights and moments."""
        return self.zero in (None, 0) and not self.is_split


def cells_of(device: str, ranks: int, stages_can_send: bool) -> Iterator[Cell]:
    """Every cell that this job can run; pipelines are the last, since they change DeepSpeed's groups.

    Args:
        device: `cpu` or `cuda`.
        ranks: of the job.
        stages_can_send: whether the backend sends tensors of the device from rank to rank: gloo does not for CUDA.
    """
    optimizers = USUAL + (USUAL_ON_CUDA if device == "cuda" else ())
    for engine in ("torch", "ddp") if ranks > 1 else ("torch",):
        yield from (Cell(engine, None, precision, name) for precision in PRECISIONS for name in optimizers)
    if ranks > 1 and stages_can_send:  # over gloo with CUDA tensors it is not tried
        for engine, precisions in SPLIT.items():
            yield from (Cell(engine, None, precision, name) for precision in precisions for name in USUAL)
        yield Cell("fsdp2", None, "fp32", "adamw", CPU_OFFLOAD)
        if ranks % REPLICAS == 0:
            yield Cell("fsdp2", None, "fp32", "adamw", HSDP)
    for stage in ZERO_STAGES:
        yield from (Cell("deepspeed", stage, precision, name) for precision in PRECISIONS for name in optimizers)
    # What users add to these engines, each once.
    yield from (Cell("torch", None, "fp32", name) for name in (MUON, *OPTIMIZERS) if name != "sgd")
    for feature in (ADAPTER, EMA, LOADER, TORCHDATA) if ranks > 1 else ():
        yield Cell("ddp", None, "fp32", "adamw", feature)
    yield Cell("deepspeed", 1, "fp32", "adamw", "torch_autocast")
    yield Cell("deepspeed", 1, "bf16", "adamw", "bf16_optimizer_states")
    yield Cell("deepspeed", 2, "bf16", "adamw", "unmanaged")
    yield Cell("deepspeed", 2, "fp32", "adamw", "compiled")
    yield Cell("deepspeed", 2, "bf16", JSON)
    yield from (Cell("deepspeed", stage, "bf16", name, offload) for stage, name, offload in OFFLOADED)
    yield from (Cell("mixture", stage, precision, "adamw") for stage, precision in enumerate(PRECISIONS))
    if ranks % STAGES == 0 and stages_can_send:
        for feature in ("", ROUTED):
            yield Cell("pipeline", 0, "fp32", "adamw", feature)
            yield Cell("pipeline", 1, "bf16", "adamw", feature)


def lacking(cell: Cell, device: str) -> str:
    """What a cell needs and is not installed here, as a sentence; empty where nothing is missing."""
    module = "torchdata" if cell.feature == TORCHDATA else OPTIMIZERS.get(cell.optimizer, ("torch",))[0]
    package = module.partition(".")[0]
    if package != "torch" and find_spec(package) is None:
        return f"{package} is not installed"
    if cell.engine == "fsdp2" and device == "cpu":
        return no_cpu_sharding()
    return no_muon() if cell.optimizer == MUON else ""


def no_muon() -> str:
    """Why this torch has no optimizer Muon; empty where it has."""
    return "" if hasattr(torch.optim, "Muon") else f"torch {torch.__version__} has no Muon"


def no_cpu_sharding() -> str:
    """Why this torch cannot train with FSDP2 on a processor; empty where it can.

    Torch 2.6 calls `record_event` on the stream of the device, and its stream of the CPU has none.
    """
    if hasattr(torch.cpu.Stream, "record_event"):
        return ""
    return f"torch {torch.__version__} has no FSDP2 on processors"
