"""What an optimizer will keep for a tensor: seen by letting a copy of it take a few steps on another tensor.

The buffers of snapshots are laid out before the first step, and no class is known here by name. Whatever the optimizer
then keeps otherwise has no place in these buffers, and is saved with the small state: nothing depends on the trial.
"""

import copy
import inspect
import itertools
import math
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from cpsr.engines.beta_powers import without_kernel
from cpsr.engines.sharded import is_distributed, layout_of, local
from cpsr.engines.state_tree import Form, StateTree
from cpsr.errors import UnsupportedEngineError
from cpsr.state.scalars import capture_rng, restore_rng

__all__ = ["Expected", "Leaf", "alike_in", "is_trial", "probe"]

STEPS = 3  # some create a part of their state in the second one; by the last two, counts are known
# No value that an optimizer starts its state from: a tensor with it is a copy of the weights.
WEIGHT, WEIGHT_TOLERANCE = 37.0, 10.0
GRADIENT = 1e-3
FLAT_ELEMENTS_MAX = 1 << 16  # of a flat tensor of many parameters, whose state is looked at element by element
_TRIAL = "_cpsr_trial"  # attribute of a copy
OWN_BYTES_MAX = 1 << 24  # of a tensor among the optimizer's attributes, to be copied for the probe


@dataclass(frozen=True)
class Leaf:
    """One tensor of the state.

    Attributes:
        shape, stride, dtype: of it; of one that is split over ranks, those of this rank's part.
        device: where it is.
        per_element: whether it has the shape of the tensor that it is for.
        split: whether it is split over ranks, as that tensor is.
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


@dataclass(frozen=True)
class Expected:
    """What an optimizer keeps for a tensor once it has taken some steps.

    Attributes:
        leaves: the tensors with dimensions, by path.
        form: of the whole (see `cpsr.engines.state_tree`); None where nothing is kept.
        counts: paths of the numbers that each step raises by one.
        group_counts: keys of the parameter group that each step raises by one.
        group_changes: keys of the parameter group that steps change at all.
        attributes: numbers among the optimizer's own attributes that steps change.
        attribute_counts: of these, what each step raises by one.
        obstacle: why the state at a later step cannot be predicted; None where it can.
    """

    leaves: dict[str, Leaf]
    form: Form | None
    counts: frozenset[str]
    group_counts: frozenset[str]
    group_changes: frozenset[str]
    attributes: frozenset[str]
    attribute_counts: frozenset[str]
    obstacle: str | None


def probe(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], master: torch.Tensor, *, whole: bool = True
) -> Expected:
    """Let a copy of the optimizer take a few steps on a tensor like `master`, and look at what it keeps.

    The optimizer, its parameters with their gradients, and all random states are as before. Takes the memory of one
    tensor, its gradient and its state.

    Args:
        optimizer: the one that updates `master`.
        group: the parameter group of `master`.
        master: only shape, type and place are looked at.
        whole: False for a flat tensor of many parameters: of its state only what is per element is looked at.

    Raises:
        UnsupportedEngineError: an optimizer that runs the module itself, wraps another one, or whose copy changed the
            parameters of the job; the message says which.
    """
    _require_probeable(optimizer)
    begun = optimizer.state.get(master, {})  # by a constructor, for what a step expects
    found = _probed(optimizer, group, master, begun, whole=whole)
    if master.dim():
        return found if not whole else _of_several(found, optimizer, group, master)
    # All that is kept for it is without dimensions, and looks like a count.
    vector = torch.nn.Parameter(master.detach().reshape(1))
    again = _probed(optimizer, group, vector, _with_dimensions(begun, found.counts), whole=whole)
    return replace(found, counts=again.counts, obstacle=again.obstacle)


def _with_dimensions(begun: Any, counts: Collection[str]) -> Any:
    """The state of a tensor without dimensions as that of a vector of one element."""
    if not isinstance(begun, dict):
        return begun
    return {
        key: one.reshape(1) if isinstance(one, torch.Tensor) and not one.dim() and str(key) not in counts else one
        for key, one in begun.items()
    }


def _probed(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    master: torch.Tensor,
    begun: Any,
    *,
    whole: bool,
    count: int = 1,
) -> Expected:
    name = type(optimizer).__name__
    problems: list[str] = []
    for sparse, state in ((False, None), (True, None), (False, begun)):
        with _untouched(optimizer, master.device):
            try:
                return _stepped(optimizer, group, master, whole=whole, sparse=sparse, state=state, count=count)
            except UnsupportedEngineError:
                raise
            except Exception as error:  # noqa: BLE001 - any: it is another package's code
                problems.append(f"{type(error).__name__}: {error}")
    attributes = frozenset(key for key, value in vars(optimizer).items() if type(value) in (int, float))
    none = frozenset[str]()
    obstacle = f"a trial step of {name} failed ({problems[0]}), so that CPSR does not know which of its numbers count"
    return Expected({}, None, none, none, none, attributes, none, obstacle)


def alike_in(group: dict[str, Any], master: torch.Tensor) -> list[torch.Tensor]:
    """The parameters of a group with this shape and type; of a flat tensor, which may be outside of it, itself."""
    found = [one for one in group["params"] if (one.shape, one.dtype) == (master.shape, master.dtype)]
    return found if any(one is master for one in found) else [master]


def _of_several(
    found: Expected, optimizer: torch.optim.Optimizer, group: dict[str, Any], master: torch.Tensor
) -> Expected:
    """The same for an optimizer that keeps the state of several parameters at the first of them, stacked."""
    together = alike_in(group, master)
    if len(together) == 1 or all(leaf.per_element or leaf.split for leaf in found.leaves.values()):
        return found
    of_two = _probed(optimizer, group, master, optimizer.state.get(master, {}), whole=True, count=2)
    if _sizes(of_two) == _sizes(found):
        return found
    obstacle = f"{type(optimizer).__name__} keeps one state for several parameters"
    if together[0] is not master or _sizes(of_two).keys() != _sizes(found).keys():
        return replace(of_two, leaves={}, obstacle=obstacle)
    leaves = {}
    for path, leaf in of_two.leaves.items():
        # What a second parameter has added to each dimension, every further one adds, too.
        pairs = zip(found.leaves[path].shape, leaf.shape, strict=True)
        shape = tuple(one + (two - one) * (len(together) - 1) for one, two in pairs)
        leaves[path] = replace(leaf, shape=shape, stride=torch.empty(shape, device="meta").stride())
    return replace(of_two, leaves=leaves, obstacle=obstacle)


def _sizes(expected: Expected) -> dict[tuple[str, int], tuple[int, ...]]:
    """By path and number of dimensions."""
    return {(path, len(leaf.shape)): leaf.shape for path, leaf in expected.leaves.items()}


def _require_probeable(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer)
    taken = list(inspect.signature(kind.step).parameters.values())[1:]
    named = (one for one in taken if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))
    if needed := [one.name for one in named if one.default is one.empty]:
        raise UnsupportedEngineError(
            f"{kind.__name__}.step needs {', '.join(needed)}: it runs the module many times in one step, which CPSR "
            "cannot follow; use an optimizer that steps once per backward"
        )
    held = [name for name, value in vars(optimizer).items() if _holds_optimizer(value)]
    if held or vars(optimizer).get("param_groups") is not optimizer.param_groups:
        raise UnsupportedEngineError(
            f"{kind.__name__} wraps another optimizer ({', '.join(held) or 'in its param_groups'}), of which CPSR "
            "cannot step a copy to see its state; give CPSR the optimizer inside"
        )


def _holds_optimizer(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(one, torch.optim.Optimizer) for one in inside)


@contextmanager
def _untouched(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[None]:
    """Inside, a step of a copy that still reaches the parameters finds no gradients there.

    Raises:
        UnsupportedEngineError: the parameters or the state were changed nevertheless.
    """
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


def _stepped(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    master: torch.Tensor,
    *,
    whole: bool,
    sparse: bool,
    state: Any,
    count: int,
) -> Expected:
    tensors = [_like(master, whole=whole) for _ in range(count)]
    tensor = tensors[0]
    trial = _copy_of(optimizer, {**{key: _apart(value) for key, value in group.items()}, "params": tensors})
    if state is not None:
        trial.state[tensor] = copy.deepcopy(state)
    step: Any = type(optimizer).step
    step = (
        getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    )  # past hooks of all optimizers
    seen = [_Seen(trial, tensor)]
    for _ in range(STEPS):
        for one in tensors:
            one.grad = _gradient(one, sparse=sparse)
        step(trial)
        seen.append(_Seen(trial, tensor))
    return _expected(type(optimizer).__name__, seen, master, tensor, whole=whole)


def _like(master: torch.Tensor, *, whole: bool) -> torch.Tensor:
    if whole:
        tensor = torch.full_like(master, WEIGHT, requires_grad=False)
    else:
        size = min(master.numel(), FLAT_ELEMENTS_MAX)
        tensor = torch.full((size,), WEIGHT, dtype=master.dtype, device=master.device)
    moves = master.requires_grad
    like = torch.nn.Parameter(tensor, moves) if isinstance(master, torch.nn.Parameter) else tensor.requires_grad_(moves)
    vars(like).update(vars(master))  # marks that people put on parameters for their optimizer
    return like


def _gradient(tensor: torch.Tensor, *, sparse: bool) -> torch.Tensor:
    if not sparse:
        return torch.full_like(tensor, GRADIENT, requires_grad=False)
    first = torch.zeros((1, 1), dtype=torch.int64, device=tensor.device)
    row = torch.full((1, *tensor.shape[1:]), GRADIENT, dtype=tensor.dtype, device=tensor.device)
    return torch.sparse_coo_tensor(first, row, tensor.shape, is_coalesced=True)


def _copy_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer with the same settings, no state and no hooks, for this group."""
    kind = type(optimizer)
    if hasattr(kind, "__del__"):  # it may give back what the optimizer still needs
        kind = type(kind.__name__, (kind,), {"__del__": lambda self: None})
    trial: torch.optim.Optimizer = object.__new__(kind)
    own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups", "step")}
    vars(trial).update({name: OrderedDict() if name.endswith("_hooks") else _apart(one) for name, one in own.items()})
    vars(trial).update(state=defaultdict(dict), param_groups=[group], **without_kernel(optimizer))
    vars(trial)[_TRIAL] = True
    if callable(getattr(trial, "train", None)):  # as those have that train on other weights than they evaluate
        trial.train()  # type: ignore[attr-defined]
    return trial


