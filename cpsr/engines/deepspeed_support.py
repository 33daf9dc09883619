"""Which DeepSpeed features CPSR refuses, each by its name in the configuration."""

import json
from typing import Any

import torch
from deepspeed.utils import groups

from cpsr.engines import optimizer_state
from cpsr.engines.deepspeed_masters import torch_optimizer
from cpsr.engines.deepspeed_refusals import refusal
from cpsr.engines.moe.deepspeed import unsupported_experts
from cpsr.errors import UnsupportedEngineError

__all__ = ["require_supported"]

JSON_TYPES = {"adam": "Adam", "adamw": "AdamW"}
FUSED_ONLY = ("bias_correction", "set_grad_none")  # torch's Adam always corrects, and knows neither


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
    found = [name for name, used in _unsupported(engine) if used]
    if found:
        raise UnsupportedEngineError(refusal(found))
    _require_one_precision(engine)
    _require_visible_optimizer(engine)


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


def _require_visible_optimizer(engine: Any) -> None:
    """Refuse the optimizer that DeepSpeed builds from its JSON on a processor, with the line that CPSR can restore."""
    kind = JSON_TYPES.get(engine.optimizer_name())
    if kind is None or not optimizer_state.keeps_state_in_kernel(torch_optimizer(engine), torch.device(engine.device)):
        return
    given = {name: value for name, value in (engine.optimizer_params() or {}).items() if name not in FUSED_ONLY}
    # The defaults differ: 0 of the kernel, 0.01 of torch's AdamW.
    params = {**given, "weight_decay": given.get("weight_decay", 0.0), "torch_adam": True}
    line = json.dumps({"type": kind, "params": params}, default=str)
    raise UnsupportedEngineError(
        f"without a GPU DeepSpeed builds {type(torch_optimizer(engine)).__name__} from the optimizer {kind} of its "
        "configuration, and that keeps state in its kernel which CPSR cannot restore bit for bit. Let DeepSpeed build "
        f'torch\'s optimizer: add "torch_adam": true to its params, so that the line is "optimizer": {line}'
    )


def _unsupported(engine: Any) -> list[tuple[str, bool]]:
    zero = engine._config.zero_config
    return [
        ("zero_optimization.offload_optimizer", _offloads(zero.offload_optimizer)),
        ("zero_optimization.offload_param", _offloads(zero.offload_param)),
        ("zero_optimization.offload_optimizer.super_offload", bool(engine.super_offload())),
        ("zero_optimization.zenflow", bool(engine.zenflow)),
        ("zero_optimization.zero_hpz_partition_size", _has_second_copies(engine)),
        ("zero_optimization.zero_quantized_weights", bool(zero.zero_quantized_weights)),
        ("zero_optimization.zero_quantized_nontrainable_weights", bool(zero.zero_quantized_nontrainable_weights)),
        ("zero_optimization.zero_quantized_gradients", bool(zero.zero_quantized_gradients)),
        ("compile.deepcompile", bool(engine.is_deepcompile_enabled())),
        ("data_efficiency.data_routing.random_ltd", bool(engine.random_ltd_enabled())),
        *unsupported_experts(engine),
    ]


def _has_second_copies(engine: Any) -> bool:
    """Whether a node keeps copies of weights: also where the configuration of an earlier engine asked for them."""
    within_node = groups._get_zero_param_intra_parallel_group() is not None
    return engine._config.zero_config.zero_hpz_partition_size > 1 or (
        within_node and bool(engine.zero_optimization_partition_weights())
    )


def _offloads(offload: Any) -> bool:
    return offload is not None and str(getattr(offload.device, "value", offload.device)) != "none"
