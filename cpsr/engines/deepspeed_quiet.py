"""A DeepSpeed engine and a module that train without a trace in what they count, time, draw and report."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["unmarked", "unreported", "untimed"]


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


@contextmanager
def unmarked(module: torch.nn.Module) -> Iterator[None]:
    """On exit buffers and the plain Python state of every submodule are as before; at step boundaries only.

    Plain are attributes that are numbers, strings or None, and `torch.Generator`s with their states. What changes
    inside containers and other objects, and in tensors that are neither parameter nor buffer, is not put back.
    """
    kept = [
        (submodule, {name: value for name, value in vars(submodule).items() if _is_plain(value)})
        for submodule in module.modules()
    ]
    drawn = [
        (value, value.get_state())
        for _, attributes in kept
        for value in attributes.values()
        if isinstance(value, torch.Generator)
    ]
    buffers = [
        (submodule._buffers, name, buffer, buffer.detach().clone())
        for submodule in module.modules()
        for name, buffer in submodule._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for submodule, attributes in kept:
            vars(submodule).update(attributes)
        for generator, state in drawn:
            generator.set_state(state)
        with torch.no_grad():
            for owner, name, buffer, values in buffers:
                buffer.copy_(values)  # whatever its version: batch norm's own do not count their changes
                owner[name] = buffer


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | torch.Generator)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return value is None or isinstance(value, bool | int | float)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
