"""The state of torch optimizers as a checkpoint holds it: tensors by path, numbers, and the form of the whole.

A fresh optimizer gets from this exactly the state that was saved: what it had not created yet stays absent.
"""

import json
import math
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from cpsr.engines.beta_powers import advance_powers, is_fused_adam, restore_powers, saved_powers
from cpsr.engines.optimizer_probe import Expected, alike_in, probe
from cpsr.engines.outside_state import load_outside, outside_state
from cpsr.engines.restored_entry import (
    Known,
    RestoredEntry,
    Updated,
    earlier_form,
    group_sizes,
    optimizers_of,
    require_same_optimizers,
)
from cpsr.engines.sharded import is_distributed, layout_of, local
from cpsr.engines.state_tree import StateTree, StateTrees, flat_view
from cpsr.errors import UnsupportedEngineError
from cpsr.state.codec import encode
from cpsr.state.device_values import DeviceValues

__all__ = [
    "OptimizerState",
    "Updated",
    "hyperparameters",
    "learning_rate",
    "load_hyperparameters",
    "second_moment_decay",
]

FORM = 2  # of the small state; before, it held the numbers of Adam, AdamW and SGD alone


class OptimizerState:
    """What the optimizers of one job keep for the tensors that they update."""

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}  # by the id of the tensor
        self._described: _Described | None = None
        self._expected: dict[tuple[Any, ...], tuple[dict[str, Any], Expected]] = {}

    def tree(self, updated: Updated) -> StateTree:
        """The state for one tensor as it is now, taken apart.

        Raises:
            UnsupportedEngineError: it holds what is not plain data, or cannot be known beforehand; the message says it.
        """
        return self._of(updated).tree

    def tensors(self, updated: Updated, *, to_fill: bool = False) -> dict[str, torch.Tensor]:
        """The tensors that snapshots have a place for, by path: the same ones at every call.

        Where the optimizer has none, or one of another layout, they are zeros that take no memory and cannot be
        written. Tensors without a place are in `scalars`.

        Args:
            updated: what they are for. For a flat tensor of many parameters, those that are per element.
            to_fill: memory of its own for absent ones: `load` makes it the optimizer's, where they were saved.
        """
        known = self._of(updated)
        own, found = known.tree.tensors, {}
        for path, leaf in known.expected.leaves.items():
            if not (leaf.per_element or updated.whole):
                continue
            # What is not per element may be shared by tensors, and is written only where it was saved.
            if path in own and known.has_place(path) and not (to_fill and not leaf.per_element):
                found[path] = own[path]
            else:
                found[path] = known.room_for(path, leaf) if to_fill else known.nothing_for(path, leaf)
        return found

    def numbers_kept(self, updated: Updated) -> set[str]:
        """Keys of the numbers that the optimizer will keep for a tensor, beside tensors of its shape.

        Raises:
            UnsupportedEngineError: its state is no mapping of such numbers and tensors.
        """
        form = self._of(updated).expected.form
        if form is None:
            return set()
        if form[0] != "dict" or any(one[0] not in ("tensor", "scalar", "int", "float") for _, one in form[2]):
            raise UnsupportedEngineError(f"{updated.kind} keeps nested state, which cannot be made of an import")
        return {str(key) for key, one in form[2] if one[0] != "tensor"}

    def scalars(self, every: Sequence[Updated], *, on_device: bool = False) -> dict[str, Any]:
        """Everything beside these tensors, as plain data.

        Args:
            every: all that is updated, in a fixed order.
            on_device: leave numbers of a CUDA device there, as `DeviceNumber`s.
        """
        described = self._described
        if described is None or not described.holds(every):
            described = self._described = _Described([self._of(updated) for updated in every])
        numbers = described.numbers(on_device=on_device)
        if numbers is None:  # one was replaced by another type
            described = self._described = _Described([self._look(updated) for updated in every])
            numbers = described.numbers(on_device=on_device)
        rest = {"strides": _strides(every), "beta_powers": saved_powers(optimizers_of(every))}
        return {"optimizer_steps": numbers, "optimizer_state": described.form() | rest}

    def load(self, every: Sequence[Updated], scalars: dict[str, Any]) -> None:
        """Give the optimizers the state that was saved; its tensors are in `tensors(..., to_fill=True)`.

        Also takes what earlier versions saved of Adam, AdamW and SGD.

        Raises:
            UnsupportedEngineError: of other optimizers, groups or parameters, or a tensor was not brought; the message
                names the first difference. Nothing was changed.
        """
        saved, counts = scalars.get("optimizer_state"), scalars["optimizer_steps"]
        if saved is not None and saved["form"] != FORM:
            raise UnsupportedEngineError(
                f"the optimizer's state was saved in form {saved['form']} by a newer version, this one reads {FORM}; "
                "restart with that version"
            )
        if saved is not None:
            require_same_optimizers(every, saved)
        if len(counts) != len(every):
            raise UnsupportedEngineError(
                f"the saved optimizer state covers {len(counts)} tensors and this optimizer updates {len(every)}; "
                "build the engine as it was"
            )
        made = []
        for index, updated in enumerate(every):
            known, numbers = self._of(updated), counts[index]
            form = earlier_form(known, numbers) if saved is None else json.loads(saved["forms"][saved["of"][index]])
            made.append(RestoredEntry(known, numbers, {} if saved is None else saved["rest"].get(str(index), {}), form))
        for index, one in enumerate(made):
            one.put()
            if saved is not None:
                _lay_out(every[index], saved["strides"].get(str(index)))
        for known in self._known.values():
            known.room.clear()
        if saved is not None:
            for optimizer, outside in zip(optimizers_of(every), saved["outside"], strict=True):
                load_outside(optimizer, outside, every[0].master.device)
        restore_powers(optimizers_of(every), None if saved is None else saved.get("beta_powers"))

    def advance(self, every: Sequence[Updated], iterations: int) -> None:
        """Add to every step count what `iterations` steps add.

        A tensor that has never been updated stays at zero while others moved, and one without state stays without.
        """
        found = [(updated, self._of(updated)) for updated in every]
        moved = any(known.tree.scalar(path) for _, known in found for path in known.expected.counts)
        rises = {key: rise for one in optimizers_of(every) for key, rise in _rises(one).items()}
        counted: list[tuple[torch.optim.Optimizer, Any, float, int]] = []
        for updated, known in found:
            for path in known.expected.counts:
                count = known.tree.scalar(path)
                if count is not None and (float(count) or not moved):
                    rise = rises.get(id(updated.master), 1)
                    value = count.item() if isinstance(count, torch.Tensor) else count
                    known.tree.set_number(path, value + iterations * rise)
                    counted.append((updated.optimizer, updated.group.get("betas"), value, rise))
        advance_powers(counted, iterations)
        for group, keys in {id(one.group): (one.group, known.expected.group_counts) for one, known in found}.values():
            for key in keys & group.keys():
                group[key] += iterations
        own = {
            (id(one.optimizer), key): one.optimizer for one, known in found for key in known.expected.attribute_counts
        }
        for (_, key), optimizer in own.items():
            setattr(optimizer, key, getattr(optimizer, key) + iterations)

    def obstacle(self, every: Sequence[Updated]) -> str | None:
        """Why no step ahead can be predicted; None where weights and step counts are all that moves."""
        if bare := next((one for one in every if one.group.get("lr") is None), None):
            return f"{bare.kind} has no learning rate (lr) in its parameter groups"
        return next((why for one in every if (why := self._of(one).expected.obstacle) is not None), None)

    def _of(self, updated: Updated) -> Known:
        known = self._known.get(id(updated.master))
        entry = updated.optimizer.state.get(updated.master)
        if known is None or known.updated.master is not updated.master or known.updated.name != updated.name:
            known = Known(updated, self._expect(updated))
            self._known[id(updated.master)] = known
            return known
        known.updated = updated  # its group is another one after a `load_state_dict`
        if known.tree.entry is not entry or not known.tree.same():
            known.look()
        return known

    def _look(self, updated: Updated) -> Known:
        known = self._of(updated)
        known.look()
        return known

    def _expect(self, updated: Updated) -> Expected:
        master, optimizer = updated.master, updated.optimizer
        split = (tuple(local(master).shape), layout_of(master)) if is_distributed(master) else ()
        alike = tuple(master.shape), master.stride(), master.dtype, master.device, master.requires_grad, split
        first = alike_in(updated.group, master)[0] is master  # the state of all of them may be kept for it
        key = (id(optimizer), id(updated.group), updated.whole, type(master), first, *alike)
        if key not in self._expected:  # the group is kept, so that its id is of no other
            self._expected[key] = updated.group, probe(optimizer, updated.group, master, whole=updated.whole)
        return self._expected[key][1]


