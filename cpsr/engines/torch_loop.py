"""How a user's plain torch loop is watched."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from cpsr.engines.adapter import StepObserver
from cpsr.engines.evaluation import loss_of
from cpsr.engines.hooks import Hooks, ModuleHook, StepHooks, forget_compiled_code
from cpsr.errors import UnsupportedEngineError

__all__ = ["CAPTURED", "TorchLoop"]

CAPTURED = (
    "CPSR sees a step where the optimizer is called, and the replay of a CUDA graph that holds the step calls nothing: "
    "no step would be counted or saved. Capture forward and backward alone (torch.cuda.make_graphed_callables, "
    'torch.compile(model, mode="reduce-overhead")), and call optimizer.step() outside of the graph'
)

_ORDER = (
    "CPSR takes the last one's as the end of a step: call each once in every step, in the order in which TorchAdapter "
    "has them. One that steps more or less often, as the optimizer of a discriminator or a schedule by the epoch, is "
    'registered instead: recovery.register("optimizer of judge", optimizer). What it trains is registered, too, unless '
    "it is a part of TorchAdapter's module"
)


class TorchLoop:
    """The hooks on a module, its optimizers, schedulers and gradient scaler, for the loop that `TorchAdapter` states.

    Args:
        module: the one that the loop calls.
        optimizers: in the order in which they step; with the last one, once all have stepped, the update ends.
        schedulers: likewise.
        scaler: None where there is none.

    Attributes:
        iteration: steps completed, those that the scaler skipped included.
        gives_loss: whether the last training forward returned a loss.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        scaler: Any,
    ) -> None:
        self._module, self._optimizers, self._schedulers, self._scaler = module, optimizers, schedulers, scaler
        self._step_hooks: list[StepHooks] = []
        self._stepped: list[Any] = []  # optimizers and schedulers, in the step in progress
        self._hooks = Hooks()
        self._observer: StepObserver | None = None
        self.iteration = 0
        self.gives_loss = False
        self.forget_step()

    def attach(self, observer: StepObserver) -> None:
        """Install the hooks.

        Raises:
            RuntimeError: an observer is attached already.
        """
        if self._hooks.installed:
            raise RuntimeError("this adapter already has an observer; detach it first")
        self._observer = observer
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
        self._hooks.remove()
        self._observer = None
        self.forget_step()

    def _watching(self) -> StepObserver:
        assert self._observer is not None  # hooks are installed only while there is one
        return self._observer

    def forget_step(self) -> None:
        """Drop what was seen of the step in progress."""
        self._update_begun = False  # between before_update and the end of the step
        self._changes = False  # between state_changes and the end of the step
        self._applied = False
        self._awaits_scheduler = False
        self._stepped = []
        for around in self._step_hooks:
            around.forget()

    def _before_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self.require_complete()
            self._watching().on_forward(args, kwargs)
        else:
            self._watching().on_other_forward()

    def _after_forward(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            loss = loss_of(output)
            self.gives_loss = loss is not None
            if loss is not None:
                self._watching().on_loss(loss.detach())

    def require_complete(self) -> None:
        """Check that the loop is between two steps.

        Raises:
            UnsupportedEngineError: it is inside one; the message names the call that is missing.
        """
        if self._update_begun:
            missing = "scheduler.step()" if self._awaits_scheduler else "grad_scaler.update()"
            if left := self._left():
                raise UnsupportedEngineError(
                    f"{type(left[0]).__name__}.step() was not called in optimizer step {self.iteration + 1}. {_ORDER}"
                )
            raise UnsupportedEngineError(
                f"{missing} was not called after optimizer step {self.iteration + 1}. CPSR takes it as the end of a "
                "step: call it every step, or do not give it to TorchAdapter (a scheduler stepped once an epoch can "
                "be registered as user state)"
            )

    def _left(self) -> list[torch.optim.Optimizer]:
        """The optimizers that the step in progress has still to call."""
        return [one for one in self._optimizers if all(one is not other for other in self._stepped)]

    def _begin_update(self) -> None:
        if not self._update_begun:
            self._update_begun = True
            self._watching().before_update()

    def _change_state(self) -> None:
        if not self._changes:
            self._changes = True
            self._watching().state_changes()

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch's stub has no types
        if on_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedEngineError(f"{type(optimizer).__name__}.step() is being captured. {CAPTURED}")
        if any(argument is not None for argument in (*args[1:], *kwargs.values())):
            raise UnsupportedEngineError(
                f"{type(optimizer).__name__}.step was called with a closure, which may run the module many times in "
                "one step; call it without"
            )
        if self._scaler is None:
            self._take_turn(optimizer)
        self._begin_update()
        self._change_state()

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # A fused optimizer looks itself whether the gradients overflow; on a GPU that is not waited for.
        overflow = None if self._scaler is None else getattr(optimizer, "found_inf", None)
        known = isinstance(overflow, torch.Tensor) and not overflow.is_cuda
        self._applied = self._applied or not (known and bool(overflow))
        if self._scaler is None and optimizer is self._optimizers[-1]:
            self._end_update()

    def _around_scaler_step(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        # The scaler first waits for the gradients, to see whether they overflow: the state does not change yet.
        if any(optimizer is one for one in self._optimizers):
            self._take_turn(optimizer)
            self._begin_update()
        return original(optimizer, *args, **kwargs)

    def _take_turn(self, optimizer: torch.optim.Optimizer) -> None:
        """This one steps: after all that were given before it, and as the first of a step only if it is the first."""
        if not self._stepped or optimizer is self._optimizers[0]:
            self.require_complete()
        self._require_turn(optimizer, self._optimizers)

    def _require_turn(self, one: Any, order: Sequence[Any]) -> None:
        place = next(index for index, other in enumerate(order) if other is one)
        taken = [other for other in self._stepped if any(other is another for another in order)]
        if len(taken) != place:
            expected = type(order[min(len(taken), len(order) - 1)]).__name__
            raise UnsupportedEngineError(
                f"{type(one).__name__}.step() was called where {expected}.step() was to come, in step "
                f"{self.iteration + 1}. {_ORDER}"
            )
        self._stepped.append(one)

    def _around_scaler_update(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._update_begun:
            if self._left():
                self.require_complete()
            self._change_state()  # the scale, also of a step that was skipped
        result = original(*args, **kwargs)
        if self._update_begun:
            self._end_update()
        return result

    def _end_update(self) -> None:
        if not self._schedulers:
            self._complete_step()
        else:
            self._awaits_scheduler = True

    def _around_scheduler_step(self, scheduler: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._update_begun:
            self._require_turn(scheduler, self._schedulers)
        result = original(*args, **kwargs)
        if self._awaits_scheduler and scheduler is self._schedulers[-1]:
            self._complete_step()
        return result

    def _complete_step(self) -> None:
        applied = self._applied
        self.forget_step()
        self.iteration += 1
        # Last, and nothing after it: the observer may roll the whole state back, or leave the process.
        self._watching().after_step(self.iteration, applied)
