"""What one rank owns of the training state, by operator name.

An *operator* is one named parameter tensor of the model. A rank owns one contiguous range of the flattened tensor
(all of it without ZeRO, a slice with it). Everything here is a **view**: no byte is copied by building a `Shard`,
and writing into the views writes into the engine.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

__all__ = ["OperatorState", "ParamSlice", "Shard"]


@dataclass(frozen=True)
class ParamSlice:
    """The range of one parameter that this rank owns.

    Attributes:
        values: 1-D view of the authoritative weights, `(numel,)`: the fp32 master copy where the engine keeps one,
            else the parameter itself in its own dtype.
        global_shape: shape of the whole parameter, before it was split over ranks.
        offset: index of `values[0]` in the flattened whole parameter.
    """

    values: torch.Tensor
    global_shape: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        """Elements that this rank owns."""
        return self.values.numel()


@dataclass(frozen=True)
class OperatorState:
    """One operator as this rank holds it.

    Attributes:
        name: the parameter's name in the model (`transformer.h.0.attn.weight`).
        parameter: the owned slice of the weights.
        moments: the optimizer's tensors for that slice by the optimizer's own key (`exp_avg`, `exp_avg_sq`,
            `momentum_buffer`), each a 1-D view of `parameter.numel` elements.
        iteration: the iteration at which these values were taken. The operators of one shard may differ
            (sparse expert snapshots).
    """

    name: str
    parameter: ParamSlice
    moments: dict[str, torch.Tensor]
    iteration: int


@dataclass(frozen=True)
class Shard:
    """Everything that one rank must save to come back.

    Attributes:
        operators: what the optimizer moves; this is what can be predicted.
        others: buffers and parameters outside the optimizer, whole and of any dtype; copied, never predicted.
    """

    operators: dict[str, OperatorState]
    others: dict[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor with its key on disk.

        Keys: `param/<operator>`, `moment/<moment>/<operator>`, `other/<name>`.
        """
        for name, operator in self.operators.items():
            yield f"param/{name}", operator.parameter.values
            for moment, values in operator.moments.items():
                yield f"moment/{moment}/{name}", values
        for name, values in self.others.items():
            yield f"other/{name}", values

    @property
    def state_bytes(self) -> int:
        """Bytes of all tensors together, on the engine's device."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors())
