"""Which DeepSpeed features CPSR refuses, each by its name in the configuration, and the nearest thing that works."""

from typing import Any

import torch
from deepspeed.utils import groups

from cpsr.engines.deepspeed_masters import torch_optimizer
from cpsr.engines.moe.deepspeed import unsupported_experts
from cpsr.errors import UnsupportedEngineError

__all__ = ["require_supported"]

MUON = "deepspeed.runtime.zero.muon.muon_optimizer"  # by name: importing it compiles its kernels

_OTHERS = "its state is out of sight, or was not tested to be restored bit for bit; remove it from the configuration"
_QUANTISED = "it was not tested to be restored bit for bit, and has no kernel for processors; set it to false"


def require_supported(engine: Any) -> None:
    """Check that everything an engine trains with can be seen.

    Raises:
        UnsupportedEngineError: a feature keeps state out of sight, or changes what a step is; the message names it.
    """
    if not hasattr(engine.optimizer, "param_groups"):
        raise UnsupportedEngineError(
            f"the engine trains nothing: its optimizer is {type(engine.optimizer).__name__}; pass an optimizer to "
            "deepspeed.initialize"
        )
    found = [f"{name}: {reason}" for name, used, reason in _unsupported(engine) if used]
    if found:
        raise UnsupportedEngineError("DeepSpeed configuration uses " + "; and ".join(found))


def _unsupported(engine: Any) -> list[tuple[str, bool, str]]:
    """What is refused: its name, whether it is used, and why, with what to do."""
    zero = engine._config.zero_config
    optimizer, parameters = zero.offload_optimizer, zero.offload_param
    return [
        (
            "managed_gradient_accumulation: false",
            not engine.managed_gradient_accumulation(),
            "the loop decides how many batches a step takes, so that those of steps which were not seen cannot be "
            "counted; set it to true, and call engine.set_gradient_accumulation_boundary before each backward",
        ),
        (
            "zero_optimization.offload_optimizer.super_offload",
            bool(engine.super_offload()),
            "its optimizer runs in processes of its own, which CPSR cannot read; use ZeRO 3 without it",
        ),
        *(
            (
                f"zero_optimization.{name}.device={_device(found)}",
                _device(found) not in ("none", "cpu"),
                f'it keeps state in files; use "{name}": {{"device": "cpu"}}',
            )
            for name, found in (("offload_optimizer", optimizer), ("offload_param", parameters))
        ),
        (
            "zero_optimization.offload_optimizer.ratio below 1",
            optimizer is not None and optimizer.ratio < 1,
            'it steps a second optimizer out of sight; use "ratio": 1',
        ),
        (
            "zero_optimization.zenflow",
            bool(engine.zenflow),
            "it updates chosen gradients beside the training, from buffers that no checkpoint has; use ZeRO 2 without "
            "it",
        ),
        (
            "zero_optimization.zero_hpz_partition_size",
            _has_second_copies(engine),
            "it keeps a second copy of the weights on each node, which a restart would not write, also in engines that "
            "the process builds later; set it to 1 in all of them",
        ),
        ("zero_optimization.zero_quantized_weights", bool(zero.zero_quantized_weights), _QUANTISED),
        (
            "zero_optimization.zero_quantized_nontrainable_weights",
            bool(zero.zero_quantized_nontrainable_weights),
            _QUANTISED,
        ),
        (
            "zero_optimization.zero_quantized_gradients",
            bool(zero.zero_quantized_gradients),
            f"{_QUANTISED}, and choose a communication_data_type",
        ),
        (
            "torch_autocast.dtype: float16",
            bool(engine.torch_autocast_enabled()) and engine.torch_autocast_dtype() == torch.float16,
            "its gradient scaler is updated once for each tensor of a rank, and never lowered at ZeRO 1 to 3; set it "
            'to bfloat16, or enable "fp16"',
        ),
        (
            "torch_autocast at ZeRO 3 with parameters that stay whole",
            _gathers_in_two_precisions(engine),
            "they are gathered in another precision in the first iteration of an engine than later, so that a restart "
            'would not go on bit for bit; add "stage3_param_persistence_threshold": 0 to zero_optimization, which '
            "keeps none whole, or use ZeRO 2",
        ),
        (
            "compile.deepcompile",
            bool(engine.is_deepcompile_enabled()),
            "it runs on CUDA alone, where it replaces the hooks of ZeRO, and was not tested; set it to false: "
            "engine.compile() then compiles the module with torch.compile, at ZeRO 0 to 3",
        ),
        (
            "data_efficiency.data_routing.random_ltd",
            bool(engine.random_ltd_enabled()),
            "its schedule and the tokens that it drops are not in a checkpoint; set it to enabled: false",
        ),
        (
            "optimizer: Muon",
            type(torch_optimizer(engine)).__module__ == MUON,
            "ZeRO keeps its momentum of matrices beside what a rank updates, where CPSR does not read it; use AdamW, "
            "or torch.optim.Muon in a TorchAdapter",
        ),
        *((name, used, _OTHERS) for name, used in unsupported_experts(engine)),
    ]


def _device(offload: Any) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))


def _gathers_in_two_precisions(engine: Any) -> bool:
    """Whether ZeRO-3 keeps parameters whole in float32, but gathers in less where it has none.

    DeepSpeed gathers them in `torch_autocast.dtype` in an engine's first iteration, and as they are from then on.
    """
    kept = getattr(engine.optimizer, "persistent_parameters", [])
    return any(getattr(one, "comm_dtype", one.dtype) != one.dtype for one in kept)


def _has_second_copies(engine: Any) -> bool:
    """Whether a node keeps copies of weights: also where the configuration of an earlier engine asked for them."""
    within_node = groups._get_zero_param_intra_parallel_group() is not None
    return engine._config.zero_config.zero_hpz_partition_size > 1 or (
        within_node and bool(engine.zero_optimization_partition_weights())
    )
