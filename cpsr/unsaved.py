"""State that the user's loop keeps and no checkpoint would hold: found through the optimizer and the module."""

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from cpsr.engines import EngineAdapter, TorchAdapter
from cpsr.errors import UnsupportedEngineError

__all__ = ["Unsaved"]

_KINDS = (torch.amp.GradScaler, LRScheduler, AveragedModel, Optimizer)
# How far into what was given or registered is looked for the object itself: a schedule of schedules, a user's wrapper.
_DEPTH_MAX = 6
_LOOKED_AT_MAX = 100_000


class Unsaved:
    """Looks once, when the first optimizer step of a life begins, and before anything has changed.

    Then a gradient scaler knows this optimizer, and schedules and averages are made. Where the mode is exact a restart
    would silently be wrong, and the step is refused; elsewhere it is said once.

    Args:
        adapter: the engine.
        registered: what the user has registered so far.
        exact: whether to refuse.
        tell: records an event: its kind, one sentence, the iteration and the level of logging.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        registered: Callable[[], Iterable[Any]],
        exact: bool,
        tell: Callable[[str, str, int | None, int], None],
    ) -> None:
        self._adapter = adapter
        self._registered = registered
        self._exact = exact
        self._tell = tell
        self._hook = adapter.optimizer.register_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Look no more."""
        self._hook.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._hook.remove()
        found = self._unsaved()
        if not found:
            return
        what = "; ".join(found)
        if self._exact:
            raise UnsupportedEngineError(
                f"mode 'exact' cannot restore all that this loop keeps, and this life has trained nothing yet. {what}"
            )
        if self._adapter.rank == 0:
            told = f"after a restart this job goes on without part of its state. {what}"
            self._tell("unsaved state", told, self._adapter.iteration, logging.WARNING)

    def _unsaved(self) -> list[str]:
        """What is found, one sentence for each with what to do about it."""
        held = _reachable([*self._adapter.loop_parts, *self._registered()])
        in_use = _alive(self._in_use)
        found = [one for one in in_use if id(one) not in held]
        inside = [_reachable([one]) - {id(one)} for one in found]
        outer = [one for one in found if not any(id(one) in ids for ids in inside)]
        return [self._told(one) for one in outer] + self._marked(in_use)

    def _in_use(self, one: Any) -> bool:
        optimizer = self._adapter.optimizer
        if isinstance(one, torch.amp.GradScaler):
            # Entered by `unscale_` and `step`, and dropped by `update`: this step is the scaler's.
            return one.is_enabled() and id(optimizer) in one._per_optimizer_states
        if isinstance(one, LRScheduler):
            return getattr(getattr(one, "optimizer", None), "param_groups", None) is optimizer.param_groups
        if isinstance(one, AveragedModel):
            return _shapes(one) == _shapes(self._adapter.module)
        groups = getattr(one, "param_groups", [])
        if groups is optimizer.param_groups:
            return False
        module = {id(parameter) for parameter in self._adapter.module.parameters()}
        return any(id(parameter) in module for group in groups for parameter in group["params"])

    def _marked(self, in_use: Iterable[Any]) -> list[str]:
        """A scaler of another class than torch's, which has told a fused optimizer whether gradients overflowed."""
        known = any(isinstance(one, torch.amp.GradScaler) for one in in_use)
        given = any(hasattr(part, "scale") for part in (*self._adapter.loop_parts, *self._registered()))
        marked = getattr(self._adapter.optimizer, "found_inf", None) is not None
        return [_SCALER.format("gradient scaler")] if marked and not known and not given else []

    def _told(self, one: Any) -> str:
        name = type(one).__name__
        if isinstance(one, torch.amp.GradScaler):
            return _SCALER.format(name)
        if isinstance(one, LRScheduler):
            torch_loop = isinstance(self._adapter, TorchAdapter)
            whole = "TorchAdapter(model, optimizer, scheduler)" if torch_loop else _DEEPSPEED_SCHEDULE
            return (
                f"The schedule {name} was not given to CPSR and would begin anew after a restart: {whole} where it is "
                'stepped with every optimizer step, else recovery.register("scheduler", scheduler)'
            )
        if isinstance(one, AveragedModel):
            return (
                "The averaged weights (AveragedModel) are not registered and would begin anew after a restart: "
                'recovery.register("average", averaged_model)'
            )
        return (
            f"Another optimizer, {name}, trains parameters of the same module, and its moments would begin anew after "
            'a restart: recovery.register("second optimizer", optimizer)'
        )


_DEEPSPEED_SCHEDULE = "deepspeed.initialize(..., lr_scheduler=scheduler)"
_SCALER = (
    "The {} that scales the loss was not given to CPSR and would start afresh after a restart: "
    "TorchAdapter(model, optimizer, scheduler, grad_scaler=scaler)"
)


def _alive(in_use: Callable[[Any], bool]) -> list[Any]:
    """Objects of those kinds that something still refers to; what only waits to be collected is none."""
    # By type, not isinstance: proxies must not be asked what they stand for.
    references = [weakref.ref(one) for one in gc.get_objects() if issubclass(type(one), _KINDS) and in_use(one)]
    if references:
        gc.collect()
    return [one for reference in references if (one := reference()) is not None]


def _reachable(roots: Iterable[Any]) -> set[int]:
    """Ids of what objects hold in their attributes and containers, themselves included."""
    found: dict[int, Any] = {}
    layer = list(roots)
    for _ in range(_DEPTH_MAX):
        layer = [one for one in layer if id(one) not in found and len(found) < _LOOKED_AT_MAX]
        found |= {id(one): one for one in layer}
        layer = [part for one in layer for part in _parts(one)]
    return set(found)


def _parts(one: Any) -> Iterator[Any]:
    if isinstance(one, list | tuple):
        yield from one
    elif isinstance(one, dict):
        yield from one.values()
    elif not isinstance(one, type | torch.Tensor):
        yield from getattr(one, "__dict__", {}).values()


def _shapes(module: torch.nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in module.parameters()]
