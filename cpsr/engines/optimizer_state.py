"""The state of torch optimizers as a checkpoint holds it: tensors by path, numbers, and the form of the whole.

A fresh optimizer gets from this exactly the state that was saved: what it had not created yet stays absent.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from cpsr.engines.adam_kernels import is_fused_adam
from cpsr.engines.distributed_tensors import is_distributed, layout_of, local
from cpsr.engines.optimizer_entry import load_outside, numbers_of, outside_state
from cpsr.engines.optimizer_layout import Leaf, expected_leaves, numbers_of_gradients, require_one_step, unhooked
from cpsr.engines.state_layout import StateLayout
from cpsr.engines.updated_tensor import Known, Updated, optimizers_of
from cpsr.errors import UnsupportedEngineError
from cpsr.state.codec import encode
from cpsr.state.device_values import DeviceValues

__all__ = [
    "OptimizerState",
    "hyperparameters",
    "learning_rate",
    "learning_rates",
    "load_hyperparameters",
    "mean_rate",
    "second_moment_decay",
]

_ALL = slice(None)
_PLAIN = frozenset({bool, int, float, str, type(None)})
STEP = "step"  # what the optimizers below call the count of their steps

# Optimizers of which a later state is known, by package: beside weights, only counts called `step` change in a way
# that matters. Others keep numbers that steps change by a rule of their own (ASGD, NAdam), other weights beside those
# that are trained (schedule-free), or were not tried.
PREDICTED = {
    "torch": (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "Muon"),
        *("RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
    ),
    "deepspeed": ("FusedAdam", "DeepSpeedCPUAdam"),
    "bitsandbytes": ("Adam8bit", "AdamW8bit", "Lion8bit"),
    "lion_pytorch": ("Lion",),
}


class OptimizerState:
    """What the optimizers of one job keep for the tensors that they update.

    Args:
        optimizers: as the script has built them. Numbers among their attributes that differ later are a part of their
            state.

    Raises:
        UnsupportedEngineError: see `require_one_step`.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for one in optimizers:
            require_one_step(one)
        self._built = {id(one): numbers_of(vars(one)) for one in optimizers}
        self._known: dict[int, Known] = {}  # by the id of the tensor
        self._layout: StateLayout | None = None
        self._rests = self._compared = False
        self._leaves: dict[tuple[Any, ...], tuple[dict[str, Any], dict[str, Leaf]]] = {}

    def views(
        self, name: str, updated: Updated, owned: slice = _ALL, *, to_fill: bool = False
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Weights and optimizer state of one operator, made anew only where a tensor was replaced.

        Making them takes tens of microseconds for each operator, on the training thread at every snapshot; to see that
        they still are the engine's tensors takes a few.

        State that the optimizer does not have, or has in another layout, is zeros that take no memory and cannot be
        written. State that snapshots have no place for is in `scalars`.

        Args:
            name: of the operator.
            updated: the tensor that the optimizer updates.
            owned: the operator's elements in that tensor, flattened, where it is of several operators. Of its state
                there is then what is per element.
            to_fill: memory of its own for absent state: loading makes it the optimizer's, where it was saved. Such
                views are made anew each time.

        Returns:
            1-D views into the engine's tensors: the weights `(numel,)`, and the state by path, in the order of its own
            memory.

        Raises:
            UnsupportedEngineError: state that is not plain data, or a tensor without a flat view; the message names it.
        """
        return self.known(updated).views(name, owned, to_fill=to_fill)

    def scalars(self, every: Sequence[Updated], *, on_device: bool = False) -> dict[str, Any]:
        """Everything beside these tensors, as plain data.

        Args:
            every: all that is updated, in a fixed order.
            on_device: leave numbers of a CUDA device there, as `DeviceNumber`s.
        """
        layout = self.layout(every)
        device, optimizers = every[0].master.device, optimizers_of(every)
        outside = [outside_state(one, self._changed(one), device, layout.entries_of(one)) for one in optimizers]
        beside = {"rest": layout.rest(), "outside": outside}
        return {"optimizer_steps": layout.numbers(on_device=on_device), "optimizer_state": layout.form | beside}

    def layout(self, every: Sequence[Updated]) -> StateLayout:
        """What stays the same of all that is updated: the same object until something has not."""
        if self._layout is None or not (self._compared or self._layout.holds(every)):
            self._layout = StateLayout(every, [self.known(updated) for updated in every])
        self._compared = self._rests
        return self._layout

    def rest(self, rests: bool) -> None:
        """Until the next call nobody changes what the optimizers keep, so that it is compared once; or somebody may."""
        self._rests, self._compared = rests, False

    def load_outside(self, every: Sequence[Updated], saved: dict[str, Any]) -> None:
        """Put back what optimizers keep beside their state for tensors; and forget memory that was not used."""
        for known in self._known.values():
            known.room.clear()
        for optimizer, outside in zip(optimizers_of(every), saved["outside"], strict=True):
            for key, value in self._built[id(optimizer)].items():
                setattr(optimizer, key, value)
            load_outside(optimizer, outside, every[0].master.device)

    def advance(self, every: Sequence[Updated], iterations: int) -> None:
        """Add to every step count what `iterations` steps add.

        A tensor that has never been updated stays at zero while others moved, and one without state stays without.
        """
        states = [(updated, self.known(updated).state) for updated in every]
        moved = any(state.scalar(STEP) for _, state in states)
        rises = {key: rise for one in optimizers_of(every) for key, rise in _rises(one).items()}
        for updated, state in states:
            count = state.scalar(STEP)
            if count is not None and (float(count) or not moved):
                value = count.item() if isinstance(count, torch.Tensor) else count
                state.set_number(STEP, value + iterations * rises.get(id(updated.master), 1))

    def obstacle(self, every: Sequence[Updated]) -> str | None:
        """Why no step ahead can be predicted; None where weights and step counts are all that moves."""
        for one in every:
            if one.group.get("lr") is None:
                return f"{one.kind} has no learning rate (lr) in its parameter groups"
            if not one.master.is_floating_point():
                return f"the weights are {one.master.dtype}, no floating-point numbers"
        unknown = (type(one).__name__ for one in optimizers_of(every) if not _is_predicted(type(one)))
        return next((f"what steps of {name} change beside the weights is not known" for name in unknown), None)

    def replay_obstacle(self, every: Sequence[Updated]) -> str | None:
        """Why windows of snapshots cannot hold the state; None where they can.

        They hold tensors at one iteration for each operator, and numbers at the first of the window alone. Repeated
        steps count on from these; a number that follows from gradients would be of other gradients.
        """
        first = {id(one.optimizer): one for one in reversed(every)}
        for one in first.values():
            if paths := numbers_of_gradients(one.optimizer, one.group, one.master, whole=one.whole):
                return f"{one.kind} keeps {paths[0]} for each tensor, a number that follows from its gradients"
        return None

    def known(self, updated: Updated) -> Known:
        """What is known of a tensor, with its state as it is now."""
        known = self._known.get(id(updated.master))
        entry = updated.optimizer.state.get(updated.master)
        if known is None or known.updated.master is not updated.master or known.updated.name != updated.name:
            known = self._known[id(updated.master)] = Known(updated, self._leaves_for(updated))
            return known
        known.updated = updated  # its group is another one after a `load_state_dict`
        if known.state.entry is not entry or not known.state.same():
            known.look()
        return known

    def _changed(self, optimizer: torch.optim.Optimizer) -> set[str]:
        """Names of numbers among an optimizer's attributes that are not as the script built them."""
        built = self._built[id(optimizer)]
        return {key for key, value in numbers_of(vars(optimizer)).items() if built.get(key) != value}

    def _leaves_for(self, updated: Updated) -> dict[str, Leaf]:
        master, optimizer = updated.master, updated.optimizer
        split = (tuple(local(master).shape), layout_of(master)) if is_distributed(master) else ()
        alike = tuple(master.shape), master.stride(), master.dtype, master.device, master.requires_grad, split
        key = (id(optimizer), id(updated.group), updated.whole, type(master), *alike)
        if key not in self._leaves:  # the group is kept, so that its id is of no other
            found = expected_leaves(optimizer, updated.group, master, whole=updated.whole)
            self._leaves[key] = updated.group, found
        return self._leaves[key][1]


def _is_predicted(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether a class is one of `PREDICTED`, or is derived from one and steps as that does."""
    for base in kind.__mro__:
        if base.__name__ in PREDICTED.get(base.__module__.partition(".")[0], ()):
            return unhooked(kind.step) is unhooked(base.step)  # type: ignore[attr-defined]
    return False


def _rises(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """By how much a step raises the count of each parameter, by the parameter's id, where that is not by one.

    FusedAdam keeps one count for a group, in the last parameter that has a gradient, and raises it once for every dtype
    in the group. Which parameters have gradients is seen from the counts so far: the largest one is the group's.
    """
    rises: dict[int, int] = {}
    for group in optimizer.param_groups if is_fused_adam(optimizer) else ():
        parameters = group["params"]  # none under ZeRO-3, which steps its masters one by one
        rises |= {id(parameter): 0 for parameter in parameters}
        if parameters:
            counting = max(
                reversed(parameters), key=lambda parameter: optimizer.state.get(parameter, {}).get("step", 0)
            )
            rises[id(counting)] = len({parameter.dtype for parameter in parameters})
    return rises


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Everything in the parameter groups but the parameters: learning rates, betas, what schedulers put there.

    Raises:
        UnsupportedEngineError: a value that is not plain data; the message names it.
    """
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    if not all(map(_is_plain, chain.from_iterable(map(dict.values, groups)))):
        encode(groups, f"optimizer({type(optimizer).__name__}).param_groups", DeviceValues())  # waits for no device
    return [
        {key: value.detach().clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        for group in groups
    ]


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and _PLAIN.issuperset(map(type, value)))


def load_hyperparameters(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    """Put `hyperparameters()` back.

    Raises:
        UnsupportedEngineError: another number of groups than were saved.
    """
    if len(saved) != len(optimizer.param_groups):
        raise UnsupportedEngineError(
            f"the saved optimizer has {len(saved)} parameter groups and this one {len(optimizer.param_groups)}; "
            "build the optimizer as it was"
        )
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        for key, value in values.items():
            current = group.get(key)
            if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                current.copy_(value)
            else:
                group[key] = value


def second_moment_decay(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """The second of the `betas` of the first group that has any; 0 where none has."""
    for group in (group for one in optimizers for group in one.param_groups):
        betas = group.get("betas", ())
        if isinstance(betas, tuple | list) and len(betas) > 1:
            return float(betas[1])
    return 0.0


def learning_rate(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """Mean learning rate over the parameter groups that have one; 0 where none has."""
    return mean_rate(learning_rates(optimizers))


def learning_rates(optimizers: Sequence[torch.optim.Optimizer]) -> list[float]:
    """The learning rates of the parameter groups that have one."""
    rates = []
    for one in optimizers:
        for group in one.param_groups:
            if (rate := group.get("lr")) is not None:
                rates.append(float(rate))
    return rates


def mean_rate(rates: Sequence[float]) -> float:
    """Their mean; 0 without any."""
    return rates[0] if len(rates) == 1 else math.fsum(rates) / max(1, len(rates))