def is_trial(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is a copy that CPSR lets step on a tensor of its own."""
    return _TRIAL in vars(optimizer)


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


class _Seen:
    """State, parameter group and attributes of the copy after a step."""

    def __init__(self, trial: torch.optim.Optimizer, tensor: torch.Tensor) -> None:
        self.tree = StateTree(trial.state.get(tensor), tensor.device, type(trial).__name__)
        self.numbers = self.tree.numbers() or {}
        self.group = _numbers_of(trial.param_groups[0])
        self.attributes = {key: value for key, value in vars(trial).items() if type(value) in (int, float)}

    def layout(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {path: (one.shape, one.dtype) for path, one in self.tree.tensors.items()}


def _numbers_of(values: dict[str, Any]) -> dict[str, float]:
    found = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
            found[key] = value.item()
        elif type(value) in (int, float):
            found[key] = value
    return found


def _expected(name: str, seen: list[_Seen], master: torch.Tensor, tensor: torch.Tensor, *, whole: bool) -> Expected:
    before, last = seen[-2], seen[-1]
    settled = dict(before.layout().items() & last.layout().items())  # what changes its shape has no place
    lasting = {path: found for path, found in last.tree.tensors.items() if path in settled}
    for path, found in lasting.items():
        _require_split_alike(name, path, found, tensor)
    leaves = {path: _leaf_of(found, tensor.shape) for path, found in lasting.items()}
    if not whole:
        shape, stride = tuple(master.shape), master.stride()
        leaves = {path: replace(one, shape=shape, stride=stride) for path, one in leaves.items() if one.per_element}
    counts, group_counts = _counts(before.numbers, last.numbers), _counts(before.group, last.group)
    attribute_counts = _counts(before.attributes, last.attributes)
    return Expected(
        leaves,
        last.tree.form,
        counts,
        group_counts,
        _changed([one.group for one in seen]),
        _changed([one.attributes for one in seen]),
        attribute_counts,
        _obstacle(name, seen, tensor, counts | group_counts | attribute_counts),
    )


def _require_split_alike(name: str, path: str, found: torch.Tensor, tensor: torch.Tensor) -> None:
    if is_distributed(found) and (found.shape != tensor.shape or layout_of(found) != layout_of(tensor)):
        raise UnsupportedEngineError(
            f"{name} keeps {path} of shape {tuple(found.shape)}, split as {layout_of(found)}, for a parameter of shape "
            f"{tuple(tensor.shape)}, split as {layout_of(tensor)}. CPSR restores state that is split as its parameter "
            "is; use an optimizer whose state is per element"
        )


def _leaf_of(found: torch.Tensor, shape: torch.Size) -> Leaf:
    """The description of a tensor that is kept for one of this shape."""
    held = local(found)
    per_element = found.shape == shape
    return Leaf(tuple(held.shape), held.stride(), found.dtype, found.device, per_element, is_distributed(found))


def _changed(seen: list[dict[str, Any]]) -> frozenset[str]:
    """What a step changes; what it adds, and leaves as it is from then on, is a setting."""
    pairs = itertools.pairwise(seen)
    return frozenset(key for before, after in pairs for key in before if before[key] != after.get(key))


def _counts(before: dict[str, Any], after: dict[str, Any]) -> frozenset[str]:
    return frozenset(key for key, value in after.items() if key in before and value == before[key] + 1)


def _obstacle(name: str, seen: list[_Seen], tensor: torch.Tensor, counts: frozenset[str]) -> str | None:
    if not tensor.is_floating_point():
        return f"the weights are {tensor.dtype}, no floating-point numbers"
    before, last = seen[-2], seen[-1]
    if before.layout() != last.layout():
        return f"what {name} keeps for a tensor changes its shape from step to step"
    for old, new in ((before.numbers, last.numbers), (before.group, last.group), (before.attributes, last.attributes)):
        for key, value in new.items():
            if old.get(key) != value and key not in counts:
                return f"{name} keeps {key}, which its steps change by a rule of its own"
    for path, found in last.tree.tensors.items():
        if found.shape == tensor.shape and found.is_floating_point() and _is_weights(found):
            return f"{name} keeps other weights ({path}) beside those that are trained"
    return None


def _is_weights(found: torch.Tensor) -> bool:
    held = local(found)
    return bool(held.numel()) and bool(((held.float() - WEIGHT).abs() < WEIGHT_TOLERANCE).all())
