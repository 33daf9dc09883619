"""Training engines behind one interface."""

import sys
from typing import Any

from cpsr.engines.adapter import EngineAdapter, StepObserver
from cpsr.engines.torch import TorchAdapter
from cpsr.engines.torch_refusals import named, refuse_known
from cpsr.errors import UnsupportedEngineError

__all__ = ["EngineAdapter", "StepObserver", "TorchAdapter", "adapt", "refuse_known"]


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
    if not isinstance(engine, type) and isinstance(engine, EngineAdapter):
        return engine
    refuse_known(engine)
    raise UnsupportedEngineError(
        f"{named(engine)} is no training engine that CPSR knows: pass the engine that deepspeed.initialize returns "
        "first, or TorchAdapter(model, optimizer); a Trainer of Lightning or transformers takes the CPSRCallback of "
        "cpsr.integrations"
    )
