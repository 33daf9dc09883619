"""What an engine leaves in its process, so that the next check would not begin like the first one."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["own_process_globals"]

# After an engine with `torch_autocast` all later ones reduce gradients as it did, and get a gradient scaler. After one
# of ZeRO-3 torch's `linear` is another function, and what counts parameters that are kept whole goes on counting. After
# one with `zero_hpz_partition_size` those of ZeRO-3 keep second copies, too. A pipeline leaves its stages, and
# layers of experts their groups, which those of another pipeline would take for their own.
_GLOBALS = (
    ("deepspeed.runtime.torch_autocast", "", ("TORCH_AUTOCAST_INITIALIZED", "TORCH_AUTOCAST_DTYPE")),
    ("deepspeed.runtime.zero.partition_parameters", "", ("zero_init_context",)),
    (
        "deepspeed.runtime.zero.partition_parameters",
        "Init",
        ("apply_param_persistence", "num_persisted_parameters", "num_persisted_elements"),
    ),
    ("deepspeed.runtime.zero.parameter_offload", "", ("FWD_MODULE_STACK",)),
    (
        "deepspeed.utils.groups",
        "",
        (
            "mpu",
            "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
            "_EXPERT_PARALLEL_GROUP",
            "_EXPERT_PARALLEL_GROUP_RANKS",
            "_EXPERT_DATA_PARALLEL_GROUP",
            "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
        ),
    ),
    ("deepspeed.utils.nvtx", "", ("enable_nvtx",)),
    ("torch.nn.functional", "", ("linear",)),
)


@contextmanager
def own_process_globals() -> Iterator[None]:
    """On exit DeepSpeed's globals and torch's `linear` are as before, and torch.compile has kept nothing."""
    kept = [(holder, name, _copied(getattr(holder, name))) for holder, name in _held()]
    try:
        yield
    finally:
        for holder, name, value in kept:
            setattr(holder, name, value)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()


def _held() -> Iterator[tuple[Any, str]]:
    for module, inside, names in _GLOBALS:
        holder = sys.modules.get(module)
        if holder is not None and inside:
            holder = getattr(holder, inside)
        yield from ((holder, name) for name in names if hasattr(holder, name))


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict) else value
