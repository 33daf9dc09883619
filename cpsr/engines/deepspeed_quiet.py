"""A DeepSpeed engine that trains without leaving a trace in what it counts, times and reports."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["unreported"]


@contextmanager
def unreported(engine: Any) -> Iterator[None]:
    """No progress lines, monitor events or throughput inside; on exit the engine's own numbers are as before.

    Its numbers are the plain attributes of the engine and of its optimizer (`global_steps`, the last gradient norm,
    `micro_step_id`, ...); tensors with elements are the caller's to put back.
    """
    owners = [engine, engine.optimizer]
    kept = [{name: _copied(value) for name, value in vars(owner).items() if _is_number(value)} for owner in owners]
    throughput, monitor = dict(vars(engine.tput_timer)), engine.monitor.enabled
    progress = engine._config.steps_per_print
    engine.tput_timer.steps_per_output = None
    engine.monitor.enabled = False
    engine._config.steps_per_print = None
    try:
        yield
    finally:
        engine._config.steps_per_print = progress
        engine.monitor.enabled = monitor
        vars(engine.tput_timer).clear()
        vars(engine.tput_timer).update(throughput)
        for owner, numbers in zip(owners, kept, strict=True):
            for name, value in numbers.items():
                if _is_number(getattr(owner, name, None)):
                    setattr(owner, name, value)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return value is None or isinstance(value, bool | int | float)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
