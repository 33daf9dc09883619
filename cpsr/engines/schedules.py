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
    "Schedule",
    "Schedules",
    "advance_scaler",
    "autocast_scaler",
    "needs_metric",
    "scaler_state",
]

_log = logging.getLogger(__name__)


class Schedule:
    """The scheduler of an engine, or none.

    Args:
        scheduler: any object with `step`, `state_dict` and `load_state_dict`, or None.

    Raises:
        UnsupportedEngineError: the object lacks one of them.
    """

    def __init__(self, scheduler: Any) -> None:
        missing = [name for name in ("step", "state_dict", "load_state_dict") if not hasattr(scheduler, name)]
        if scheduler is not None and missing:
            raise UnsupportedEngineError(
                f"learning-rate scheduler {type(scheduler).__name__} has no {', '.join(missing)}; CPSR could not "
                "restore the schedule. Give it these methods or leave the scheduler out and set the rate yourself"
            )
        self._scheduler = scheduler
        self._warned = False

    def state(self) -> Any:
        """Plain data of the scheduler, None without one.

        Raises:
            UnsupportedEngineError: it keeps something that is not plain data; the message names it.
        """
        if self._scheduler is None:
            return None
        state = self._scheduler.state_dict()
        encode(state, f"lr_scheduler({type(self._scheduler).__name__})", DeviceValues())  # waits for no device
        return state

    def load(self, state: Any, learning_rates: list[Any]) -> None:
        """Put `state()` back.

        Args:
            state: what `state()` returned.
            learning_rates: rate of each parameter group at that time; DeepSpeed's schedulers do not save the rates
                that they last set but are asked for them.

        Raises:
            UnsupportedEngineError: there is a scheduler now and there was none then, or the other way round.
        """
        if (state is None) != (self._scheduler is None):
            was, now = ("no scheduler", "one") if state is None else ("a scheduler", "none")
            raise UnsupportedEngineError(
                f"the saved run had {was} and this one has {now}; build the engine with the same learning-rate schedule"
            )
        if self._scheduler is None:
            return
        self._scheduler.load_state_dict(state)
        if "_last_lr" not in state and len(getattr(self._scheduler, "_last_lr", ())) == len(learning_rates):
            self._scheduler._last_lr = list(learning_rates)

    def advance(self) -> None:
        """One step of the schedule; a scheduler that needs a metric stays where it is, and that is logged once."""
        if self._scheduler is None:
            return
        if needs_metric(self._scheduler):
            if not self._warned:
                _log.warning(
                    "%s decides by a metric of the skipped steps, which were not trained: it is left as restored",
                    type(self._scheduler).__name__,
                )
                self._warned = True
            return
        with warnings.catch_warnings():
            # torch warns that no optimizer step came before: true here, and intended.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self._scheduler.step()


def needs_metric(scheduler: Any) -> bool:
    """Whether its `step` has to be given something, as a metric."""
    parameters = inspect.signature(scheduler.step).parameters.values()
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        for p in parameters
    )


class Schedules:
    """Several schedulers in their order, or one, or none.

    Args:
        schedulers: see `Schedule`.
    """

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self._schedules = [Schedule(one) for one in schedulers] or [Schedule(None)]

    def state(self) -> Any:
        """Plain data: of a single scheduler its own, of several `{"schedules": [...]}`."""
        states = [one.state() for one in self._schedules]
        return states[0] if len(states) == 1 else {"schedules": states}

    def load(self, state: Any, learning_rates: list[Any]) -> None:
        """Put `state()` back; see `Schedule.load`.

        Raises:
            UnsupportedEngineError: of another number of schedulers.
        """
        several = isinstance(state, dict) and set(state) == {"schedules"}
        states = state["schedules"] if several else [state]
        if len(states) != len(self._schedules):
            saved, now = (
                0 if one == [None] else len(one) for one in (states, [one.state() for one in self._schedules])
            )
            raise UnsupportedEngineError(
                f"the saved run had {saved} schedulers and this one has {now}; give the same ones, in the same order"
            )
        for schedule, one in zip(self._schedules, states, strict=True):
            schedule.load(one, learning_rates)

    def advance(self) -> None:
        """One step of each; see `Schedule.advance`."""
        for schedule in self._schedules:
            schedule.advance()


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
