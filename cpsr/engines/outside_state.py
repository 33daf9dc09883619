"""What an optimizer keeps beside its state for parameters: under other keys, as attributes, and in its state dict."""

from collections.abc import Collection
from typing import Any

import torch

from cpsr.engines.state_tree import Form, StateTree, number_of, place_of, put_together

__all__ = ["load_outside", "outside_state"]

_BASE = torch.optim.Optimizer.state_dict
_OF_TORCH = ("state", "param_groups")


def outside_state(
    optimizer: torch.optim.Optimizer, attributes: Collection[str], device: torch.device
) -> dict[str, Any] | None:
    """As plain data with tensors; None where there is nothing.

    Args:
        optimizer: torch's.
        attributes: names of numbers among its own attributes that its steps change.
        device: of the parameters.

    Raises:
        UnsupportedEngineError: something that is not plain data; the message names it.
    """
    found: dict[str, Any] = {
        "state": {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)},
        "attributes": {key: getattr(optimizer, key) for key in sorted(attributes)},
        "more": {},
    }
    if type(optimizer).state_dict is not _BASE or optimizer._optimizer_state_dict_post_hooks:
        found["more"] = {key: value for key, value in optimizer.state_dict().items() if key not in _OF_TORCH}
    if not any(found.values()):
        return None
    tree = StateTree(found, device, type(optimizer).__name__)
    return {"form": tree.form, "numbers": tree.numbers(), "tensors": tree.tensors}


def load_outside(optimizer: torch.optim.Optimizer, saved: dict[str, Any] | None, device: torch.device) -> None:
    """Put `outside_state` back; entries of a state dict by the optimizer's own `load_state_dict`."""
    if saved is None:
        return
    tensors, numbers = saved["tensors"], saved["numbers"]

    def tensor(path: str, form: Form) -> torch.Tensor:
        found: torch.Tensor = tensors[path]
        return found.to(place_of(form, device), copy=True)

    def number(path: str, form: Form) -> Any:
        return number_of(form, numbers[path], device)

    found = put_together(saved["form"], tensor, number)
    if found["more"]:
        own = dict(optimizer.state)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}, **found["more"]})
        optimizer.state.update(own)
    optimizer.state.update(found["state"])
    for key, value in found["attributes"].items():
        setattr(optimizer, key, value)
