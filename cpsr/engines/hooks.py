"""Wrapping methods of one instance, and taking the wrappers off again without a trace."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.utils.hooks import RemovableHandle

__all__ = ["Hooks"]

_ABSENT = object()  # the instance had no attribute of its own: the class's method was visible


class Hooks:
    """The hooks that one `attach` installed."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    @property
    def installed(self) -> bool:
        """Whether anything is to be removed."""
        return bool(self._undo)

    def add(self, handle: RemovableHandle) -> None:
        """Take over a handle that torch gave for a hook of its own."""
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

        namespace = {name: wrapped, "__module__": original_class.__module__}
        instance.__class__ = type(original_class.__name__, (original_class,), namespace)

        def undo() -> None:
            instance.__class__ = original_class

        self._undo.append(undo)

    def remove(self) -> None:
        """Remove everything, the last one first."""
        while self._undo:
            self._undo.pop()()
