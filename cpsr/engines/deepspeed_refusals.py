"""Which DeepSpeed features CPSR refuses, each by its name in the configuration, and the nearest thing that works."""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.utils import groups

from cpsr.engines.deepspeed_masters import torch_optimizer
from cpsr.engines.moe.deepspeed import unsupported_experts
from cpsr.errors import UnsupportedEngineError

__all__ = [
    "UNMANAGED",
    "require_supported",
    "warn_of_kept_gradients",
]

MUON = "deepspeed.runtime.zero.muon.muon_optimizer"  # by name: importing it compiles its kernels

UNMANAGED = (
    "with managed_gradient_accumulation=false the loop decides how many batches a step takes, so that those of steps "
    "which were not seen cannot be counted"
)


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
    _require_visible_states(engine)
    _require_one_precision(engine)


def _require_one_precision(engine: Any) -> None:
    """Refuse parameters that ZeRO-3 keeps whole in float32, but gathers in less where it has none.

    DeepSpeed gathers them in `torch_autocast.dtype` in an engine's first iteration, and as they are from then on.
    """
    kept = getattr(engine.optimizer, "persistent_parameters", [])
    if any(getattr(one, "comm_dtype", one.dtype) != one.dtype for one in kept):
        raise UnsupportedEngineError(
            "torch_autocast at ZeRO 3 gathers the parameters that stay whole in another precision in the first "
            "iteration of an engine than later, so that a restart would not go on bit for bit; add "
            '"stage3_param_persistence_threshold": 0 to zero_optimization, which keeps none whole, or use ZeRO 2'
        )


def _unsupported(engine: Any) -> list[tuple[str, bool, str]]:
    """What is refused: its name, whether it is used, and why, with what to do."""
    zero = engine._config.zero_config
    return [
        (
            "zero_optimization.offload_optimizer.super_offload",
            bool(engine.super_offload()),
            "its optimizer runs in processes of its own, which CPSR cannot read; use ZeRO 3 without it",
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


def _has_second_copies(engine: Any) -> bool:
    """Whether a node keeps copies of weights: also where the configuration of an earlier engine asked for them."""
    within_node = groups._get_zero_param_intra_parallel_group() is not None
    return engine._config.zero_config.zero_hpz_partition_size > 1 or (
        within_node and bool(engine.zero_optimization_partition_weights())
    )


_log = logging.getLogger(__name__)


def _require_visible_states(engine: Any) -> None:
    """Check that masters, moments and parameters are whole, on the device or the host of this process.

    Raises:
        UnsupportedEngineError: they are elsewhere, or rounded; the message names the option and the nearest one that
            works.
    """
    for option, why, instead in _unsupported_offload(engine):
        raise UnsupportedEngineError(
            f"DeepSpeed configuration uses zero_optimization.{option}, which {why}: CPSR has not been tested to "
            f"restore that bit for bit. Nothing was saved; {instead}"
        )


def _unsupported_offload(engine: Any) -> Iterator[tuple[str, str, str]]:
    """Option, why it is refused, and what to do."""
    zero = engine._config.zero_config
    optimizer, parameters = zero.offload_optimizer, zero.offload_param
    for name, found in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if _device(found) not in ("none", "cpu"):
            yield f"{name}.device={_device(found)}", "keeps state in files", f'use "{name}": {{"device": "cpu"}}'
    if optimizer is not None and optimizer.ratio < 1:
        yield f"offload_optimizer.ratio={optimizer.ratio:g}", "steps a second optimizer out of sight", 'use "ratio": 1'


def _device(offload: Any) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))


def _offloads(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False))


def warn_of_kept_gradients(optimizer: Any, inner: torch.optim.Optimizer) -> None:
    """Log once when a step uses a gradient that the host has kept from an earlier step: no restart repeats that.

    Args:
        optimizer: DeepSpeed's wrapper.
        inner: torch's, which it steps.
    """
    if not _offloads(optimizer):
        return

    def before_step(*_: Any) -> None:
        fresh = optimizer.norm_for_param_grads.keys()
        kept = sum(optimizer.get_param_id(parameter) not in fresh for parameter in _owned(optimizer))
        if kept:
            handle.remove()
            _log.warning(
                "%d parameters got no gradient in the last micro-batch of a step. DeepSpeed's offload updates them "
                "with the gradient of an earlier step, which no checkpoint holds: after a restart, their first update "
                "may differ from that of the lost run",
                kept,
            )

    handle = inner.register_step_pre_hook(before_step)


def _owned(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    """Parameters of which this rank updates a part."""
    if hasattr(optimizer, "params_in_partition"):
        for group in optimizer.params_in_partition:
            yield from group
        return
    for parameters in optimizer.fp16_groups:
        for parameter in parameters:
            padded = optimizer.grad_position[optimizer.get_param_id(parameter)][2]
            if optimizer._get_param_partition_rank(parameter) * padded < parameter.ds_numel:
                yield parameter
