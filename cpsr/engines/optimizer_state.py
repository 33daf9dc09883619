"""The state of torch optimizers as a checkpoint holds it: tensors by path, numbers, and the form of the whole.

A fresh optimizer gets from this exactly the state that was saved: what it had not created yet stays absent.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from cpsr.engines.adam_kernels import is_fused_adam
from cpsr.engines.distributed_tensors import is_distributed, layout_of, local, split_as
from cpsr.engines.optimizer_entry import StateEntry, flat_view, load_outside, numbers_of, outside_state, tree_of
from cpsr.engines.optimizer_layout import Leaf, expected_leaves, require_one_step, unhooked
from cpsr.errors import UnsupportedEngineError
from cpsr.state.codec import encode
from cpsr.state.device_values import DeviceValues

__all__ = [
    "Known",
    "OptimizerState",
    "Updated",
    "group_sizes",
    "hyperparameters",
    "learning_rate",
    "load_hyperparameters",
    "optimizers_of",
    "second_moment_decay",
]

_ALL = slice(None)
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


@dataclass(frozen=True)
class Updated:
    """One tensor that an optimizer updates.

    Attributes:
        optimizer: torch's.
        group: the parameter group of `master`.
        master: the key into the optimizer's state.
        name: of the parameter; empty for a flat tensor of many.
    """

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    master: torch.Tensor
    name: str = ""

    @property
    def whole(self) -> bool:
        """Whether it is one parameter, so that all its state is that operator's."""
        return bool(self.name)

    @property
    def kind(self) -> str:
        """Name of the optimizer's class."""
        return type(self.optimizer).__name__

    def __str__(self) -> str:
        return self.name or f"a flat tensor of {self.master.numel()} elements"


class Known:
    """What is known of one tensor.

    Args:
        updated: the tensor.
        leaves: tensors of the state that have a place in the buffers of snapshots, by path.

    Attributes:
        updated, leaves: as given.
        state: its entry as last looked at.
        room: memory for state that is about to be restored, by path.
    """

    def __init__(self, updated: Updated, leaves: dict[str, Leaf]) -> None:
        self.updated, self.leaves = updated, leaves
        self.room: dict[str, torch.Tensor] = {}
        self._nothing: dict[str, torch.Tensor] = {}
        # By name of the operator: the entry and what else they were made of, the weights, and the state by path.
        self._views: dict[str, tuple[StateEntry | None, Any, torch.Tensor, dict[str, torch.Tensor]]] = {}
        self.look()

    def look(self) -> None:
        """Take the present state apart."""
        updated = self.updated
        self.state = StateEntry(updated.optimizer.state.get(updated.master), updated.master.device, updated.kind)

    def views(self, name: str, owned: slice, *, to_fill: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `OptimizerState.views`."""
        master, tensors = self.updated.master, self.state.tensors
        # An address is of the same memory as before: the views keep that from being freed and given to another tensor.
        addresses = [(local(one) if is_distributed(one) else one).data_ptr() for one in (master, *tensors.values())]
        made_of = addresses, tuple(master.shape), master.stride(), owned
        state, made_before, values, moments = self._views.get(name, (None, None, master, {}))
        if to_fill or state is not self.state or made_before != made_of:
            part = _ALL if self.updated.whole else owned
            found = self._placed(to_fill=to_fill).items()
            moments = {path: _flat(one, f"{path} of {name}")[part] for path, one in found}
            values = flat_view(master, name)[owned]
            if not to_fill:
                self._views[name] = self.state, made_of, values, moments
        return values, dict(moments)

    def _placed(self, *, to_fill: bool) -> dict[str, torch.Tensor]:
        """The tensors that snapshots have a place for, by path: the same ones at every call."""
        own, found = self.state.tensors, {}
        for path, leaf in self.leaves.items():
            if not (leaf.per_element or self.updated.whole):
                continue
            # What is not per element may be shared by tensors, and is written only where it was saved.
            if path in own and self.has_place(path) and not (to_fill and not leaf.per_element):
                found[path] = own[path]
            elif to_fill:
                found[path] = self.room_for(path)
            else:  # zeros of the tensor's size that take no memory
                zero = torch.zeros(1, dtype=leaf.dtype, device=leaf.device)
                found[path] = self._nothing.setdefault(path, zero.expand(math.prod(leaf.shape)))
        return found

    def has_place(self, path: str) -> bool:
        """Whether the buffers of snapshots have a place for the state's tensor at this path."""
        leaf, held = self.leaves.get(path), self.state.tensors[path]
        return leaf is not None and leaf.holds(held) and (leaf.per_element or self.updated.whole)

    def without_place(self) -> dict[str, Any]:
        """What goes with the small state: other tensors, `(numel,)` in the order of their memory, and trees.

        Raises:
            UnsupportedEngineError: one is no block of memory; the message names it.
        """
        others = [(path, tensor) for path, tensor in self.state.tensors.items() if not self.has_place(path)]
        found: dict[str, Any] = {path: flat_view(one, f"{path} of {self.updated}") for path, one in others}
        device = self.updated.master.device
        return found | {path: tree_of(one, device) for path, one in self.state.trees.items()}

    def room_for(self, path: str) -> torch.Tensor:
        """Zeros to be overwritten, which then become the state."""
        if path not in self.room:
            leaf = self.leaves[path]
            room = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=leaf.device).zero_()
            self.room[path] = split_as(self.updated.master, room) if leaf.split else room
        return self.room[path]


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
        self._described: _Described | None = None
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
        described = self._described
        if described is None or not described.holds(every):
            described = self._described = _Described([self.known(updated) for updated in every])
        numbers = described.numbers(on_device=on_device)
        if numbers is None:  # one was replaced by another type
            for updated in every:
                self.known(updated).look()
            described = self._described = _Described([self.known(updated) for updated in every])
            numbers = described.numbers(on_device=on_device)
        device, optimizers = every[0].master.device, optimizers_of(every)
        outside = [outside_state(one, self._changed(one), device) for one in optimizers]
        beside = {"rest": described.rest(), "strides": _strides(every), "outside": outside}
        return {"optimizer_steps": numbers, "optimizer_state": described.form | beside}

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


