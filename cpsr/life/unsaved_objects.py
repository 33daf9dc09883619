"""Optimizers, schedules, scalers and averages that no checkpoint contains; mode exact refuses their first use."""

import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from cpsr.engines import EngineAdapter, TorchAdapter
from cpsr.engines.distributed_tensors import local
from cpsr.engines.hooks import Hooks
from cpsr.engines.optimizer_layout import held_optimizers, is_trial
from cpsr.errors import UnsupportedEngineError
from cpsr.state.user_objects import stateful

__all__ = ["Unsaved"]

_SCHEDULES = [kind for kind in vars(lr_scheduler).values() if isinstance(kind, type) and "step" in vars(kind)]
_NOT_FOLLOWED = (
    "{} steps, an optimizer of {} that CPSR does not follow: its state would begin anew after a restart, and its steps "
    "are not counted. Give it to {} if it steps in every iteration; else call "
    'recovery.register("other", optimizer) before the loop, and register what it trains. Another phase of the training '
    "is a run of its own: open it with this optimizer and another run_dir"
)
_SCALER = (
    "The {} that scales the loss was not given to CPSR and would start afresh after a restart: "
    "TorchAdapter(model, optimizer, scheduler, grad_scaler=scaler)"
)
_SCHEDULE = (
    'The schedule {} was not given to CPSR and would begin anew after a restart: {}recovery.register("scheduler", '
    "scheduler)"
)
_DEEPSPEED_SCHEDULE = "deepspeed.initialize(..., lr_scheduler=scheduler)"
_AVERAGE = (
    "The averaged weights (AveragedModel) are not registered and would begin anew after a restart: "
    'recovery.register("average", averaged_model)'
)


