"""Keys that have another name than in the version before: accepted for one version, with a warning."""

import difflib
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from cpsr.config.reading import SIMILARITY_MIN, as_mapping
from cpsr.errors import ConfigError

__all__ = ["RENAMED", "with_new_names"]

RENAMED: Mapping[str, str] = {
    "coordinator.offload_activations_bytes": "engines.offload_activations_bytes",
    "guard.displacement_limit": "restart.displacement_limit",
    "guard.loss_tolerance_nats": "restart.loss_tolerance_nats",
    "guard.probe_batches": "restart.probe_batches",
    "guard.watch_iterations": "life.watch_iterations",
    "guard.watch_tolerance_nats": "life.watch_tolerance_nats",
    "liveness.heartbeat_timeout_seconds": "ranks.heartbeat_timeout_seconds",
    "liveness.sigterm_grace_seconds": "ranks.sigterm_grace_seconds",
    "liveness.step_timeout_seconds": "ranks.step_timeout_seconds",
    "predictor.learning_budget_fraction": "learning.budget_fraction",
    "predictor.memory_limit_bytes": "learning.memory_limit_bytes",
    "stop_check_iterations": "ranks.stop_check_iterations",
}
"""Path of a key in the version before -> its path now."""

_GONE = ("coordinator", "guard", "liveness")  # sections without a key left


def with_new_names(where: str, data: Any) -> dict[str, Any]:
    """The same settings under the names of this version; warns of each old name, on rank 0.

    Args:
        where: what to call the source in messages.
        data: settings by section, as they were read.

    Raises:
        ConfigError: the data or a section is no mapping; an old name and the new one are both given; or a section that
            is gone has a key that it never had.
    """
    settings = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in as_mapping(where, data).items()
    }
    for old, new in RENAMED.items():
        _rename(where, settings, old, new)
    for section in _GONE:
        rest = settings.get(section)
        if rest == {}:
            del settings[section]
        elif isinstance(rest, dict):
            raise ConfigError(
                f"{where}: " + "; ".join(f"unknown key '{section}.{key}'{_now(section, key)}" for key in rest)
            )
    return settings


def _rename(where: str, settings: dict[str, Any], old: str, new: str) -> None:
    source, old_key = _place(settings, old)
    if not isinstance(source, dict) or old_key not in source:
        return
    section, new_key = new.split(".")
    target = settings.setdefault(section, {})
    if not isinstance(target, dict):
        raise ConfigError(f"{where}: '{section}' = {target!r}: expected a mapping of keys")
    if new_key in target:
        raise ConfigError(f"{where}: '{old}' is the old name of '{new}', and both are given; keep '{new}'")
    target[new_key] = source.pop(old_key)
    if os.environ.get("RANK", "0") == "0":  # once a job
        warnings.warn(
            f"{where}: '{old}' is now called '{new}'; the next version does not accept the old name",
            FutureWarning,
            stacklevel=_frames_to_caller(),
        )


def _frames_to_caller() -> int:
    """The `stacklevel` of a warning about the line that gives CPSR its configuration."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("cpsr", "pydantic"):
        frame, level = frame.f_back, level + 1
    return level


def _place(settings: dict[str, Any], path: str) -> tuple[Any, str]:
    section, _, key = path.rpartition(".")
    return (settings.get(section) if section else settings), key


def _now(section: str, key: Any) -> str:
    """What to write in place of a key that a section never had."""
    names = {old.partition(".")[2]: new for old, new in RENAMED.items() if old.startswith(f"{section}.")}
    close = difflib.get_close_matches(str(key), names, n=1, cutoff=SIMILARITY_MIN)
    if close:
        return f"; did you mean '{names[close[0]]}'?"
    return f"; this section's keys are now {', '.join(sorted(names.values()))}"