def _strides(every: Sequence[Updated]) -> dict[str, list[int]]:
    """Of parameters whose memory is not in the order of their elements; some optimizers change that."""
    whole = ((index, one.master) for index, one in enumerate(every) if one.whole and not one.master.is_contiguous())
    return {str(index): list(master.stride()) for index, master in whole}


def _lay_out(updated: Updated, stride: list[int] | None) -> None:
    """Read the weights, which were restored in the order of their memory, in the order in which they were saved."""
    master = updated.master
    if not updated.whole or (stride is None and master.is_contiguous()) or list(master.stride()) == stride:
        return
    with torch.no_grad():
        order = torch.empty(master.shape, device="meta").stride() if stride is None else stride
        master.data = flat_view(master, updated.name).as_strided(master.shape, order)


class _Described:
    """The small state of all that is updated: its form, made once, and the numbers, read each time.

    Args:
        found: what is known of each tensor, in order.
    """

    def __init__(self, found: Sequence[Known]) -> None:
        every = [known.updated for known in found]
        self._masters, self._groups = [one.master for one in every], [one.group for one in every]
        self._trees = [known.tree for known in found]
        self._together = StateTrees(self._trees)
        self._optimizers = optimizers_of(every)
        self._attributes: list[set[str]] = [set() for _ in self._optimizers]
        changes = set[str]()
        for known in {id(known.expected): known for known in found}.values():
            place = next(i for i, one in enumerate(self._optimizers) if one is known.updated.optimizer)
            self._attributes[place] |= known.expected.attributes
            changes |= known.expected.group_changes
        forms: dict[str, int] = {}
        places = [forms.setdefault(tree.key, len(forms)) for tree in self._trees]
        self._form = {
            "form": FORM,
            "forms": list(forms),
            "of": places,
            "names": [one.name for one in every],
            "rest": {str(index): rest for index, known in enumerate(found) if (rest := known.without_place())},
            "classes": [type(one).__name__ for one in self._optimizers],
            "groups": [group_sizes(every, one) for one in self._optimizers],
            "changes": sorted(changes),
        }

    def holds(self, every: Sequence[Updated]) -> bool:
        """Whether it is of the present state, but for the numbers."""
        return (
            len(every) == len(self._masters)
            and all(map(is_, [one.master for one in every], self._masters))
            and all(map(is_, [one.group for one in every], self._groups))
            and self._together.same([one.optimizer.state.get(one.master) for one in every])
        )

    def numbers(self, *, on_device: bool) -> list[dict[str, Any]] | None:
        """Of each tensor; None where one has another type than it had."""
        found: list[dict[str, Any]] = []
        kinds: tuple[Any, ...] | None = None
        for tree in self._trees:
            numbers = tree.numbers(on_device=on_device)
            if numbers is None:
                return None
            # One object for what is alike, as step counts are: it is then encoded once. Zeros may differ in their sign.
            if kinds == tree.kinds and numbers == found[-1] and 0.0 not in numbers.values():
                numbers = found[-1]
            found.append(numbers)
            kinds = tree.kinds
        return found

    def form(self) -> dict[str, Any]:
        """Everything but the numbers."""
        device = self._masters[0].device
        owned = zip(self._optimizers, self._attributes, strict=True)
        return self._form | {"outside": [outside_state(one, own, device) for one, own in owned]}


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
    found = [group.get("lr") for one in optimizers for group in one.param_groups]
    rates = [float(rate) for rate in found if rate is not None]
    return rates[0] if len(rates) == 1 else math.fsum(rates) / max(1, len(rates))