class Unsaved:
    """Watches what the loop uses, from the first step of a life to its last.

    - An optimizer of torch that the engine does not have and that is not registered: at its first step.
    - A gradient scaler, a schedule of the engine's optimizer or of a registered one, and an average of the engine's
      module (`AveragedModel`) that nobody saves: when they are first used.

    In mode exact they are errors, raised before the object acts. In other modes each is one event of level error. An
    object is saved if a checkpoint calls its `state_dict`, through whatever the user has registered. Other threads and
    forked children are not watched.

    Args:
        adapter: the engine.
        registered: the objects that the user has registered so far.
        exact: whether to refuse.
        report: records an event: its kind, one sentence, the iteration and the logging level.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        registered: Callable[[], Iterable[Any]],
        exact: bool,
        report: Callable[[str, str, int | None, int], None],
    ) -> None:
        self._adapter, self._registered, self._exact, self._report = adapter, registered, exact, report
        self._here = os.getpid(), threading.get_ident()
        self._followed = frozenset(map(id, adapter.optimizers))
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()  # saved, or reported
        self._in_schedule = False  # which steps its parts, and itself in its constructor
        self._torch = isinstance(adapter, TorchAdapter)
        self._hooks = Hooks()
        self._hooks.add(register_optimizer_step_pre_hook(self._before_step))
        for kind in _SCHEDULES:
            self._hooks.wrap(kind, "step", self._around_schedule)
        self._hooks.wrap(lr_scheduler.LRScheduler, "_initial_step", self._around_schedule)
        self._hooks.wrap(torch.amp.GradScaler, "step", self._around_scaler)
        self._hooks.wrap(AveragedModel, "update_parameters", self._around_average)

    def close(self) -> None:
        """Stop watching."""
        self._hooks.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._followed or not self._is_unknown(optimizer) or is_trial(optimizer):
            return
        ours = self._adapter.optimizers
        if any(one.state is optimizer.state for one in ours):
            return  # another face of the engine's
        shares = any(one.param_groups is optimizer.param_groups for one in ours)
        if (shares or _contains(optimizer, self._followed)) and not optimizer.state:
            return  # a wrapper; with state of its own it is found at the next step
        if any(id(one) in self._followed for one in _callers()):
            return  # a part of the engine's
        trained = {_place(one) for group in optimizer.param_groups for one in group["params"]}
        other = trained.isdisjoint(map(_place, self._adapter.module.parameters()))
        of = "other parameters" if other else "parameters of the same module"
        given = "TorchAdapter(model, [optimizer, other])" if self._torch else "the engine"
        self._require(optimizer, _NOT_FOLLOWED.format(type(optimizer).__name__, of, given))

    def _around_scaler(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled() and self._is_unknown(scaler) and self._is_one_of(self._adapter.optimizers, optimizer):
            self._require(scaler, _SCALER.format(type(scaler).__name__))
        return original(scaler, optimizer, *args, **kwargs)

    def _around_schedule(self, original: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
        inside, self._in_schedule = self._in_schedule, True
        try:
            if original.__name__ == "step" and not inside and self._is_unknown(schedule):
                self._before_unknown_schedule(schedule)
            return original(schedule, *args, **kwargs)
        finally:
            self._in_schedule = inside

    def _before_unknown_schedule(self, schedule: Any) -> None:
        optimizer, remedy = getattr(schedule, "optimizer", None), ""
        if self._is_one_of(self._adapter.optimizers, optimizer):
            given = "TorchAdapter(model, optimizer, scheduler)" if self._torch else _DEEPSPEED_SCHEDULE
            remedy = f"{given} if it is stepped with every optimizer step, else "
        elif not self._is_one_of(self._registered(), optimizer):
            return
        self._require(schedule, _SCHEDULE.format(type(schedule).__name__, remedy))

    def _around_average(self, original: Any, average: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_unknown(average) and not any(one is average for one in self._adapter.module.modules()):
            averaged = set(map(_place, model.parameters()))
            if not averaged.isdisjoint(map(_place, self._adapter.module.parameters())):
                self._require(average, _AVERAGE)
        return original(average, model, *args, **kwargs)

    @staticmethod
    def _is_one_of(known: Iterable[Any], optimizer: Any) -> bool:
        """Whether it is one of these, or a wrapper of one."""
        groups = getattr(optimizer, "param_groups", None)
        return groups is not None and any(getattr(one, "param_groups", None) is groups for one in known)

    def _is_unknown(self, one: Any) -> bool:
        return one not in self._known and self._is_here()

    def _is_here(self) -> bool:
        """False in other threads, as CPSR's own, and in forked children."""
        return (os.getpid(), threading.get_ident()) == self._here

    def _require(self, one: Any, what: str) -> None:
        """Refuse or report an object that neither the engine nor a registered object saves, once."""
        if sys.getprofile() is None and not any(held is one for held in self._saved()):
            if self._exact:
                raise UnsupportedEngineError(f"mode 'exact' cannot restore all that this loop keeps. {what}")
            message = f"after a restart this job goes on without part of its state. {what}"
            if self._adapter.rank == 0:
                self._report("unsaved state", message, self._adapter.iteration, logging.ERROR)
        self._known.add(one)

    def _saved(self) -> list[Any]:
        """The objects whose `state_dict` a checkpoint calls; found by a profiler, and so not under another one."""
        parts, registered = self._adapter.loop_parts, list(self._registered())
        held = [*registered, *(part for one in parts for part in (one, *getattr(one, "__dict__", {}).values()))]

        def note(frame: types.FrameType, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_name == "state_dict":
                held.append(frame.f_locals.get("self"))

        sys.setprofile(note)
        try:
            for one in (*parts, *registered):
                stateful("", one).state_dict()
        finally:
            sys.setprofile(None)
        return held


def _contains(optimizer: Optimizer, followed: frozenset[int]) -> bool:
    """Whether it steps optimizers of the engine, and its groups have nothing but the parameters."""
    bare = all(group.keys() <= {"params", "param_names"} for group in optimizer.param_groups)
    return bare and any(id(one) in followed for one in held_optimizers(optimizer))


def _callers() -> Iterator[Any]:
    """The objects whose methods are being called, from the inside out."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back


def _place(tensor: torch.Tensor) -> int:
    """The memory that a parameter shares with what a `state_dict` has of it."""
    return local(tensor).untyped_storage().data_ptr()
