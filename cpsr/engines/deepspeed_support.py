"""Which DeepSpeed features CPSR refuses, each by its name in the configuration."""

from typing import Any

from deepspeed.utils import groups

from cpsr.engines.deepspeed_offload import require_visible_states
from cpsr.engines.deepspeed_refusals import refusal
from cpsr.engines.moe.deepspeed import unsupported_experts
from cpsr.errors import UnsupportedEngineError

__all__ = ["UNMANAGED", "require_supported"]

UNMANAGED = (
    "with managed_gradient_accumulation=false the loop decides how many batches a step takes, so that those of steps "
    "which were not seen cannot be counted"
)


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
    require_visible_states(engine)
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


def _unsupported(engine: Any) -> list[tuple[str, bool]]:
    zero = engine._config.zero_config
    return [
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
