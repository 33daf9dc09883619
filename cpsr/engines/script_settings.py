"""Hyperparameters as a script sets them at its start: how they differ from the run's, and how they take their place."""

import contextlib
import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from cpsr.engines import optimizer_state
from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.schedules import needs_metric
from cpsr.errors import UnsupportedEngineError
from cpsr.state.codec import same

__all__ = [
    "apply_settings",
    "begin_anew",
    "differences",
    "keep_given",
    "keep_settings",
    "schedule_settings",
    "settings_of",
]

_SHOWN = 8  # differences in a message
_DERIVED = ("initial_lr", "base_lrs", "_last_lr", "_schedulers", "optimizer_lr")  # they differ as others do
_COUNTS = ("last_epoch", "last_batch_iteration")  # steps of a schedule of torch, and of DeepSpeed
_RATES = ("lr", "initial_lr")
_RUNNING = ("scale", "_growth_tracker")  # of a gradient scaler


def settings_of(adapter: EngineAdapter) -> dict[str, Any] | None:
    """What the script has set, before anything is restored; None if its optimizers have stepped already.

    Keys: `groups`: parameter groups by optimizer; `schedules`: their states; `scaler`: of the gradient scaler, or None;
    `clipping`: the norm at which the engine clips gradients, or None.
    """
    if any(_has_stepped(entry) for one in adapter.optimizers for entry in one.state.values()):
        return None
    scaler = next((one for one in adapter.loop_parts if hasattr(one, "get_growth_factor")), None)
    found = {
        "groups": list(map(optimizer_state.hyperparameters, adapter.optimizers)),
        "schedules": [schedule_settings(one) for one in _schedules(adapter)],
        "scaler": None if scaler is None else scaler.state_dict(),
        "clipping": adapter.gradient_clipping,
    }
    return copy.deepcopy(found)


def schedule_settings(schedule: Any) -> dict[str, Any]:
    """The state of a schedule, and settings that its state lacks.

    Keys: `state`; `given`: the arguments of each function of a `LambdaLR` that is partial; `closed over`: the numbers
    in their closures; `attributes`: of a schedule of DeepSpeed, whose state is a count alone.
    """
    functions, state = getattr(schedule, "lr_lambdas", ()), schedule.state_dict()
    found = {
        "state": state,
        "given": [_plain(one.keywords.items()) if isinstance(one, partial) else {} for one in functions],
        "closed over": [dict(_closed_over(one)) for one in functions],
        "attributes": {},
    }
    if type(schedule).__module__.startswith("deepspeed."):
        found["attributes"] = {key: value for key, value in vars(schedule).items() if _is_setting(key, value, state)}
    return copy.deepcopy(found)


def differences(then: Mapping[str, Any], now: Mapping[str, Any], *, closures: bool = False) -> list[str]:
    """What the script sets otherwise than the run, for people: `lr 0.001 (the run: 0.01)`.

    Args:
        then: `settings_of` the run.
        now: `settings_of` the script.
        closures: list numbers in the closures of functions alone, else all others.
    """
    before, found = dict(_leaves(then)), dict[str, None]()
    for path, value in _leaves(now):
        name = next((part for part in reversed(path) if isinstance(part, str)), "")
        listed = path in before and name not in _DERIVED and ("closed over" in path) == closures
        if listed and not same(before[path], value):
            found[f"{name} {_shown(value)} (the run: {_shown(before[path])})"] = None
    texts = list(found)
    return texts if len(texts) <= _SHOWN else [*texts[:_SHOWN], f"{len(texts) - _SHOWN} more"]


def keep_settings(adapter: EngineAdapter, then: Mapping[str, Any]) -> None:
    """Put back those settings of the run that no state holds: see `schedule_settings`, and the clipping."""
    for one, settings in zip(_schedules(adapter), then["schedules"], strict=False):
        keep_given(one, settings)
    _clip(adapter, then["clipping"])


def keep_given(schedule: Any, settings: Mapping[str, Any]) -> None:
    """Give a schedule the settings that its state lacks, but for closures."""
    for index, given in enumerate(settings["given"]):
        function = schedule.lr_lambdas[index]
        if given and isinstance(function, partial):
            schedule.lr_lambdas[index] = partial(function.func, *function.args, **{**function.keywords, **given})
    vars(schedule).update(copy.deepcopy(settings["attributes"]))


