"""How a user's plain torch loop is watched."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from cpsr.engines.adapter import StepObserver
from cpsr.engines.evaluation import loss_of
from cpsr.engines.hooks import Hooks, ModuleHook, StepHooks, forget_compiled_code
from cpsr.errors import UnsupportedEngineError
from cpsr.state.device_values import captures

__all__ = ["CAPTURED", "TorchLoop"]

CAPTURED = (
    "CPSR sees a step where the optimizer is called, and the replay of a CUDA graph that holds the step calls nothing: "
    "no step would be counted or saved. Capture forward and backward alone (torch.cuda.make_graphed_callables, "
    'torch.compile(model, mode="reduce-overhead")), and call optimizer.step() outside of the graph'
)

_ONCE = (
    "A step ends once the loop has called all that TorchAdapter has: call each once in every step. One that steps more "
    "or less often, as the optimizer of a discriminator or a schedule by the epoch, is registered instead: "
    'recovery.register("optimizer of judge", optimizer). What it trains is registered, too, unless it is a part of '
    "TorchAdapter's module"
)


class TorchLoop:
    """The hooks on a module, its optimizers, schedulers and gradient scaler, for the loop that `TorchAdapter` states.

    Args:
        module: the one that the loop calls.
        optimizers: each steps once in a step of the loop.
        schedulers: likewise.
        scaler: None where there is none.

    Attributes:
        iteration: steps completed, those that the scaler skipped included.
        gives_loss: whether the last training forward returned a loss.
        recorder: follows the training forwards; None: nothing does.
    """

    observer: StepObserver  # while hooks are installed

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        scaler: Any,
    ) -> None:
        self._module, self._optimizers, self._schedulers, self._scaler = module, optimizers, schedulers, scaler
        self._parts = [*optimizers, *([] if scaler is None else [scaler]), *schedulers]
        self._step_hooks: list[StepHooks] = []
        self._hooks = Hooks()
        self._captured = False  # the last forward, into a CUDA graph
        self.iteration = 0
        self.gives_loss = False
        self.recorder: Any = None
        self.forget_step()

    def attach(self, observer: StepObserver) -> None:
        """Install the hooks.

        Raises:
            RuntimeError: an observer is attached already.
        """
        if self._hooks.installed:
            raise RuntimeError("this adapter already has an observer; detach it first")
        self.observer = observer
        hooks = self._hooks
        forget_compiled_code()
        # First of all hooks: those of a sharded module gather its parameters.
        before = ModuleHook(self._before_forward)
        hooks.add(self._module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        hooks.add(self._module.register_forward_hook(ModuleHook(self._after_forward)))
        self._step_hooks = [
            StepHooks(one, self._before_optimizer_step, self._after_optimizer_step) for one in self._optimizers
        ]
        for around in self._step_hooks:
            hooks.add(around)
        if self._scaler is not None:
            hooks.wrap(self._scaler, "step", self._around_scaler_step)
            hooks.wrap(self._scaler, "update", self._around_scaler_update)
        for scheduler in self._schedulers:
            hooks.wrap_by_class(scheduler, "step", partial(self._around_scheduler_step, scheduler))

    def detach(self) -> None:
        """Remove the hooks; without any it does nothing. A step that is not complete by then is not reported."""
        if self._hooks.installed:
            self._hooks.remove()
            del self.observer
        self.forget_step()

    def forget_step(self) -> None:
        """Drop what was seen of the step in progress."""
        self._begin_step()
        for around in self._step_hooks:
            around.forget()

    def _begin_step(self) -> None:
        self._update_begun = False  # between before_update and the end of the step
        self._changes = False  # between state_changes and the end of the step
        self._applied = False
        self._called: list[Any] = []  # of the parts, in the step in progress

    def _before_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._captured = captures()
        if self._captured:
            return
        if module.training and torch.is_grad_enabled():
            if self._update_begun:
                self.require_complete()
            self.observer.on_forward(args, kwargs)
            if self.recorder is not None:
                self.recorder.before_forward(args, kwargs)
        else:
            self.observer.on_other_forward()

    def _after_forward(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module.training and torch.is_grad_enabled() and not self._captured:
            if self.recorder is not None:
                self.recorder.after_forward(output)
            loss = loss_of(output)
            self.gives_loss = loss is not None
            if loss is not None:
                self.observer.on_loss(loss.detach())

    def require_complete(self) -> None:
        """Check that the loop is between two steps.

        Raises:
            UnsupportedEngineError: it is inside one; the message names the call that is missing.
        """
        if self._update_begun:
            missing = self._missing()[0]
            call = "update" if missing is self._scaler else "step"
            raise UnsupportedEngineError(
                f"{type(missing).__name__}.{call}() was not called in step {self.iteration + 1}. {_ONCE}"
            )

    def _missing(self) -> list[Any]:
        """What the step in progress has still to call."""
        return [one for one in self._parts if all(one is not other for other in self._called)]

    def _begin(self, part: Any, *, changes: bool = True) -> None:
        """The loop calls an optimizer, the scaler's update or a schedule: each once in a step.

        Args:
            part: that is called; None: it is inside the call of another one.
            changes: whether it changes the state from here on.
        """
        if not self._update_begun:
            self._update_begun = True
            self.observer.before_update()
        elif part is not None and (not self._called or any(part is other for other in self._called)):
            self.require_complete()
        if changes and not self._changes:
            self._changes = True
            self.observer.state_changes()

    def _end(self, part: Any) -> None:
        """That call has returned; with the last one the step is complete."""
        self._called.append(part)
        if len(self._called) < len(self._parts):  # `_begin` refuses a second call of one
            return
        applied = self._applied
        self._begin_step()
        self.iteration += 1
        # Last, and nothing after it: the observer may roll the whole state back, or leave the process.
        self.observer.after_step(self.iteration, applied)

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if captures():
            raise UnsupportedEngineError(f"{type(optimizer).__name__}.step() is being captured. {CAPTURED}")
        if (kwargs or len(args) > 1) and any(argument is not None for argument in (*args[1:], *kwargs.values())):
            raise UnsupportedEngineError(
                f"{type(optimizer).__name__}.step was called with a closure, which may run the module many times in "
                "one step; call it without"
            )
        self._begin(optimizer if self._scaler is None else None)

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # A fused optimizer looks itself whether the gradients overflow; on a GPU that is not waited for.
        overflow = None if self._scaler is None else getattr(optimizer, "found_inf", None)
        known = isinstance(overflow, torch.Tensor) and not overflow.is_cuda
        self._applied = self._applied or not (known and bool(overflow))
        if self._scaler is None:
            self._end(optimizer)

    def _around_scaler_step(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        # The scaler first waits for the gradients, to see whether they overflow: the state does not change yet.
        ours = any(optimizer is one for one in self._optimizers)
        if ours:
            self._begin(optimizer, changes=False)
        result = original(optimizer, *args, **kwargs)
        if ours:
            self._end(optimizer)
        return result

    def _around_scaler_update(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._update_begun:
            self._begin(self._scaler, changes=False)
            if any(self._missing()[0] is one for one in self._optimizers):
                self.require_complete()
            self._begin(None)  # the scale changes, also of a step that was skipped
        result = original(*args, **kwargs)
        if self._update_begun:
            self._end(self._scaler)
        return result

    def _around_scheduler_step(self, scheduler: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._update_begun:
            self._begin(scheduler)  # also where the scaler, which skips this step, is updated later
        result = original(*args, **kwargs)
        if self._update_begun:
            self._end(scheduler)
        return result
