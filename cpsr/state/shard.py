"""The part of the training state that one rank owns, by operator name.

An *operator* is one named parameter tensor of the model. A rank owns one contiguous range of the flattened tensor
(all of it without ZeRO, a slice with it), or one block of it (tensor parallelism). Everything here is a **view**: no
byte is copied by building a `Shard`, and writing into the views writes into the engine.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

__all__ = ["PRESENT", "OperatorState", "ParamSlice", "Shard", "integers_of"]

PRESENT = -1  # the iteration of an engine's views: they show whichever state it has

SAMPLED_MOMENTS = 1 << 20
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # NumPy has no bfloat16


@dataclass(frozen=True)
class ParamSlice:
    """The range of one parameter that this rank owns.

    Attributes:
        values: 1-D view of the authoritative weights, `(numel,)`: the fp32 master copy if the engine keeps one,
            else the parameter itself in its own dtype.
        global_shape: shape of the whole parameter, before it was split over ranks.
        offset: index of `values[0]` in the flattened whole parameter.
        block: shape of what this rank owns, where that is a block of the whole parameter which is no range of it, as
            columns are; `values` has it row by row. None: it is a range.
    """

    values: torch.Tensor
    global_shape: tuple[int, ...]
    offset: int = 0
    block: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Elements that this rank owns."""
        return self.values.numel()


@dataclass(frozen=True)
class OperatorState:
    """This rank's part of one operator.

    Attributes:
        name: the parameter's name in the model (`transformer.h.0.attn.weight`).
        parameter: the owned slice of the weights.
        moments: the optimizer's tensors for that slice by the optimizer's own key (`exp_avg`, `exp_avg_sq`,
            `momentum_buffer`; a path of keys where they lie deeper), each a 1-D view. Those of the parameter's shape
            have `parameter.numel` elements; others (by row, by block) only where this rank owns the whole parameter.
        iteration: the iteration at which these values were taken, or `PRESENT`. The operators of one shard may differ
            (sparse expert snapshots).
    """

    name: str
    parameter: ParamSlice
    moments: dict[str, torch.Tensor]
    iteration: int

    @property
    def state_bytes(self) -> int:
        """Bytes of weights and moments, on the engine's device."""
        return self.parameter.values.nbytes + sum(values.nbytes for values in self.moments.values())


@dataclass(frozen=True)
class Shard:
    """All tensors that one rank must save for a restart.

    Attributes:
        operators: the tensors that the optimizer updates, and that can be predicted.
        others: buffers, whole and of any dtype; copied, never predicted.
        frozen: parameters outside the optimizer, as the engine has them (`cpsr.state.frozen_parameters`); empty in a
            snapshot.
    """

    operators: dict[str, OperatorState]
    others: dict[str, torch.Tensor] = field(default_factory=dict)
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of a snapshot, which has no frozen ones, with its key on disk.

        Keys: `param/<operator>`, `moment/<moment>/<operator>`, `other/<name>`.
        """
        for name, operator in self.operators.items():
            yield f"param/{name}", operator.parameter.values
            for moment, values in operator.moments.items():
                yield f"moment/{moment}/{name}", values
        for name, values in self.others.items():
            yield f"other/{name}", values

    def all_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`tensors`, and those outside the optimizer as `frozen/<name>`."""
        yield from self.tensors()
        for name, values in self.frozen.items():
            yield f"frozen/{name}", values

    @property
    def parameters(self) -> int:
        """Weights that this rank owns."""
        return sum(operator.parameter.numel for operator in self.operators.values())

    def second_moments(self) -> torch.Tensor | None:
        """At most a million values of `exp_avg_sq`, evenly spread and always the same ones; None if there is none.

        They are for the mean, of which only changes matter. A pass over all would cost as much as hashing them.
        """
        stride = max(1, self.parameters // SAMPLED_MOMENTS)
        sampled = [
            operator.moments["exp_avg_sq"][::stride].float()  # nothing joins float8 with other types
            for operator in self.operators.values()
            if "exp_avg_sq" in operator.moments
        ]
        return torch.cat(sampled) if any(map(len, sampled)) else None

    @property
    def state_bytes(self) -> int:
        """Bytes of all tensors of a snapshot together, on the engine's device."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors())


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor with any strides as a flat uint8 tensor; a view where they lie one behind another."""
    flat = values.detach().reshape(-1).contiguous()
    if flat.stride() != (1,):  # one element that was expanded
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def integers_of(values: torch.Tensor) -> torch.Tensor:
    """The elements of a flat tensor as integers of the same size; a view."""
    if values.is_complex():
        values = torch.view_as_real(values).reshape(-1)
    return values.detach().view(_INTEGERS[values.element_size()])
