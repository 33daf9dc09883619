"""How a user's plain torch loop is watched."""

from typing import Any

import torch

from cpsr.engines.adapter import StepObserver
from cpsr.engines.evaluation import loss_of
from cpsr.engines.hooks import Hooks
from cpsr.errors import UnsupportedEngineError

__all__ = ["TorchLoop"]


class TorchLoop:
    """The hooks on one module, optimizer, scheduler and gradient scaler; see `TorchAdapter` for the loop they expect.

    Attributes:
        iteration: steps completed, those that the scaler skipped included.
        gives_loss: whether the last training forward returned a loss.
    """

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, scaler: Any) -> None:
        self._module, self._optimizer, self._scheduler, self._scaler = module, optimizer, scheduler, scaler
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
        hooks.add(self._module.register_forward_pre_hook(self._before_forward, with_kwargs=True))
        hooks.add(self._module.register_forward_hook(self._after_forward))
        hooks.add(self._optimizer.register_step_pre_hook(self._before_optimizer_step))
        hooks.add(self._optimizer.register_step_post_hook(self._after_optimizer_step))
        if self._scaler is not None:
            hooks.wrap(self._scaler, "step", self._around_scaler_step)
            hooks.wrap(self._scaler, "update", self._around_scaler_update)
        if self._scheduler is not None:
            hooks.wrap_by_class(self._scheduler, "step", self._around_scheduler_step)

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

    def _before_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self._require_complete()
            self._watching().on_forward(args, kwargs)

    def _after_forward(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            loss = loss_of(output)
            self.gives_loss = loss is not None
            if loss is not None:
                self._watching().on_loss(loss.detach())

    def _require_complete(self) -> None:
        if self._update_begun:
            missing = "scheduler.step()" if self._awaits_scheduler else "grad_scaler.update()"
            raise UnsupportedEngineError(
                f"{missing} was not called after optimizer step {self.iteration + 1}. CPSR takes it as the end of a "
                "step: call it every step, or do not give it to TorchAdapter (a scheduler stepped once an epoch can "
                "be registered as user state)"
            )

    def _begin_update(self) -> None:
        if not self._update_begun:
            self._update_begun = True
            self._watching().before_update()

    def _change_state(self) -> None:
        if not self._changes:
            self._changes = True
            self._watching().state_changes()

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(argument is not None for argument in (*args[1:], *kwargs.values())):
            raise UnsupportedEngineError(
                f"{type(optimizer).__name__}.step was called with a closure, which may run the module many times in "
                "one step; call it without"
            )
        if self._scaler is None:
            self._require_complete()
        self._begin_update()
        self._change_state()

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # A fused optimizer looks itself whether the gradients overflow; on a GPU that is not waited for.
        overflow = None if self._scaler is None else getattr(optimizer, "found_inf", None)
        known = isinstance(overflow, torch.Tensor) and not overflow.is_cuda
        self._applied = not (known and bool(overflow))
        if self._scaler is None:
            self._end_update()

    def _around_scaler_step(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        # The scaler first waits for the gradients, to see whether they overflow: the state does not change yet.
        if optimizer is self._optimizer:
            self._require_complete()
            self._begin_update()
        return original(optimizer, *args, **kwargs)

    def _around_scaler_update(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._update_begun:
            self._change_state()  # the scale, also of a step that was skipped
        result = original(*args, **kwargs)
        if self._update_begun:
            self._end_update()
        return result

    def _end_update(self) -> None:
        if self._scheduler is None:
            self._complete_step()
        else:
            self._awaits_scheduler = True

    def _around_scheduler_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self._awaits_scheduler:
            self._complete_step()
        return result

    def _complete_step(self) -> None:
        applied = self._applied
        self.forget_step()
        self.iteration += 1
        # Last, and nothing after it: the observer may roll the whole state back, or leave the process.
        self._watching().after_step(self.iteration, applied)
