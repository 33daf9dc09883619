"""State that the loop uses and no checkpoint would contain: refused, in mode exact, when it is first used."""

import contextlib
import itertools
import logging
import os
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from cpsr.engines import EngineAdapter, TorchAdapter
from cpsr.engines.hooks import Hooks
from cpsr.engines.optimizer_probe import is_trial
from cpsr.errors import UnsupportedEngineError

__all__ = ["Unsaved"]

# Depth of the search inside given or registered objects: a schedule of schedules, a user's wrapper.
_DEPTH_MAX = 8
_SEARCHED_MAX = 300_000
_OF_ONE_MAX = 10_000
_LIBRARIES = ("torch", "deepspeed", "cpsr")  # their functions know half of each library by name
_PLAIN = (str, bytes, bytearray, int, float, complex, type(None), type, types.ModuleType, torch.Tensor)
_SCHEDULES = [
    kind for kind in vars(lr_scheduler).values() if isinstance(kind, type) and "step" in vars(kind)
]  # those with a `step` of their own


class Unsaved:
    """Watches what the loop uses, from the first step of a life to its last.

    - An optimizer of torch that the engine does not have and the user has not registered: at its first step. torch's
      hook sees every optimizer of the process. Those of other threads and of forked children are not looked at.
    - One that is registered, over parameters that are not: at its first step.
    - A gradient scaler that calls the engine's optimizer: at the first step, before anything has changed.
    - A schedule of the engine's optimizer or of a registered one, and an average of the engine's module
      (`AveragedModel`): when they are first used.

    In mode exact they are errors, raised before the object acts. In other modes each is one event of level error.

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
        self._adapter = adapter
        self._registered = registered
        self._exact = exact
        self._report = report
        self._here = os.getpid(), threading.get_ident()
        self._followed = frozenset(map(id, adapter.optimizers))
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()  # saved, or reported
        self._begun = False
        self._versions = _versions(adapter) if isinstance(adapter, TorchAdapter) and adapter.iteration else {}
        self._hooks = Hooks()
        self._hooks.add(register_optimizer_step_pre_hook(self._before_step))
        for kind in _SCHEDULES:
            self._hooks.wrap(kind, "step", self._around_schedule)
        self._hooks.wrap(AveragedModel, "update_parameters", self._around_average)

    def close(self) -> None:
        """Stop watching."""
        self._hooks.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in self._followed:
            self._before_unknown(optimizer)
        elif not self._begun and self._is_here():
            self._begun = True
            self._warn_of_written()
            self._before_first(optimizer)

    def _before_first(self, optimizer: Optimizer) -> None:
        saved = [*self._adapter.loop_parts, *self._registered()]
        scalers = (one for one in _callers() if isinstance(one, torch.amp.GradScaler) and one.is_enabled())
        scaler = next(scalers, None)
        marked = getattr(optimizer, "found_inf", None) is not None  # by a scaler, of any class, on a fused optimizer
        if scaler is not None:
            self._require(scaler, _SCALER.format(type(scaler).__name__))
        elif marked and not any(hasattr(one, "scale") for one in saved):
            self._refuse(_SCALER.format("gradient scaler"))
        scheduled = any(hasattr(one.step, "_wrapped_by_lr_sched") for one in self._adapter.optimizers)
        if scheduled and not any(isinstance(one, lr_scheduler.LRScheduler) for one in _reachable(saved).values()):
            self._tell(
                "a learning-rate schedule of torch was made for this optimizer, and CPSR was given none. If the loop "
                f"steps it later, as once an epoch, it is refused then in mode 'exact'. {self._remedy()}",
                logging.WARNING,
            )

    def _before_unknown(self, optimizer: Optimizer) -> None:
        if not self._is_here() or optimizer in self._known or is_trial(optimizer):
            return
        if any(one.state is optimizer.state for one in self._adapter.optimizers):
            return  # another face of the engine's
        shared = any(one.param_groups is optimizer.param_groups for one in self._adapter.optimizers)
        if shared and not optimizer.state:
            return  # a wrapper; with state of its own it is found at the next step
        if any(id(one) in self._followed for one in _callers()):
            return  # a part of the engine's
        module = {id(parameter) for parameter in self._adapter.module.parameters()}
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        what = "parameters of the same module" if own & module else "other parameters"
        given = "TorchAdapter(model, [optimizer, other])" if isinstance(self._adapter, TorchAdapter) else "the engine"
        registered = self._require(
            optimizer,
            f"{type(optimizer).__name__} steps, an optimizer of {what} that CPSR does not follow: its state would "
            f"begin anew after a restart, and its steps are not counted. Give it to {given} if it steps in every "
            'iteration; else call recovery.register("other", optimizer) before the loop, and register what it trains. '
            "Another phase of the training is a run of its own: open it with this optimizer and another run_dir",
        )
        if registered:
            self._require_parameters(optimizer, own - module)

    def _require_parameters(self, optimizer: Optimizer, trained: set[int]) -> None:
        """Refuse or report a registered optimizer over parameters that nobody saves."""
        reached = _reachable(self._registered())
        for group in optimizer.param_groups:
            reached.pop(id(group["params"]), None)  # an optimizer does not save what it trains
        saved = {id(part) for one in reached.values() for part in _parts(one) if isinstance(part, torch.Tensor)}
        if unsaved := trained - saved:
            self._refuse(
                f"{type(optimizer).__name__} is registered, but {len(unsaved)} of the parameters that it trains are "
                "neither in the engine's module nor in a registered object, and would begin anew after a "
                'restart: call recovery.register("other module", module) for the module that has them, too'
            )

    def _around_schedule(self, original: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
        groups = getattr(getattr(schedule, "optimizer", None), "param_groups", None)
        ours = any(one.param_groups is groups for one in self._adapter.optimizers)
        theirs = any(one.param_groups is groups for one in self._registered() if isinstance(one, Optimizer))
        if (ours or theirs) and schedule not in self._known and self._is_here() and not _in_constructor():
            name, remedy = type(schedule).__name__, self._remedy() if ours else _REGISTER_SCHEDULE
            self._require(
                schedule, f"The schedule {name} was not given to CPSR and would begin anew after a restart: {remedy}"
            )
        return original(schedule, *args, **kwargs)

    def _around_average(self, original: Any, average: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        inside = any(one is average for one in self._adapter.module.modules())  # and saved with it
        if not inside and average not in self._known and self._is_here():
            module = {id(parameter) for parameter in self._adapter.module.parameters()}
            if any(id(parameter) in module for parameter in model.parameters()):
                self._require(average, _AVERAGE)
        return original(average, model, *args, **kwargs)

    def _remedy(self) -> str:
        torch_loop = isinstance(self._adapter, TorchAdapter)
        whole = "TorchAdapter(model, optimizer, scheduler)" if torch_loop else _DEEPSPEED_SCHEDULE
        return f"{whole} if it is stepped with every optimizer step, else {_REGISTER_SCHEDULE}"

    def _is_here(self) -> bool:
        """False in other threads, as CPSR's own, and in forked children."""
        return (os.getpid(), threading.get_ident()) == self._here

    def _require(self, one: Any, what: str) -> bool:
        """Refuse or report an object that neither the engine nor a registered object contains, once.

        Returns:
            Whether one of them contains it.
        """
        contained = id(one) in _reachable([*self._adapter.loop_parts, *self._registered()])
        if not contained:
            self._refuse(what)
        parts = (part for part in _reachable([one]).values() if isinstance(part, lr_scheduler.LRScheduler))
        self._known.update([one, *parts])
        return contained

    def _refuse(self, what: str) -> None:
        if self._exact:
            raise UnsupportedEngineError(f"mode 'exact' cannot restore all that this loop keeps. {what}")
        self._tell(f"after a restart this job goes on without part of its state. {what}", logging.ERROR)

    def _tell(self, message: str, level: int) -> None:
        if self._adapter.rank == 0:
            self._report("unsaved state", message, self._adapter.iteration, level)

    def _warn_of_written(self) -> None:
        """A script that loads weights by itself, after CPSR has restored its own, takes these away again."""
        before, now = self._versions, _versions(self._adapter) if self._versions else {}
        others = [one for one in self._known if isinstance(one, Optimizer)]  # those that step before the engine's
        theirs = {id(part) for one in others for group in one.param_groups for part in group["params"]}
        theirs_by_name = {name for name, part in self._adapter.module.named_parameters() if id(part) in theirs}
        moved = [name for name, version in before.items() if now.get(name, version) != version]
        written = [name for name in moved if name not in theirs_by_name]
        if written:
            message = (
                f"{len(written)} parameters (the first is {written[0]!r}) were written to after iteration "
                f"{self._adapter.iteration} had been restored and before the first step. If the script loads or "
                "initialises weights there, these have replaced the restored ones: do it before CPSRRecovery, or only "
                "where recovery.iteration is 0. If they were put back, as after an evaluation, nothing is wrong"
            )
            self._report("weights written", message, self._adapter.iteration, logging.WARNING)


