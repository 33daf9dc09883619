"""The state of torch's gradient scalers, and of the one that DeepSpeed makes for `torch_autocast` with float16."""

from typing import Any

import torch

from cpsr.state.device_values import number

__all__ = ["advance_scaler", "autocast_scaler", "scaler_state"]


def scaler_state(scaler: torch.amp.GradScaler, *, on_device: bool) -> dict[str, Any]:
    """Its `state_dict()`; empty for one that is disabled.

    Args:
        scaler: torch's.
        on_device: leave its two numbers on a CUDA device, as `DeviceNumber`s: reading them waits for queued work.
    """
    if not on_device or not scaler.is_enabled() or scaler._scale is None or scaler._growth_tracker is None:
        return scaler.state_dict()
    return {
        "scale": number(scaler._scale, on_device=True),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": number(scaler._growth_tracker, on_device=True),
    }


def advance_scaler(scaler: torch.amp.GradScaler | None, updates: int) -> None:
    """Grow as so many updates without an overflow would have it grow."""
    state = scaler.state_dict() if scaler is not None else {}
    if scaler is None or not state:  # a disabled scaler has no state
        return
    growths, tracker = divmod(state["_growth_tracker"] + updates, state["growth_interval"])
    state["scale"] *= state["growth_factor"] ** growths
    state["_growth_tracker"] = tracker
    scaler.load_state_dict(state)


def autocast_scaler(engine: Any) -> torch.amp.GradScaler | None:
    """The gradient scaler of a DeepSpeed engine: its own at ZeRO 0, that of its optimizer otherwise; None without."""
    own = getattr(engine, "torch_autocast_z0_gradscaler", None)
    found: torch.amp.GradScaler | None = own or getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    return found
