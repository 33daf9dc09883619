"""Learning-rate schedulers and gradient scalers as plain data, and moved forward without training."""

import inspect
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from cpsr.errors import UnsupportedEngineError
from cpsr.state.codec import encode
from cpsr.state.device_values import DeviceValues, number

__all__ = [
    "Schedules",
    "advance_scaler",
    "needs_metric",
    "scaler_state",
]

_log = logging.getLogger(__name__)


class Schedules:
    """The schedulers of an engine, in their order; most have one or none.

    Args:
        schedulers: any objects with `step`, `state_dict` and `load_state_dict`.

    Raises:
        UnsupportedEngineError: an object lacks one of them.
    """

    def __init__(self, schedulers: Sequence[Any]) -> None:
        for one in schedulers:
            missing = [name for name in ("step", "state_dict", "load_state_dict") if not hasattr(one, name)]
            if missing:
                raise UnsupportedEngineError(
                    f"learning-rate scheduler {type(one).__name__} has no {', '.join(missing)}; CPSR could not restore "
                    "the schedule. Give it these methods or leave the scheduler out and set the rate yourself"
                )
        self._schedulers = list(schedulers)
        self._warned = False

    def state(self) -> list[Any]:
        """Plain data of each.

        Raises:
            UnsupportedEngineError: one keeps something that is not plain data; the message names it.
        """
        states = [one.state_dict() for one in self._schedulers]
        for one, state in zip(self._schedulers, states, strict=True):
            encode(state, f"lr_scheduler({type(one).__name__})", DeviceValues())  # waits for no device
        return states

    def load(self, states: list[Any], learning_rates: list[Any]) -> None:
        """Put `state()` back.

        Args:
            states: what `state()` returned.
            learning_rates: rate of each parameter group at that time; DeepSpeed's schedulers do not save the rates
                that they last set but are asked for them.

        Raises:
            UnsupportedEngineError: there were others then.
        """
        if len(states) != len(self._schedulers):
            raise UnsupportedEngineError(
                f"the saved run had {len(states)} learning-rate schedulers and this one has {len(self._schedulers)}; "
                "build the engine with the same ones, in the same order"
            )
        for one, state in zip(self._schedulers, states, strict=True):
            one.load_state_dict(state)
            if "_last_lr" not in state and len(getattr(one, "_last_lr", ())) == len(learning_rates):
                one._last_lr = list(learning_rates)

    def advance(self) -> None:
        """One step of each; a scheduler that needs a metric stays where it is, and that is logged once."""
        for one in self._schedulers:
            if not needs_metric(one):
                with warnings.catch_warnings():
                    # torch warns that no optimizer step came before: true here, and intended.
                    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                    one.step()
            elif not self._warned:
                self._warned = True
                _log.warning(
                    "%s decides by a metric of the skipped steps, which were not trained: it is left as restored",
                    type(one).__name__,
                )


def needs_metric(scheduler: Any) -> bool:
    """Whether its `step` has to be given something, as a metric."""
    parameters = inspect.signature(scheduler.step).parameters.values()
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        for p in parameters
    )


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
