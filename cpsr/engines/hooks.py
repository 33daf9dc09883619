"""Wrapping methods of one instance, and taking the wrappers off again without a trace; no copy of it is watched."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["Hooks", "ModuleHook", "StepHooks", "forget_compiled_code", "uncompiled"]

_OUTSIDE = "CPSR watches this call outside of graphs. For fullgraph=True, pass TorchAdapter what torch.compile returns"
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.6 has none
_compiler = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)  # no promise of torch's
_ABSENT = object()  # the instance had no attribute of its own: the class's method was visible


def uncompiled(act: Callable[..., Any]) -> Callable[..., Any]:
    """What a hook calls: torch.compile ends its graph before it, begins another behind it, and traces nothing of it."""
    why = {} if torch.__version__ < "2.8" else {"reason": _OUTSIDE}
    outside: Callable[..., Any] = torch.compiler.disable(act, **why)  # type: ignore[no-untyped-call]
    if _compiler is None:
        return outside

    def call(*given: Any) -> Any:
        # The first is True in what is traced; the second is None where nothing compiles the frames of this thread.
        if torch.compiler.is_dynamo_compiling() or _compiler() is not None:
            return outside(*given)
        return act(*given)  # `outside` takes as long as several of our hooks

    return call


def forget_compiled_code() -> None:
    """Let torch compile again at the next call: what it has compiled so far does not look for hooks added since."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


class Hooks:
    """The hooks that one `attach` installed."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    @property
    def installed(self) -> bool:
        """Whether anything is to be removed."""
        return bool(self._undo)

    def add(self, handle: "RemovableHandle | StepHooks") -> None:
        """Take over a handle that torch gave for a hook of its own, or hooks around steps."""
        self._undo.append(handle.remove)

    def wrap(self, instance: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Let `instance.name(*args)` call `wrapper(original, *args)`; the class and other instances are untouched."""
        original = getattr(instance, name)

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        self.replace(instance, name, wrapped)

    def replace(self, instance: Any, name: str, value: Any) -> None:
        """Let `instance.name` be `value`; the class and other instances are untouched."""
        own = vars(instance).get(name, _ABSENT)

        def undo() -> None:
            if own is _ABSENT:
                delattr(instance, name)
            else:
                setattr(instance, name, own)

        setattr(instance, name, value)
        self._undo.append(undo)

    def wrap_by_class(self, instance: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Like `wrap`, for objects whose `state_dict` is their `__dict__` (torch's schedulers).

        The instance gets a subclass of its own class, so that nothing of ours appears in `state_dict()`.
        """
        original_class = type(instance)
        original = getattr(original_class, name)

        @wraps(original)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return wrapper(lambda *a, **k: original(self, *a, **k), *args, **kwargs)

        def reduced(self: Any, protocol: Any) -> Any:
            """How it is copied and pickled: as an instance of its own class."""
            reduce: Callable[..., Any] = original_class.__reduce_ex__
            _, (_, *more), *state = reduce(self, max(2, int(protocol)))
            return object.__new__, (original_class, *more), *state

        namespace = {name: wrapped, "__reduce_ex__": reduced, "__module__": original_class.__module__}
        instance.__class__ = type(original_class.__name__, (original_class,), namespace)

        def undo() -> None:
            instance.__class__ = original_class

        self._undo.append(undo)

    def remove(self) -> None:
        """Remove everything, the last one first."""
        while self._undo:
            self._undo.pop()()


class ModuleHook:
    """A forward hook of a module. In a copy of the module, also a pickled one, it does nothing.

    A loop copies its module for an average of the weights. Without this it would copy, with the hook, the whole run.

    Args:
        act: what the hook does; None: nothing.
    """

    def __init__(self, act: Callable[..., Any] | None = None) -> None:
        self._act = None if act is None else uncompiled(act)

    def __call__(self, *given: Any) -> Any:
        """What torch calls."""
        if self._act is None or _is_exporting():
            return None
        return self._act(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, ()


class StepHooks:
    """Hooks around the complete steps of one optimizer.

    Where the `step` of a subclass calls that of its base, torch calls hooks twice in one step, and these once.

    Args:
        optimizer: torch's.
        before: called when a step begins, with the optimizer, and the arguments of the step.
        after: called when it has ended, likewise; not after an error.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        before: Callable[[torch.optim.Optimizer, Any, Any], None],
        after: Callable[[torch.optim.Optimizer, Any, Any], None] = lambda optimizer, args, kwargs: None,
    ) -> None:
        self._before, self._after = before, after
        self._depth = 0
        self._handles = [
            optimizer.register_step_pre_hook(uncompiled(self._begin)),
            optimizer.register_step_post_hook(uncompiled(self._end)),
        ]

    def remove(self) -> None:
        """Remove both."""
        for handle in self._handles:
            handle.remove()

    def forget(self) -> None:
        """No step is in progress: one that has failed did not end."""
        self._depth = 0

    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._depth == 0:
            self._before(optimizer, args, kwargs)
        self._depth += 1

    def _end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._after(optimizer, args, kwargs)
