"""The conformance cases of several ranks; those of one group run in one job, one after the other."""

from cpsr.qualify.cells import no_cpu_sharding
from tests.device import ON_CUDA
from tests.engines.deepspeed_cases import OTHER, ZERO, Case
from tests.engines.feature_cases import FEATURES, INDUCTOR
from tests.engines.kernel_cases import KERNELS, REAL_KERNELS
from tests.engines.mixture_cases import MIXTURES
from tests.engines.mixture_pipeline_cases import MIXTURE_PIPELINES
from tests.engines.repeated_cases import REPEATED
from tests.engines.saving_cases import SAVING
from tests.engines.sharded_cases import SHARDED

__all__ = ["GROUPS", "LACKING", "RANKS", "SLOW"]

STAGES = ("pipeline", "receives-are-waits", "a-receive-fails")  # gloo sends no CUDA tensors to them
FULLY_SHARDED = ("fsdp2", "hsdp")
SPLIT = ("fsdp2", "hsdp", "tp", "sharded")  # over gloo with CUDA tensors they are not tried

ALL: dict[str, dict[str, Case]] = {
    "zero": ZERO,
    "other": OTHER,
    "features": FEATURES,
    "mixtures": MIXTURES | SAVING,
    "mixture-pipelines": MIXTURE_PIPELINES,
    "repeated": REPEATED,
    "sharded": SHARDED,
    "kernels": KERNELS,
}
SLOW: dict[str, dict[str, Case]] = {"real-kernels": REAL_KERNELS, "inductor": INDUCTOR}  # minutes to build
# Case -> why this torch cannot run it.
LACKING = {
    name: no_cpu_sharding() for name in SHARDED if name.startswith(FULLY_SHARDED) and no_cpu_sharding() and not ON_CUDA
}
GROUPS = {
    group: {name: case for name, case in cases.items() if not (ON_CUDA and name.startswith(STAGES + SPLIT))}
    for group, cases in (ALL | SLOW).items()
}
RANKS = {"mixture-pipelines": 4}  # of the others two
