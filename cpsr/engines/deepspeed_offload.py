"""Which of ZeRO's ways to keep weights and states elsewhere CPSR follows, and what offload to the host changes."""

from collections.abc import Iterator
from typing import Any

from cpsr.errors import UnsupportedEngineError

__all__ = ["discard_offloaded_gradients", "require_visible_states"]


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
    to_host = 'use "offload_optimizer": {"device": "cpu"} alone'
    if engine.zenflow:
        yield "zenflow", "updates some weights later than their step", to_host
    for name, found in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if _device(found) not in ("none", "cpu"):
            yield f"{name}.device={_device(found)}", "keeps state in files", f'use "{name}": {{"device": "cpu"}}'
    if optimizer is not None and optimizer.ratio < 1:
        yield f"offload_optimizer.ratio={optimizer.ratio:g}", "steps a second optimizer out of sight", 'use "ratio": 1'
    if optimizer is not None and optimizer.super_offload:
        yield "offload_optimizer.super_offload", "steps the optimizer in another process", to_host
    if zero.zero_hpz_partition_size > 1:
        yield "zero_hpz_partition_size", "keeps a second partition of the weights", "set it to 1, as ZeRO-3 without hpZ"
    for name in ("weights", "nontrainable_weights", "gradients"):
        if getattr(zero, f"zero_quantized_{name}"):
            yield f"zero_quantized_{name}", "rounds them", f'use ZeRO-3 with "zero_quantized_{name}": false'


def _device(offload: Any) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))


def discard_offloaded_gradients(optimizer: Any) -> None:
    """Drop the norms and the overflow of an unfinished step; its gradients on the host are written over."""
    if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
        optimizer.reset_cpu_buffers()