_REGISTER_SCHEDULE = 'recovery.register("scheduler", scheduler)'
_DEEPSPEED_SCHEDULE = "deepspeed.initialize(..., lr_scheduler=scheduler)"
_SCALER = (
    "The {} that scales the loss was not given to CPSR and would start afresh after a restart: "
    "TorchAdapter(model, optimizer, scheduler, grad_scaler=scaler)"
)
_AVERAGE = (
    "The averaged weights (AveragedModel) are not registered and would begin anew after a restart: "
    'recovery.register("average", averaged_model)'
)


def _callers() -> Iterator[Any]:
    """The objects whose methods are being called, from the inside out."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if (one := frame.f_locals.get("self")) is not None:
            yield one
        frame = frame.f_back


def _in_constructor() -> bool:
    """Whether torch makes a schedule, which steps it once."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and frame.f_globals.get("__name__") == lr_scheduler.__name__:
            return True
        frame = frame.f_back
    return False


def _reachable(roots: Iterable[Any]) -> dict[int, Any]:
    """Objects reachable through attributes and containers by their ids, the roots included."""
    found: dict[int, Any] = {}
    layer = list(roots)
    # A wrapper of a state may refer to it only in its methods.
    layer += [method for one in layer if (method := getattr(type(one), "state_dict", None)) is not None]
    searched = 0
    for _ in range(_DEPTH_MAX):
        new = {id(one): one for one in layer if id(one) not in found}
        found |= new
        left = _SEARCHED_MAX - searched
        parts = list(itertools.islice(itertools.chain.from_iterable(map(_parts, new.values())), left))
        searched += len(parts)
        layer = [part for part in parts if not issubclass(type(part), _PLAIN)]
    return found


