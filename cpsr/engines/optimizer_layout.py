"""The tensors that an optimizer will keep for each parameter: where they go in the buffers of snapshots.

Buffers are laid out when a life opens, and a fresh optimizer has no state then. Torch's `_init_optim_state` creates it
by a step of the optimizer itself; here a copy takes that step on a tensor like the parameter, so that training is as
without it. Nothing depends on the result but the place: tensors without one are saved with the small state.
"""

import copy
import inspect
import logging
import math
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from cpsr.engines.distributed_tensors import is_distributed, layout_of, local
from cpsr.engines.optimizer_entry import StateEntry
from cpsr.errors import UnsupportedEngineError
from cpsr.state.small_state import capture_rng, restore_rng

__all__ = [
    "Leaf",
    "expected_leaves",
    "held_optimizers",
    "is_trial",
    "numbers_of_gradients",
    "require_one_step",
    "unhooked",
]

logger = logging.getLogger(__name__)

GRADIENT = 1e-3
FLAT_ELEMENTS_MAX = 1 << 16  # of a flat tensor of many parameters, whose state is looked at element by element
_TRIAL = "_cpsr_trial"  # attribute of a copy
OWN_BYTES_MAX = 1 << 24  # of a tensor among the optimizer's attributes, to be copied with it


@dataclass(frozen=True)
class Leaf:
    """One tensor of the state.

    Attributes:
        shape, stride, dtype: local shape, stride and dtype.
        device: where it is.
        per_element: whether it has the shape of its parameter.
        split: whether it is split over ranks, as its parameter is.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    per_element: bool
    split: bool = False

    def holds(self, found: torch.Tensor) -> bool:
        """Whether a tensor's elements fill the same memory; in another order or shape, too."""
        held = local(found)
        same = (held.dtype, is_distributed(found)) == (self.dtype, self.split)
        return same and held.numel() == math.prod(self.shape)


def expected_leaves(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], master: torch.Tensor, *, whole: bool = True
) -> dict[str, Leaf]:
    """The tensors with dimensions that an optimizer keeps for `master` after its first step, by path.

    The same before and after that step, so that every life lays its buffers out alike. The optimizer, its parameters
    with their gradients, and all random states are as before. Takes the memory of one tensor, its gradient and its
    state.

    Args:
        optimizer: updates `master`.
        group: the parameter group of `master`.
        master: only shape, type and place are looked at.
        whole: False for a flat tensor of many parameters: of its state only what is per element has a place.

    Returns:
        Empty where the copy cannot step, which is logged: all state is then saved with the small state.

    Raises:
        UnsupportedEngineError: a step of the copy changed the parameters of the job, or state is split otherwise than
            its parameter; the message names it.
    """
    name, problem = type(optimizer).__name__, ""
    tensor = _like(master, whole=whole)
    for begun in (None, optimizer.state.get(master)):  # by a constructor, for what a step expects
        trial = _copy_of(optimizer, {**{key: _apart(value) for key, value in group.items()}, "params": [tensor]})
        if begun is not None:
            trial.state[tensor] = copy.deepcopy(begun)
        with _untouched(optimizer, master.device):
            try:
                _step_once(trial, tensor)
            except Exception as error:  # noqa: BLE001 - any: it is another package's code
                problem = problem or f"{type(error).__name__}: {error}"
                continue
        leaves = _leaves_of(name, trial.state.get(tensor), tensor, master)
        if whole:
            return leaves
        shape, stride = tuple(master.shape), master.stride()
        return {path: replace(one, shape=shape, stride=stride) for path, one in leaves.items() if one.per_element}
    logger.warning(
        "a step of a copy of %s failed (%s), so that CPSR does not know what it will keep for a tensor of shape %s: it "
        "saves that with the small state, while training waits",
        *(name, problem, tuple(master.shape)),
    )
    return {}


def numbers_of_gradients(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], master: torch.Tensor, *, whole: bool
) -> list[str]:
    """Paths of the numbers that follow from a tensor's gradients, by two steps as in `expected_leaves`.

    Empty where the copies cannot step.
    """
    found = list[dict[str, float]]()
    for gradient in (GRADIENT, 3 * GRADIENT):
        tensor = _like(master, whole=whole)
        trial = _copy_of(optimizer, {**{key: _apart(value) for key, value in group.items()}, "params": [tensor]})
        with _untouched(optimizer, master.device):
            try:
                _step_once(trial, tensor, gradient)
            except Exception:  # noqa: BLE001 - any: it is another package's code, and `expected_leaves` has logged it
                return []
        entry = StateEntry(trial.state.get(tensor), tensor.device, type(optimizer).__name__)
        found.append({path: float(entry.scalar(path)) for path in entry.number_paths.values()})
    return [path for path, value in found[0].items() if value != found[1].get(path)]


