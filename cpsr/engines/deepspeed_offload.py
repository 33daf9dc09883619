"""Which of ZeRO's ways to keep weights and states elsewhere CPSR follows, and what offload to the host changes."""

import logging
from collections.abc import Iterator
from typing import Any

import torch

from cpsr.errors import UnsupportedEngineError

__all__ = ["require_visible_states", "warn_of_kept_gradients"]

_log = logging.getLogger(__name__)


def require_visible_states(engine: Any) -> None:
    """Check that masters, moments and parameters are whole, on the device or the host of this process.

    Raises:
        UnsupportedEngineError: they are elsewhere, or rounded; the message names the option and the nearest one that
            works.
    """
    for option, why, instead in _unsupported(engine):
        raise UnsupportedEngineError(
            f"DeepSpeed configuration uses zero_optimization.{option}, which {why}: CPSR has not been tested to "
            f"restore that bit for bit. Nothing was saved; {instead}"
        )


def _unsupported(engine: Any) -> Iterator[tuple[str, str, str]]:
    """Option, why it is refused, and what to do."""
    zero = engine._config.zero_config
    optimizer, parameters = zero.offload_optimizer, zero.offload_param
    for name, found in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if _device(found) not in ("none", "cpu"):
            yield f"{name}.device={_device(found)}", "keeps state in files", f'use "{name}": {{"device": "cpu"}}'
    if optimizer is not None and optimizer.ratio < 1:
        yield f"offload_optimizer.ratio={optimizer.ratio:g}", "steps a second optimizer out of sight", 'use "ratio": 1'


def _device(offload: Any) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))


def _offloads(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False))


def warn_of_kept_gradients(optimizer: Any, inner: torch.optim.Optimizer) -> None:
    """Log once when a step uses a gradient that the host has kept from an earlier step: no restart repeats that.

    Args:
        optimizer: DeepSpeed's wrapper.
        inner: torch's, which it steps.
    """
    if not _offloads(optimizer):
        return

    def before_step(*_: Any) -> None:
        fresh = optimizer.norm_for_param_grads.keys()
        kept = sum(optimizer.get_param_id(parameter) not in fresh for parameter in _owned(optimizer))
        if kept:
            handle.remove()
            _log.warning(
                "%d parameters got no gradient in the last micro-batch of a step. DeepSpeed's offload updates them "
                "with the gradient of an earlier step, which no checkpoint holds: after a restart, their first update "
                "may differ from that of the lost run",
                kept,
            )

    handle = inner.register_step_pre_hook(before_step)


def _owned(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    """Parameters of which this rank updates a part."""
    if hasattr(optimizer, "params_in_partition"):
        for group in optimizer.params_in_partition:
            yield from group
        return
    for parameters in optimizer.fp16_groups:
        for parameter in parameters:
            padded = optimizer.grad_position[optimizer.get_param_id(parameter)][2]
            if optimizer._get_param_partition_rank(parameter) * padded < parameter.ds_numel:
                yield parameter
