"""How a user's loop over a DeepSpeed engine is watched; and the random states that it keeps beside torch's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from deepspeed.runtime.pipe import schedule

from cpsr.engines.adapter import StepObserver
from cpsr.engines.deepspeed_masters import torch_optimizer
from cpsr.engines.evaluation import loss_of
from cpsr.engines.hooks import Hooks, forget_compiled_code, uncompiled

__all__ = [
    "DeepSpeedLoop",
    "load_tracked_states",
    "preserved_tracked_states",
    "tracked_states",
    "watch_receives",
]


class DeepSpeedLoop:
    """The hooks on one engine instance.

    Order within a step: `on_forward` and `on_loss` per micro-batch, `before_update` inside `engine.step` (or
    `train_batch`). `state_changes` comes when the gradients' norm is known and torch's optimizer begins. `after_step`
    comes when that call is about to return and every counter is settled.

    Args:
        engine: a `DeepSpeedEngine` or `PipelineEngine`.
        pipeline: whether it is the latter.

    Attributes:
        gives_loss: whether the last training forward returned a loss.
        recorder: follows the training forwards; None: nothing does.
    """

    observer: StepObserver  # while hooks are installed

    def __init__(self, engine: Any, pipeline: bool) -> None:
        self._engine, self._pipeline = engine, pipeline
        self._hooks = Hooks()
        self.gives_loss = False
        self.recorder: Any = None
        self.forget_step()

    def attach(self, observer: StepObserver) -> None:
        """Install the hooks on this engine instance.

        Raises:
            RuntimeError: an observer is attached already.
        """
        if self._hooks.installed:
            raise RuntimeError("this adapter already has an observer; detach it first")
        self.observer = observer
        engine, hooks = self._engine, self._hooks
        forget_compiled_code()
        hooks.wrap(engine, "_take_model_step", self._around_update)
        hooks.add(torch_optimizer(engine).register_step_pre_hook(uncompiled(self._before_optimizer_step)))
        hooks.wrap(engine, "load_checkpoint", self._around_load)
        if self._pipeline:
            hooks.wrap(engine, "train_batch", self._around_train_batch)
            watch_receives(engine, hooks, observer)
            return
        hooks.wrap(engine, "backward", self._around_backward)
        hooks.wrap(engine, "step", self._around_step)
        # On the engine: the inputs as the user gave them, before DeepSpeed casts them, and outside of what
        # `engine.compile` compiles.
        before = uncompiled(self._before_forward)
        hooks.add(engine.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        hooks.add(engine.register_forward_hook(uncompiled(self._after_forward)))

    def detach(self) -> None:
        """Remove the hooks; without any it does nothing."""
        if self._hooks.installed:
            self._hooks.remove()
            del self.observer
        self.forget_step()

    @property
    def micro_steps(self) -> int:
        """The engine's at the end of its last step: those of a step that is not complete do not count."""
        iteration, at_end = self._boundary
        now, per_step = int(self._engine.micro_steps), int(self._engine.gradient_accumulation_steps())
        return at_end if iteration == self._engine.global_steps else now - now % per_step

    def _around_update(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.observer.before_update()
        return original(*args, **kwargs)

    def _before_optimizer_step(self, *_: Any) -> None:
        self.observer.state_changes()

    def _around_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        before = self._engine.global_steps
        result = original(*args, **kwargs)
        if self._engine.global_steps != before:
            self._complete_step()
        return result

    def _around_train_batch(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.observer.on_train_batch()
        before = self._engine.global_steps
        result = original(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self.observer.on_loss(result.detach())
        if self._engine.global_steps != before:
            self._complete_step()
        return result

    def _complete_step(self) -> None:
        losses = [] if self._backward_seen else self._forward_losses
        self.forget_step()
        for loss in losses:
            self.observer.on_loss(loss)
        # Last, and nothing after it: the observer may roll the whole engine back, or leave the process.
        self.observer.after_step(self._engine.global_steps, bool(self._engine.was_step_applied()))

    def forget_step(self) -> None:
        """Drop what was seen of the step in progress: the engine is at the end of a step."""
        self._boundary = int(self._engine.global_steps), int(self._engine.micro_steps)
        self._backward_seen = False
        self._forward_losses: list[torch.Tensor] = []

    def _around_backward(self, original: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(loss, *args, **kwargs)
        self._backward_seen = True
        self.observer.on_loss(loss.detach())
        return result

    def _around_load(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.observer.before_external_load()
        result = original(*args, **kwargs)
        if result[0] is None:  # DeepSpeed found no checkpoint, and has changed nothing
            self.observer.after_external_load(None)
            return result
        self.forget_step()
        self.observer.after_external_load(self._engine.global_steps)
        return result

    def _before_forward(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if engine.module.training and torch.is_grad_enabled():
            self.observer.on_forward(args, kwargs)
            if self.recorder is not None:
                self.recorder.before_forward(args, kwargs)
        else:
            self.observer.on_other_forward()

    def _after_forward(self, engine: Any, args: tuple[Any, ...], output: Any) -> None:
        if engine.module.training and torch.is_grad_enabled():
            if self.recorder is not None:
                self.recorder.after_forward(output)
            loss = loss_of(output)
            self.gives_loss = loss is not None
            if loss is not None and not self._backward_seen:
                self._forward_losses.append(loss.detach().clone())  # for loops that call loss.backward() themselves


RECEIVES = (schedule.RecvActivation, schedule.RecvGrad)


def watch_receives(engine: Any, hooks: Hooks, observer: StepObserver) -> None:
    """Report to the observer every receive of a training batch, by the name of DeepSpeed's instruction.

    A receive over gloo blocks its thread until the other stage has sent, which is the stage's idle time. Over NCCL it
    is only put into the device's queue, and what the host does meanwhile is no wait.

    Args:
        engine: a `PipelineEngine`; the table of instructions of this instance is replaced, not its class's.
        hooks: take the replacement off again.
        observer: is told of them.
    """
    instructions = dict(engine._INSTRUCTION_MAP)
    for receive in RECEIVES:
        instructions[receive] = _watched(instructions[receive], receive.__name__, observer)
    hooks.replace(engine, "_INSTRUCTION_MAP", instructions)


def _watched(original: Callable[..., Any], place: str, observer: StepObserver) -> Callable[..., Any]:
    def receive(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if not engine.module.training:  # eval_batch has another schedule
            return original(engine, *args, **kwargs)
        observer.wait_begins(place)
        try:
            return original(engine, *args, **kwargs)
        finally:
            observer.wait_ends()

    return receive


def tracked_states() -> dict[str, torch.Tensor]:
    """The states by name; none where the script added none."""
    states: dict[str, torch.Tensor] = get_cuda_rng_tracker().get_states()
    return states


def load_tracked_states(saved: dict[str, torch.Tensor]) -> str | None:
    """Put `tracked_states` back, of the names that the script has added.

    Adding the others here would make the script's own `add` fail.

    Returns:
        Which names could not be restored, for people; None if all were.
    """
    tracker = get_cuda_rng_tracker()
    own = tracker.get_states()
    fitting = {name: state for name, state in saved.items() if name in own and state.numel() == own[name].numel()}
    tracker.set_states({**own, **{name: state.clone() for name, state in fitting.items()}})
    other = sorted((saved.keys() | own.keys()) - fitting.keys())
    if not other:
        return None
    return (
        f"of DeepSpeed's random-state tracker {sorted(fitting) or 'nothing'} is restored, and {other} is not: it is "
        "either not in the checkpoint, or of another kind of device, or not added before CPSR restores"
    )


@contextmanager
def preserved_tracked_states() -> Iterator[None]:
    """The states are as before on exit."""
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    try:
        yield
    finally:
        tracker.set_states(states)
