"""DeepSpeed's Muon with its auxiliary Adam: where ZeRO keeps the momentum of matrices, and who updates what.

ZeRO orthogonalizes gradients before the optimizer steps, so that its momentum is the wrapper's business. At ZeRO 3 and
0 it has the shape of what is updated. At ZeRO 1 and 2 a rank keeps that of every matrix that it updates a part of, and
all of each: other parts than its own are `spare`, and no operator's. Written against DeepSpeed 0.19.
"""

import itertools
import json
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from cpsr.engines.beta_powers import keeps_powers
from cpsr.engines.deepspeed_masters import MasterSlice, master_slices, torch_optimizer
from cpsr.errors import UnsupportedEngineError

__all__ = ["Muon", "muon_of"]

BUFFER = "momentum_buffer"
COMMITTING = ("_commit_muon_momentum", "_apply_muon_to_accumulated_grads")  # before torch's optimizer steps


def muon_of(engine: Any) -> "Muon | None":
    """What an engine trains with if that is DeepSpeed's Muon, else None.

    Raises:
        UnsupportedEngineError: with it something that keeps state out of sight; the message names it.
    """
    optimizer: Any = torch_optimizer(engine)
    # By name: importing it compiles its kernels.
    if (type(optimizer).__module__, type(optimizer).__name__) != (
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "MuonWithAuxAdam",
    ):
        return None
    if type(engine.optimizer) is BF16_Optimizer:
        raise UnsupportedEngineError(
            "Muon with bf16 and data_types.grad_accum_dtype fp32 at ZeRO 1 keeps its momentum in a wrapper that CPSR "
            "does not read; use ZeRO 2, or leave data_types out"
        )
    aux = optimizer.aux_optimizer
    if aux is not None and keeps_powers(aux):
        params = {**(engine.optimizer_params() or {}), "torch_adam": True}
        raise UnsupportedEngineError(
            f"without a GPU DeepSpeed gives Muon {type(aux).__name__} for what is no matrix, and that keeps state in "
            'its kernel which CPSR cannot restore bit for bit. Let it take torch\'s: add "torch_adam": true to its '
            f'params, so that the line is "optimizer": {json.dumps({"type": "Muon", "params": params}, default=str)}'
        )
    return Muon(engine.optimizer, optimizer)


@dataclass(frozen=True)
class _Layout:
    """The momentum of one flat tensor.

    Attributes:
        places: where that of each parameter begins, by the parameter's id.
        total: its elements.
        spare: ranges, as begin and end, of what is no operator's on this rank.
    """

    places: dict[int, int]
    total: int
    spare: list[tuple[int, int]]


class MuonMatrices(torch.optim.Optimizer):
    """Stands for the groups of matrices: it keeps a momentum of their shape."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as its own does without a closure
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault(BUFFER, torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                parameter.add_(momentum, alpha=-group["lr"])


class MuonPartitions(torch.optim.Optimizer):
    """Stands for the groups of matrices at ZeRO 1 and 2, whose momentum `Muon` handles: it keeps nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as its own does without a closure
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