def apply_settings(adapter: EngineAdapter, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Let what the script has set otherwise take the place of what was restored.

    Schedules begin anew with the script's settings and are moved forward to the restored step. One that decides by a
    metric keeps what it has learned, and takes the settings alone.

    Args:
        adapter: the engine; its state is restored.
        then: `settings_of` the run.
        now: `settings_of` the script.

    Raises:
        UnsupportedEngineError: a schedule has fewer steps than the run.
    """
    schedules = _schedules(adapter)
    moving = [one for one in schedules if not needs_metric(one)]
    rates = not same(_only(then["groups"], _RATES), _only(now["groups"], _RATES))
    anew = bool(moving) and (rates or not same(then["schedules"], now["schedules"]))
    for optimizer, groups_then, groups_now in zip(adapter.optimizers, then["groups"], now["groups"], strict=False):
        for group, one_then, one_now in zip(optimizer.param_groups, groups_then, groups_now, strict=False):
            for key, value in one_now.items():
                if not same(one_then.get(key), value) if key not in _RATES or not moving else anew:
                    _set(group, key, value)
    if anew:
        begin_anew(schedules, now["schedules"])
    for one, state_then, state_now in zip(schedules, then["schedules"], now["schedules"], strict=False):
        if needs_metric(one):
            own = one.state_dict()
            changed = {k: v for k, v in state_now["state"].items() if not same(state_then["state"].get(k), v)}
            one.load_state_dict(own | {key: value for key, value in changed.items() if key not in ("_last_lr", "best")})
    scaler = next((one for one in adapter.loop_parts if hasattr(one, "get_growth_factor")), None)
    if scaler is not None and now["scaler"]:
        scaler.load_state_dict(
            scaler.state_dict() | {key: value for key, value in now["scaler"].items() if key not in _RUNNING}
        )
    _clip(adapter, now["clipping"])


def begin_anew(schedules: list[Any], states: list[Any]) -> None:
    """Bring schedules to the step at which they are, from the script's rates in the groups and by its settings.

    Raises:
        UnsupportedEngineError: a schedule does not count its steps, or has fewer.
    """
    left = []
    for one, now in zip(schedules, states, strict=True):
        if needs_metric(one):
            continue
        count, steps = next(((key, one.state_dict()[key]) for key in _COUNTS if key in one.state_dict()), ("", 0))
        if not count:
            raise UnsupportedEngineError(
                f"restart.hyperparameters: script: {type(one).__name__} has no last_epoch, so that CPSR "
                "cannot move it to the restored step; use restart.hyperparameters: checkpoint"
            )
        one.load_state_dict(copy.deepcopy(now["state"]))
        left.append([one, int(steps) - int(now["state"][count])])
    while any(steps > 0 for _, steps in left):
        for entry in left:
            if entry[1] > 0:
                _step(*entry)
                entry[1] -= 1


def _clip(adapter: EngineAdapter, norm: float | None) -> None:
    if norm is not None:
        adapter.clip_gradients(norm)


def _step(schedule: Any, left: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no optimizer steps in between, as intended
        try:
            schedule.step()
        except ValueError as error:
            raise UnsupportedEngineError(
                f"restart.hyperparameters: script: {type(schedule).__name__} ends {left} steps before the restored "
                f"one: {error}. Give it more steps, or use restart.hyperparameters: checkpoint"
            ) from error


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if hasattr(group.get(key), "copy_") and hasattr(value, "copy_"):
        group[key].copy_(value)  # where it is: a CUDA graph may read it there
    else:
        group[key] = copy.deepcopy(value)


def _schedules(adapter: EngineAdapter) -> list[Any]:
    return [one for one in adapter.loop_parts if hasattr(one, "step") and not hasattr(one, "get_growth_factor")]


def _has_stepped(entry: Any) -> bool:
    """Whether an optimizer's state for a tensor is of a step; some constructors create it."""
    return not isinstance(entry, dict) or float(entry.get("step", 1)) > 0


def _only(groups: list[list[dict[str, Any]]], keys: tuple[str, ...]) -> list[Any]:
    return [[[group.get(key) for key in keys] for group in one] for one in groups]


def _closed_over(function: Any) -> Iterator[tuple[str, Any]]:
    """Numbers and texts that a function refers to, by name."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # no value yet
            yield from _plain([(name, cell.cell_contents)]).items()


def _is_setting(key: str, value: Any, state: Mapping[str, Any]) -> bool:
    numbers = value if isinstance(value, list | tuple) else [value]
    return key not in (*state, *_COUNTS, *_DERIVED) and all(isinstance(one, int | float | str) for one in numbers)


def _plain(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if isinstance(value, int | float | str)}


def _leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Values by path; a list of numbers, as betas, is one."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(tree, list | tuple) and any(isinstance(one, Mapping | list | tuple) for one in tree):
        for index, value in enumerate(tree):
            yield from _leaves(value, (*path, index))
    else:
        yield path, tree


def _shown(value: Any) -> str:
    return f"{value.item():g}" if hasattr(value, "item") and value.numel() == 1 else str(value)[:60]
