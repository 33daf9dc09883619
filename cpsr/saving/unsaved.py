"""Finds state of the user's loop that no checkpoint would contain, through the optimizer and the module."""

import contextlib
import gc
import itertools
import logging
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from cpsr.engines import EngineAdapter, TorchAdapter
from cpsr.engines.hooks import StepHooks
from cpsr.errors import UnsupportedEngineError

__all__ = ["Unsaved"]

_KINDS = (torch.amp.GradScaler, LRScheduler, AveragedModel, Optimizer)
# Depth of the search inside given or registered objects: a schedule of schedules, a user's wrapper.
_DEPTH_MAX = 8
_SEARCHED_MAX = 300_000
_OF_ONE_MAX = 10_000
_LIBRARIES = ("torch", "deepspeed", "cpsr")  # their functions know half of each library by name
_PLAIN = (str, bytes, bytearray, int, float, complex, type(None), type, types.ModuleType, torch.Tensor)


class Unsaved:
    """Searches twice, when the first and the second optimizer step of a life begin.

    The first search runs before anything has changed. An unsaved gradient scaler of this optimizer is in use then, and
    mode exact refuses the step. It also lists schedules, averages and other optimizers. The second search finds which
    of them the loop used in the step between: mode exact refuses those too. An unused one may be a frozen teacher,
    belong to an earlier phase, or be used later, once per epoch: every mode warns of it once and trains on. In other
    modes all of these are warnings.

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
        self._candidates: list[tuple[weakref.ref[Any], _Uses]] | None = None
        self._done = False
        self._versions = _versions(adapter) if isinstance(adapter, TorchAdapter) and adapter.iteration else {}
        self._hook = StepHooks(adapter.optimizers[0], self._before_step)

    def close(self) -> None:
        """Stop searching."""
        self._hook.remove()
        self._finish()

    def _finish(self) -> None:
        self._done = True  # inside the hook it stays: torch is iterating over the hooks, and others may follow
        for _, uses in self._candidates or ():
            uses.close()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._done:
            return
        if self._candidates is None:
            self._first_search()
            if not self._candidates:
                self._finish()
        else:
            self._finish()
            self._second_search(self._candidates)

    def _first_search(self) -> None:
        self._warn_of_written()
        in_use = _alive(self._in_use)
        found = self._unsaved(in_use)
        self._candidates = [
            (weakref.ref(one), _Uses(one)) for one in found if not isinstance(one, torch.amp.GradScaler)
        ]
        scalers = [self._description(one) for one in found if isinstance(one, torch.amp.GradScaler)]
        self._refuse_or_warn(scalers + self._marked(in_use), "this life has trained nothing yet")

    def _warn_of_written(self) -> None:
        """A script that loads weights by itself, after CPSR has restored its own, takes these away again."""
        before, now = self._versions, _versions(self._adapter) if self._versions else {}
        written = [name for name, version in before.items() if now.get(name, version) != version]
        if written:
            message = (
                f"{len(written)} parameters (the first is {written[0]!r}) were written to after iteration "
                f"{self._adapter.iteration} had been restored and before the first step. If the script loads or "
                "initialises weights there, these have replaced the restored ones: do it before CPSRRecovery, or only "
                "where recovery.iteration is 0. If they were put back, as after an evaluation, nothing is wrong"
            )
            self._report("weights written", message, self._adapter.iteration, logging.WARNING)

    def _second_search(self, candidates: "list[tuple[weakref.ref[Any], _Uses]]") -> None:
        alive = [(one, uses) for reference, uses in candidates if (one := reference()) is not None]
        unsaved = {id(one) for one in self._unsaved([one for one, _ in alive])}
        left = [(one, uses.since(one)) for one, uses in alive if id(one) in unsaved]
        idle = [self._description(one) for one, used in left if not used]
        if idle and self._adapter.rank == 0:
            what = "; ".join(idle)
            message = f"state that the loop has not used so far is not saved; it may matter if used later. {what}"
            self._report("unsaved state", message, self._adapter.iteration, logging.WARNING)
        self._refuse_or_warn(
            [self._description(one) for one, used in left if used and _holds_state(one)],
            "this life has trained one step: an object registered now lags by it, unless the run begins anew",
        )

    def _refuse_or_warn(self, found: list[str], trained: str) -> None:
        what = "; ".join(found)
        if found and self._exact:
            raise UnsupportedEngineError(f"mode 'exact' cannot restore all that this loop keeps, and {trained}. {what}")
        if found and self._adapter.rank == 0:
            message = f"after a restart this job goes on without part of its state. {what}"
            self._report("unsaved state", message, self._adapter.iteration, logging.WARNING)

    def _unsaved(self, in_use: list[Any]) -> list[Any]:
        """Those that neither the adapter nor a registered object contains, without parts of each other."""
        saved = _reachable([*self._adapter.loop_parts, *self._registered()])
        found = [one for one in in_use if id(one) not in saved]
        inside = [_reachable([one]) - {id(one)} for one in found]
        return [one for one in found if not any(id(one) in ids for ids in inside)]

    def _in_use(self, one: Any) -> bool:
        optimizers = self._adapter.optimizers
        if isinstance(one, torch.amp.GradScaler):
            # Added by `unscale_` and `step`, and removed by `update`: this step uses the scaler.
            return one.is_enabled() and any(id(optimizer) in one._per_optimizer_states for optimizer in optimizers)
        if isinstance(one, LRScheduler):
            scheduled = getattr(getattr(one, "optimizer", None), "param_groups", None)
            return any(scheduled is optimizer.param_groups for optimizer in optimizers)
        if isinstance(one, AveragedModel):
            return _shapes(one) == _shapes(self._adapter.module)
        groups = getattr(one, "param_groups", [])
        if any(groups is optimizer.param_groups for optimizer in optimizers):
            return False
        module = {id(parameter) for parameter in self._adapter.module.parameters()}
        return any(id(parameter) in module for group in groups for parameter in group["params"])

    def _marked(self, in_use: Iterable[Any]) -> list[str]:
        """A scaler of another class than torch's, which has set a fused optimizer's `found_inf`."""
        known = any(isinstance(one, torch.amp.GradScaler) for one in in_use)
        given = any(hasattr(part, "scale") for part in (*self._adapter.loop_parts, *self._registered()))
        marked = any(getattr(one, "found_inf", None) is not None for one in self._adapter.optimizers)
        return [_SCALER.format("gradient scaler")] if marked and not known and not given else []

    def _description(self, one: Any) -> str:
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
    """Objects of those kinds that are still referenced, without garbage that is not collected yet."""
    # By type, not isinstance: isinstance would make proxies resolve their targets.
    references = [weakref.ref(one) for one in gc.get_objects() if issubclass(type(one), _KINDS) and in_use(one)]
    if references:
        gc.collect()
    return [one for reference in references if (one := reference()) is not None]


class _Uses:
    """Counts how often the loop uses a schedule, an average or an optimizer, from now on."""

    def __init__(self, one: Any) -> None:
        self._steps = 0
        self._before = _counters(one)
        # An optimizer that never called its base class's constructor has no such hooks, and counts as unused.
        hooked = isinstance(one, Optimizer) and hasattr(one, "_optimizer_step_post_hooks")
        self._hook = one.register_step_post_hook(self._count) if hooked else None

    def since(self, one: Any) -> bool:
        """Whether it was used since."""
        return self._steps > 0 or _counters(one) != self._before

    def close(self) -> None:
        """Stop counting."""
        if self._hook is not None:
            self._hook.remove()

    def _count(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1


def _counters(one: Any) -> list[Any]:
    """The numbers that a use of a schedule or an average changes; empty for other objects."""
    if isinstance(one, AveragedModel):
        return [int(one.n_averaged)]
    if not isinstance(one, LRScheduler):
        return []
    own = [(name, value) for name, value in vars(one).items() if isinstance(value, int | float)]
    return [own, *map(_counters, getattr(one, "_schedulers", ()))]


def _holds_state(one: Any) -> bool:
    """Whether it has state that a restart could lose: plain SGD has none."""
    return not isinstance(one, Optimizer) or bool(getattr(one, "state", None))


def _reachable(roots: Iterable[Any]) -> set[int]:
    """Ids of objects reachable through attributes and containers, the roots included."""
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
    return set(found)


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


def _shapes(module: torch.nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in module.parameters()]