class Muon:
    """Its two kinds of groups, each as one optimizer of which `OptimizerState` knows everything; and the momentum.

    Args:
        wrapper: of ZeRO.
        optimizer: DeepSpeed's MuonWithAuxAdam.
    """

    def __init__(self, wrapper: Any, optimizer: Any) -> None:
        self._wrapper, self._optimizer = wrapper, optimizer
        self._flat = type(wrapper) is DeepSpeedZeroOptimizer
        self._matrices: Any = object.__new__(MuonPartitions if self._flat else MuonMatrices)
        self._rest: Any = object.__new__(type(optimizer.aux_optimizer or optimizer))
        self._room: dict[int, torch.Tensor] = {}
        self._seen: list[torch.Tensor | None] | None = None
        self._layouts: dict[int, _Layout] = {}

    def optimizers(self) -> dict[int, torch.optim.Optimizer]:
        """By the id of each parameter group, the one that stands for it."""
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        of_matrices = [group for group in groups if group["use_muon"]]
        others = [group for group in groups if not group["use_muon"]]
        state = {} if self._flat else optimizer.state
        vars(self._matrices).update({**_parts(optimizer), "param_groups": of_matrices, "state": state})
        aux = optimizer.aux_optimizer or optimizer
        vars(self._rest).update({**vars(aux), "param_groups": others, "state": optimizer.state})
        return {id(group): self._matrices for group in of_matrices} | {id(group): self._rest for group in others}

    def committing(self) -> list[tuple[Any, str]]:
        """Object and name of what changes the momentum, some time before torch's optimizer steps."""
        return [(self._wrapper, name) for name in COMMITTING if hasattr(self._wrapper, name)]

    def obstacle(self) -> str | None:
        """Why no later state can be predicted; None where no matrix is split."""
        if not any(layout.spare for layout in self._layout().values()):
            return None
        return (
            "at ZeRO 1 and 2 several ranks keep the momentum of a matrix that is split, and beside the dump of one of "
            "them a predicted one would have another"
        )

    def moments(self, piece: MasterSlice, *, to_fill: bool) -> dict[str, torch.Tensor]:
        """The momentum of an operator's own elements where it is handled here: a view `(numel,)`.

        Args:
            piece: of a matrix or of anything else.
            to_fill: as of `EngineAdapter.shard`.
        """
        layout = self._layout().get(id(piece.master))
        if layout is None:
            return {}
        buffer = self._buffer(piece.master)
        if buffer is None and to_fill:
            buffer = self._room.setdefault(id(piece.master), self._zeros(piece, layout.total))
        if buffer is None:
            return {BUFFER: self._zeros(piece, 1).expand(piece.numel)}
        start = layout.places[id(piece.parameter)] + piece.offset
        return {BUFFER: buffer[start : start + piece.numel]}

    def look(self) -> bool:
        """The views that are made now are of the present buffers; returns whether earlier ones are of others."""
        same, self._seen = self.unchanged(), self._buffers()
        return not same

    def unchanged(self) -> bool:
        """Whether they still are."""
        now = self._buffers()
        return self._seen is not None and all(map(is_, now, self._seen))

    def state(self) -> list[dict[str, Any] | None]:
        """Of each flat tensor of matrices what is no operator's: parts of other ranks; None where nothing is kept."""
        found: list[dict[str, Any] | None] = []
        for master, layout in zip(self._masters(), self._layout().values(), strict=True):
            buffer = self._buffer(master)
            parts = [] if buffer is None else [buffer[start:stop] for start, stop in layout.spare]
            found.append(None if buffer is None else {"spare": torch.cat(parts) if parts else None})
        return found

    def load(self, saved: list[dict[str, Any] | None] | None) -> None:
        """Put `state()` back, after the views of `moments(..., to_fill=True)` were written; None: no momentum yet.

        Raises:
            UnsupportedEngineError: no such views were asked for, or of other matrices; nothing was changed.
        """
        masters = self._masters()
        given = [None] * len(masters) if saved is None else saved
        if len(given) != len(masters):
            raise UnsupportedEngineError(
                f"the saved run had {len(given)} groups of matrices for Muon and this one {len(masters)}; build the "
                "engine as it was"
            )
        buffers = [
            self._buffer(master) if self._buffer(master) is not None else self._room.get(id(master))
            for master in masters
        ]
        if any(one is not None and buffer is None for one, buffer in zip(given, buffers, strict=True)):
            raise UnsupportedEngineError(
                "Muon had a momentum when saved, and no memory was made for it before it was loaded "
                "(shard(to_fill=True)); the checkpoint is as it was"
            )
        for master, one, buffer in zip(masters, given, buffers, strict=True):
            self._optimizer.state.pop(master, None)
            if one is None or buffer is None:
                continue
            self._optimizer.state[master] = {BUFFER: buffer}
            begin = 0
            for start, stop in self._layout()[id(master)].spare:
                buffer[start:stop].copy_(one["spare"][begin : begin + stop - start])
                begin += stop - start
        self._room.clear()

    def _zeros(self, piece: MasterSlice, numel: int) -> torch.Tensor:
        """Of the dtype in which the gradients of matrices arrive."""
        wrapper = self._wrapper
        dtype = wrapper.gradient_accumulation_dtype if wrapper.use_grad_accum_attribute else piece.parameter.dtype
        return torch.zeros(numel, dtype=dtype, device=piece.master.device)

    def _buffer(self, master: torch.Tensor) -> torch.Tensor | None:
        found: torch.Tensor | None = self._optimizer.state.get(master, {}).get(BUFFER)
        return found

    def _masters(self) -> list[torch.Tensor]:
        """The flat tensors of matrices, of which this rank updates a part."""
        if not self._flat:
            return []
        wrapper = self._wrapper
        flats = zip(wrapper.single_partition_of_fp32_groups, self._optimizer.param_groups, strict=True)
        held = zip(flats, wrapper.params_in_partition, strict=True)
        return [flat for (flat, group), parameters in held if group["use_muon"] and parameters]

    def _buffers(self) -> list[torch.Tensor | None]:
        return [self._buffer(master) for master in self._masters()]

    def _layout(self) -> dict[int, _Layout]:
        """By the id of each flat tensor of matrices."""
        masters = self._masters()
        if self._layouts.keys() != {id(master) for master in masters}:
            pieces = list(master_slices(self._wrapper))
            held = zip(self._wrapper.single_partition_of_fp32_groups, self._wrapper.params_in_partition, strict=True)
            parameters = {id(flat): parameters for flat, parameters in held}
            self._layouts = {
                id(master): _layout_of(parameters[id(master)], [one for one in pieces if one.master is master])
                for master in masters
            }
        return self._layouts


def _layout_of(parameters: list[torch.nn.Parameter], pieces: list[MasterSlice]) -> _Layout:
    starts = list(itertools.accumulate((one.numel() for one in parameters), initial=0))
    places = dict(zip(map(id, parameters), starts, strict=False))
    own = sorted((places[id(piece.parameter)] + piece.offset, piece.numel) for piece in pieces)
    ends = [0, *(start + numel for start, numel in own)]
    begins = [*(start for start, _ in own), starts[-1]]
    return _Layout(places, starts[-1], [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin])


def _parts(optimizer: Any) -> dict[str, Any]:
    """Attributes of every optimizer, without those of Muon itself."""
    return {name: value for name, value in vars(optimizer).items() if "aux" not in name}
