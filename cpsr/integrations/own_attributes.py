"""What a subclass keeps on the Trainer of transformers, as TRL's trainers keep sums between two lines of their log."""

from collections import defaultdict, deque
from inspect import isfunction
from typing import Any

import torch
from transformers import Trainer

from cpsr.state import codec

__all__ = ["OwnAttributes"]

# What the base class reads and sets itself, as its data and its settings.
OF_TRAINER = {name for one in vars(Trainer).values() if isfunction(one) for name in one.__code__.co_names}


class OwnAttributes:
    """Attributes of a subclass that training has changed: plain data, tensors, and containers of these.

    What training does not change is a setting, and stays as the script has it.

    Args:
        trainer: before its first step.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._first = {name: codec.decode(*codec.encode(value)) for name, value in self._values().items()}

    def state_dict(self) -> dict[str, Any]:
        """Those that are not as they were before the first step."""
        return {
            name: value
            for name, value in self._values().items()
            if name not in self._first or not codec.same(self._first[name], value)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put them back, in the containers that there are; all others are as before the first step."""
        own = vars(self._trainer)
        unsaved = {name: self._first[name] for name in self.state_dict() if name in self._first}
        for name, value in {**unsaved, **state}.items():
            own[name] = self._filled(own.get(name), value)

    def _values(self) -> dict[str, Any]:
        own = vars(self._trainer)
        values = {name: _plain(value) for name, value in own.items() if name not in OF_TRAINER}
        return {name: value for name, value in values.items() if codec.is_plain(value)}

    def _filled(self, container: Any, value: Any) -> Any:
        """The value: in the container, if that is of its kind."""
        if isinstance(value, dict):
            mapping = container if isinstance(container, dict) else {}
            makes = isinstance(mapping, defaultdict)  # what it makes of a missing key may be a container, too
            content = {
                key: self._filled(mapping[key] if makes or key in mapping else None, one) for key, one in value.items()
            }
            mapping.clear()
            mapping.update(content)
            return mapping
        if isinstance(value, list):
            sequence = container if isinstance(container, list | deque) else []
            items = [self._filled(None, one) for one in value]
            sequence.clear()
            sequence.extend(items)
            return sequence
        return value.to(self._trainer.args.device) if isinstance(value, torch.Tensor) else value


def _plain(value: Any) -> Any:
    """A copy of its containers, as dictionaries and lists."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | deque) else value
