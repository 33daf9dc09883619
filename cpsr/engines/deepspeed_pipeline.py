"""When a pipeline's stage waits for its neighbours."""

from collections.abc import Callable
from typing import Any

from deepspeed.runtime.pipe import schedule

from cpsr.engines.adapter import StepObserver
from cpsr.engines.hooks import Hooks

__all__ = ["watch_receives"]

RECEIVES = (schedule.RecvActivation, schedule.RecvGrad)


def watch_receives(engine: Any, hooks: Hooks, watching: Callable[[], StepObserver]) -> None:
    """Report to the observer every receive of a training batch, by the name of DeepSpeed's instruction.

    A receive over gloo blocks its thread until the other stage has sent, which is the stage's idle time. Over NCCL it
    is only put into the device's queue, and what the host does meanwhile is no wait.

    Args:
        engine: a `PipelineEngine`; the table of instructions of this instance is replaced, not its class's.
        hooks: take the replacement off again.
        watching: the observer of the moment.
    """
    instructions = dict(engine._INSTRUCTION_MAP)
    for receive in RECEIVES:
        instructions[receive] = _watched(instructions[receive], receive.__name__, watching)
    hooks.replace(engine, "_INSTRUCTION_MAP", instructions)


def _watched(original: Callable[..., Any], place: str, watching: Callable[[], StepObserver]) -> Callable[..., Any]:
    def receive(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if not engine.module.training:  # eval_batch has another schedule
            return original(engine, *args, **kwargs)
        observer = watching()
        observer.wait_begins(place)
        try:
            return original(engine, *args, **kwargs)
        finally:
            observer.wait_ends()

    return receive
