"""Repeated steps of a DeepSpeed engine: what depends on all gradients comes from the first time.

Written against DeepSpeed 0.19. Each class of its optimizers decides an overflow and clips in its own way; `_watchers`
names the methods, which are wrapped on the instance.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import clip_grad_norm_, clip_tensors_by_global_norm
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from cpsr.engines.deepspeed_masters import torch_optimizer
from cpsr.engines.grad_scaler import autocast_scaler
from cpsr.engines.hooks import Hooks
from cpsr.engines.linear_gradients import LinearGradients

__all__ = ["DeepSpeedRepeatedSteps", "repeated_steps"]

# Each element's update depends on that element's gradient alone.
_ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, FusedAdam)
_NORM, _OVERFLOW, _REPORTED = "norm", "overflow", "reported"


def repeated_steps(engine: Any, operators: Mapping[str, nn.Parameter]) -> "DeepSpeedRepeatedSteps | None":
    """Those of an engine; None where gradients were not shown to be left out without a trace.

    Args:
        engine: DeepSpeed's.
        operators: the parameters of this rank's operators.
    """
    return DeepSpeedRepeatedSteps(engine, operators) if _is_known(engine) else None


def _is_known(engine: Any) -> bool:
    optimizer, pipeline = engine.optimizer, isinstance(engine, deepspeed.PipelineEngine)
    compiled = engine.is_compiled or any(one._compiled_call_impl is not None for one in engine.module.modules())
    settings = (
        engine.managed_gradient_accumulation(),
        engine.mpu is None or pipeline,
        engine.sequence_parallel_size == 1,
        engine.autotp_size() <= 1,
        autocast_scaler(engine) is None,
        not compiled,
        not getattr(optimizer, "cpu_offload", False),
        not getattr(optimizer, "custom_loss_scaler", False),
        not getattr(optimizer, "fused_adam_legacy", False),
        not getattr(optimizer, "fused_lamb_legacy", False),
    )
    kinds = (DeepSpeedZeroOptimizer, BF16_Optimizer, FP16_Optimizer, FP16_UnfusedOptimizer, *_ELEMENTWISE)
    return all(settings) and type(optimizer) in kinds and type(torch_optimizer(engine)) in _ELEMENTWISE


class DeepSpeedRepeatedSteps:
    """See `RepeatedSteps`.

    Args:
        engine: of which `repeated_steps` is not None.
        operators: the parameters of this rank's operators.
    """

    def __init__(self, engine: Any, operators: Mapping[str, nn.Parameter]) -> None:
        self._engine, self._operators = engine, operators
        self._named: dict[str, nn.Parameter] = dict(engine.module.named_parameters())
        self._found: dict[str, Any] = {}  # of the step in progress, or the last one
        self._known: Mapping[str, Any] | None = None  # of the step to be repeated
        self._linears: LinearGradients | None = None  # while steps are repeated
        self._left_out = 0  # before
        self._hooks = Hooks()
        for owner, name, wrapper in self._watchers():
            self._hooks.wrap(owner, name, wrapper)

    @property
    def left_out(self) -> int:
        """See `RepeatedSteps.left_out`."""
        return self._left_out + (0 if self._linears is None else self._linears.count)

    def outcome(self) -> dict[str, Any]:
        """See `RepeatedSteps.outcome`."""
        return dict(self._found)

    def by_parameter(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """See `RepeatedSteps.by_parameter`."""
        by_id = {id(self._operators[name]): number for name, number in numbers.items()}
        return {name: by_id[id(one)] for name, one in self._named.items() if id(one) in by_id}

    def repeat(self, outcome: Mapping[str, Any], without: Collection[str]) -> None:
        """See `RepeatedSteps.repeat`."""
        self._known = outcome
        if self._linears is None:
            self._linears = LinearGradients(self._engine.module)
        self._linears.leave_out([self._named[name] for name in without if name in self._named])

    def train(self) -> None:
        """See `RepeatedSteps.train`."""
        self._known = None
        linears, self._linears = self._linears, None
        if linears is not None:
            self._left_out += linears.count
            linears.remove()

    def close(self) -> None:
        """See `RepeatedSteps.close`."""
        self.train()
        self._hooks.remove()

    def _watchers(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """Object, name of its method, and what is called in place of it."""
        optimizer = self._engine.optimizer
        kind = type(optimizer)
        if kind is DeepSpeedZeroOptimizer:
            norm, step = (optimizer, "scaled_global_norm", self._norm), (optimizer, "step", self._step)
            return [(optimizer, "has_overflow", self._overflow), norm, step]
        if kind is BF16_Optimizer:
            return [(optimizer, "get_grads_for_norm", self._bf16_gradients), (optimizer, "step", self._step)]
        if kind in (FP16_Optimizer, FP16_UnfusedOptimizer):
            checks = (optimizer.overflow_checker, "has_overflow", self._final_overflow)
            return [checks, (optimizer, "unscale_and_clip_grads", self._unscale), (optimizer, "step", self._step)]
        return [(self._engine, "clip_fp32_gradients", self._clip)]

    def _step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """What is left of a step: whether it was skipped, and the norm that the engine reports."""
        optimizer, known = self._engine.optimizer, self._known
        self._found = {}
        result = original(*args, **kwargs)
        if known is not None:
            optimizer._global_grad_norm = self._here(known[_REPORTED])
        self._found |= {_REPORTED: optimizer._global_grad_norm, "skipped": optimizer.overflow}
        return result

    def _overflow(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return self._noted(_OVERFLOW, original, *args, **kwargs)

    def _norm(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return self._noted(_NORM, original, *args, **kwargs)

    def _noted(self, what: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        """The method's result, or that of the first time.

        It is called all the same: ranks of other stages, which compute their gradients, may wait for this one in it.
        """
        found = original(*args, **kwargs)
        if self._known is not None:
            found = self._here(self._known[what])
        self._found[what] = found
        return found

    def _final_overflow(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Also true where the norm was not finite, which is decided later."""
        found = original(*args, **kwargs)
        return found if self._known is None else self._known["skipped"]

    def _unscale(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Its last argument is the norm."""
        *gradients, norm = args
        norm = self._found[_NORM] = norm if self._known is None else self._here(self._known[_NORM])
        return original(*gradients, norm, **kwargs)

    def _bf16_gradients(self, original: Any, for_clipping: bool = False) -> Any:
        """What the step takes the norm of, and what it clips by it."""
        known, optimizer, found = self._known, self._engine.optimizer, original(for_clipping)
        if known is None:
            return found
        if not for_clipping:
            others, experts = found
            return [torch.full((1,), torch.inf, device=self._engine.device)] if known["skipped"] else others, experts
        clip_tensors_by_global_norm(found, optimizer.clip_grad, self._here(known[_REPORTED]), optimizer.mpu)
        return []

    def _clip(self, original: Any) -> None:
        """As the engine does, which drops the norm."""
        engine = self._engine
        if self._known is None:
            norm = clip_grad_norm_(engine.module.parameters(), engine.gradient_clipping(), mpu=engine.mpu)
        else:
            clip_grad_norm_(engine.module.parameters(), math.inf, mpu=engine.mpu)  # it changes nothing; see `_noted`
            norm = self._here(self._known[_NORM])
            most = torch.tensor([float(engine.gradient_clipping())], device=norm.device)
            factor = torch.min(torch.ones_like(most), most / (norm + 1e-6))
            for parameter in engine.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.data.mul_(factor)
        self._found = {_NORM: norm}

    def _here(self, value: Any) -> Any:
        """A value of the first time, on the engine's device."""
        return value.to(self._engine.device) if isinstance(value, torch.Tensor) else value