class _Described:
    """The small state of all that is updated: its form, made once, and the numbers, read each time.

    Args:
        found: what is known of each tensor, in order.

    Attributes:
        form: everything but the numbers.
    """

    def __init__(self, found: Sequence[Known]) -> None:
        every = [known.updated for known in found]
        self._masters, self._groups = [one.master for one in every], [one.group for one in every]
        self._states = [known.state for known in found]
        self._with_rest = [(str(index), known) for index, known in enumerate(found) if known.without_place()]
        optimizers, forms = optimizers_of(every), dict[str, int]()
        places = [forms.setdefault(state.key, len(forms)) for state in self._states]
        self.form = {
            "forms": list(forms),
            "of": places,
            "names": [one.name for one in every],
            "classes": [type(one).__name__ for one in optimizers],
            "groups": [group_sizes(every, one) for one in optimizers],
        }

    def holds(self, every: Sequence[Updated]) -> bool:
        """Whether it is of the present state, but for the numbers."""
        if len(every) != len(self._masters):
            return False
        entries = [one.optimizer.state.get(one.master) for one in every]
        return (
            all(map(is_, [one.master for one in every], self._masters))
            and all(map(is_, [one.group for one in every], self._groups))
            and all(map(is_, entries, [state.entry for state in self._states]))
            and all(state.same() for state in self._states)
        )

    def rest(self) -> dict[str, dict[str, Any]]:
        """State without a place in the buffers, by the number of the tensor and the path."""
        return {index: known.without_place() for index, known in self._with_rest}

    def numbers(self, *, on_device: bool) -> list[dict[str, Any]] | None:
        """Of each tensor; None where one has another type than it had."""
        found: list[dict[str, Any]] = []
        kinds: tuple[Any, ...] | None = None
        for state in self._states:
            numbers = state.numbers(on_device=on_device)
            if numbers is None:
                return None
            # One object for what is alike, as step counts are: it is then encoded once. Zeros may differ in their sign.
            if kinds == state.kinds and numbers == found[-1] and 0.0 not in numbers.values():
                numbers = found[-1]
            found.append(numbers)
            kinds = state.kinds
        return found


def optimizers_of(every: Sequence[Updated]) -> list[torch.optim.Optimizer]:
    """The optimizers, each once, in their order."""
    return list({id(one.optimizer): one.optimizer for one in every}.values())


def group_sizes(every: Sequence[Updated], optimizer: torch.optim.Optimizer) -> list[int]:
    """How many tensors are updated in each of the optimizer's groups; engines may keep the groups empty."""
    counts = Counter(id(one.group) for one in every)
    return [counts[id(group)] for group in optimizer.param_groups]


def _flat(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`flat_view`, also of what stands for a tensor that is still absent."""
    return tensor if tensor.dim() == 1 and tensor.stride() == (0,) else flat_view(tensor, name)


def _strides(every: Sequence[Updated]) -> dict[str, list[int]]:
    """Of parameters whose memory is not in the order of their elements; some optimizers change that."""
    whole = ((index, one.master) for index, one in enumerate(every) if one.whole and not one.master.is_contiguous())
    return {str(index): list(master.stride()) for index, master in whole}


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
    encode(groups, f"optimizer({type(optimizer).__name__}).param_groups", DeviceValues())  # waits for no device
    return [
        {key: value.detach().clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        for group in groups
    ]


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
    rates = []
    for one in optimizers:
        for group in one.param_groups:
            if (rate := group.get("lr")) is not None:
                rates.append(float(rate))
    return rates[0] if len(rates) == 1 else math.fsum(rates) / max(1, len(rates))