def require_one_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that runs the module many times in one step, or that wraps another one.

    Raises:
        UnsupportedEngineError: it does; the message names it.
    """
    kind = type(optimizer)
    taken = list(inspect.signature(kind.step).parameters.values())[1:]
    named = (one for one in taken if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))
    if needed := [one.name for one in named if one.default is one.empty]:
        raise UnsupportedEngineError(
            f"{kind.__name__}.step needs {', '.join(needed)}: it runs the module many times in one step, which CPSR "
            "cannot follow; use an optimizer that steps once per backward"
        )
    held = [name for name, value in vars(optimizer).items() if _optimizers_in(value)]
    if held or vars(optimizer).get("param_groups") is not optimizer.param_groups:
        raise UnsupportedEngineError(
            f"{kind.__name__} wraps another optimizer ({', '.join(held) or 'in its param_groups'}), whose state CPSR "
            "cannot see; give CPSR the optimizer inside"
        )


def is_trial(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is a copy whose state CPSR creates on a tensor of its own."""
    return _TRIAL in vars(optimizer)


def unhooked(step: Any) -> Any:
    """The function that torch wraps to call hooks of all optimizers."""
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def held_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Those that a wrapper, or a container, has in its attributes."""
    return [one for value in vars(optimizer).values() for one in _optimizers_in(value)]


def _optimizers_in(value: Any) -> list[torch.optim.Optimizer]:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    return [one for one in inside if isinstance(one, torch.optim.Optimizer)]


def _step_once(trial: torch.optim.Optimizer, tensor: torch.Tensor, size: float = GRADIENT) -> None:
    gradient = torch.full_like(tensor, size, requires_grad=False)
    if isinstance(trial, torch.optim.SparseAdam):
        gradient = gradient[:1].to_sparse(1).sparse_resize_(gradient.shape, 1, gradient.dim() - 1)
    tensor.grad = gradient
    unhooked(type(trial).step)(trial)  # past hooks of all optimizers


@contextmanager
def _untouched(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[None]:
    """Inside, a step of a copy that still reaches the parameters finds no gradients there."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    before = [parameter._version for parameter in parameters], len(optimizer.state)
    rng = capture_rng(device)
    try:
        for parameter in parameters:
            parameter.grad = None
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        restore_rng(rng, device)
        if ([parameter._version for parameter in parameters], len(optimizer.state)) != before:
            raise UnsupportedEngineError(
                f"a step of a copy of {type(optimizer).__name__} changed the parameters of the job: it reaches them "
                "past its parameter groups, where CPSR cannot follow. Nothing was saved; use another optimizer"
            )


def _like(master: torch.Tensor, *, whole: bool) -> torch.Tensor:
    if whole:
        tensor = torch.ones_like(master, requires_grad=False)
    else:
        size = min(master.numel(), FLAT_ELEMENTS_MAX)
        tensor = torch.ones(size, dtype=master.dtype, device=master.device)
    moves = master.requires_grad
    like = torch.nn.Parameter(tensor, moves) if isinstance(master, torch.nn.Parameter) else tensor.requires_grad_(moves)
    vars(like).update(vars(master))  # marks that people put on parameters for their optimizer
    return like


def _copy_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer with the same settings, no state and no hooks, for this group."""
    kind = type(optimizer)
    if hasattr(kind, "__del__"):  # it may give back what the optimizer still needs
        kind = type(kind.__name__, (kind,), {"__del__": lambda self: None})
    trial: torch.optim.Optimizer = object.__new__(kind)
    own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups", "step")}
    vars(trial).update({name: OrderedDict() if name.endswith("_hooks") else _apart(one) for name, one in own.items()})
    vars(trial).update(state=defaultdict(dict), param_groups=[group])
    vars(trial)[_TRIAL] = True
    if callable(getattr(trial, "train", None)):  # as those have that train on other weights than they evaluate
        trial.train()  # type: ignore[attr-defined]
    return trial


def _apart(value: Any) -> Any:
    """A copy of containers and of small tensors; everything else is shared with the original."""
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return value.detach().clone() if value.nbytes <= OWN_BYTES_MAX else value
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, one in value.items():
            copied[key] = _apart(one)
        return copied
    if type(value) in (list, tuple, set, deque):
        return type(value)(map(_apart, value))
    return value


def _leaves_of(name: str, entry: Any, tensor: torch.Tensor, master: torch.Tensor) -> dict[str, Leaf]:
    leaves = {}
    for path, found in StateEntry(entry, tensor.device, name).tensors.items():
        if is_distributed(found) and (found.shape != master.shape or layout_of(found) != layout_of(master)):
            raise UnsupportedEngineError(
                f"{name} keeps {path} of shape {tuple(found.shape)}, split as {layout_of(found)}, for a parameter of "
                f"shape {tuple(master.shape)}, split as {layout_of(master)}. CPSR restores state that is split as its "
                "parameter is; use an optimizer whose state is per element"
            )
        held, per_element = local(found), found.shape == tensor.shape
        split = is_distributed(found)
        leaves[path] = Leaf(tuple(held.shape), held.stride(), found.dtype, found.device, per_element, split)
    return leaves
