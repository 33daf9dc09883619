"""A DeepSpeed engine that evaluates without a trace in what it times."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["untimed"]


@contextmanager
def untimed(engine: Any) -> Iterator[None]:
    """Keep DeepSpeed's throughput and forward timers, and those of MoE layers, out of an evaluation."""
    timed = [layer for layer in (*engine.moe_layers, *engine.gate_modules) if layer.wall_clock_breakdown]
    forward_timers, throughput = engine.engine_timers.forward_timers, dict(vars(engine.tput_timer))
    engine.engine_timers.forward_timers = []
    for layer in timed:
        layer.wall_clock_breakdown = False
    try:
        yield
    finally:
        for layer in timed:
            layer.wall_clock_breakdown = True
        engine.engine_timers.forward_timers = forward_timers
        vars(engine.tput_timer).clear()
        vars(engine.tput_timer).update(throughput)
