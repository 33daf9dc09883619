"""The conformance cases of two ranks; those of one group run in one job, one after the other."""

from tests.device import ON_CUDA
from tests.engines.deepspeed_cases import OTHER, ZERO, Case
from tests.engines.feature_cases import FEATURES, INDUCTOR
from tests.engines.fused_adam_cases import FUSED
from tests.engines.kernel_cases import KERNELS, REAL_KERNELS
from tests.engines.mixture_cases import MIXTURES
from tests.engines.repeated_cases import REPEATED
from tests.engines.saving_cases import SAVING
from tests.engines.sharded_cases import SHARDED

__all__ = ["GROUPS", "SLOW"]

STAGES = ("pipeline", "receives-are-waits", "a-receive-fails", "fused-pipeline")  # gloo sends no CUDA tensors to them
SPLIT = ("fsdp2", "hsdp", "tp", "sharded")  # over gloo with CUDA tensors they are not tried

ALL: dict[str, dict[str, Case]] = {
    "zero": ZERO,
    "other": OTHER,
    "features": FEATURES,
    "fused": FUSED,
    "mixtures": MIXTURES | SAVING,
    "repeated": REPEATED,
    "sharded": SHARDED,
    "kernels": KERNELS,
}
SLOW: dict[str, dict[str, Case]] = {"real-kernels": REAL_KERNELS, "inductor": INDUCTOR}  # minutes to build
GROUPS = {
    group: {name: case for name, case in cases.items() if not (ON_CUDA and name.startswith(STAGES + SPLIT))}
    for group, cases in (ALL | SLOW).items()
}