def _parts(one: Any) -> Iterable[Any]:
    if isinstance(one, dict):
        return itertools.islice(one.values(), _OF_ONE_MAX)
    if isinstance(one, list | tuple | set | frozenset | deque):
        return itertools.islice(one, _OF_ONE_MAX)
    if isinstance(one, types.MethodType):
        return one.__self__, one.__func__
    if isinstance(one, partial):
        return one.func, one.args, one.keywords
    if isinstance(one, types.FunctionType):
        return _named(one)
    return _attributes(one)


def _named(function: types.FunctionType) -> Iterator[Any]:
    """Outside objects that a function's code refers to."""
    for cell in function.__closure__ or ():
        # A variable without a value yet leaves its cell empty.
        with contextlib.suppress(ValueError):
            yield cell.cell_contents
    known = function.__globals__
    if str(known.get("__name__")).partition(".")[0] not in _LIBRARIES:
        yield from (known[name] for name in function.__code__.co_names if name in known)


def _attributes(one: Any) -> Iterator[Any]:
    # Objects that hooks of a module or an optimizer refer to are not saved with it.
    yield from (value for name, value in getattr(one, "__dict__", {}).items() if "_hooks" not in name)
    for kind in type(one).__mro__:
        slots = (value for value in vars(kind).values() if isinstance(value, types.MemberDescriptorType))
        for slot in slots if "__slots__" in vars(kind) else ():
            with contextlib.suppress(AttributeError):  # a slot that was never set
                yield slot.__get__(one, kind)


def _versions(adapter: EngineAdapter) -> dict[str, int]:
    """How often each parameter was changed in place."""
    named = adapter.module.named_parameters()
    return {name: one._version for name, one in named if not one.is_inference()}
