"""Training engines behind one interface."""

import sys
from typing import Any, cast

from cpsr.engines.adapter import EngineAdapter, StepObserver
from cpsr.engines.foreign import named, refuse_known
from cpsr.engines.torch import TorchAdapter
from cpsr.errors import UnsupportedEngineError

__all__ = ["EngineAdapter", "StepObserver", "TorchAdapter", "adapt", "refuse_known"]

_INTERFACE = tuple(name for name in (*vars(EngineAdapter), *EngineAdapter.__annotations__) if not name.startswith("_"))


def adapt(engine: Any) -> EngineAdapter:
    """The adapter of a training engine; DeepSpeed is not imported unless the caller did.

    Args:
        engine: an `EngineAdapter` (returned as it is), or what `deepspeed.initialize` returned first.

    Raises:
        UnsupportedEngineError: anything else, or an engine whose state CPSR cannot see; the message names it.
    """
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None and isinstance(engine, deepspeed.DeepSpeedEngine):
        from cpsr.engines.deepspeed import DeepSpeedAdapter

        return DeepSpeedAdapter(engine)
    if not isinstance(engine, type) and all(hasattr(engine, name) for name in _INTERFACE):
        return cast(EngineAdapter, engine)
    refuse_known(engine)
    raise UnsupportedEngineError(
        f"{named(engine)} is no training engine that CPSR knows: pass the engine that deepspeed.initialize returns "
        "first, or TorchAdapter(model, optimizer); a Trainer of Lightning or transformers takes the CPSRCallback of "
        "cpsr.integrations"
    )
