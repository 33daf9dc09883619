"""Which DeepSpeed features CPSR refuses, each by its name in the configuration."""

from typing import Any

from cpsr.engines.deepspeed_offload import require_visible_states
from cpsr.engines.moe.deepspeed import unsupported_experts
from cpsr.errors import UnsupportedEngineError

__all__ = ["require_supported"]


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
        raise UnsupportedEngineError(
            f"DeepSpeed configuration uses {', '.join(found)}, whose state CPSR cannot see or has not been tested to "
            "restore bit for bit; remove it from the configuration"
        )
    require_visible_states(engine)


def _unsupported(engine: Any) -> list[tuple[str, bool]]:
    return [
        ("torch_autocast", bool(engine.torch_autocast_enabled())),
        ("bf16.bf16_optimizer_states", bool(engine.bf16_optimizer_states())),
        ("compile.deepcompile", bool(engine.is_deepcompile_enabled())),
        ("managed_gradient_accumulation=false", not engine.managed_gradient_accumulation()),
        ("data_efficiency.data_routing.random_ltd", bool(engine.random_ltd_enabled())),
        *unsupported_experts(engine),
    ]
