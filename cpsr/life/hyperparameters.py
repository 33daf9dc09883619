"""Whose hyperparameters a restart uses, the run's or the script's, and a line on what differs."""

import copy
from typing import Any, Literal

from cpsr.engines import optimizer_state
from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.script_settings import (
    apply_settings,
    begin_anew,
    differences,
    keep_given,
    keep_settings,
    schedule_settings,
    settings_of,
)

__all__ = ["Hyperparameters", "script_sentence"]


class Hyperparameters:
    """Compares what the script sets at its start with what it set when the run began, before either has trained.

    Attributes:
        since: iterations at which the script's took the place of the run's.
    """

    def __init__(self, adapter: EngineAdapter, choice: Literal["checkpoint", "script"]) -> None:
        self._adapter, self._choice = adapter, choice
        self._script: dict[str, Any] | None = None
        self._run: dict[str, Any] = {}
        self.since: list[int] = []

    def note_script(self) -> None:
        """Note what the script has set; before anything is restored."""
        self._script = settings_of(self._adapter)
        self._run = {} if self._script is None else {**self._script, "registered": {}}

    def state(self) -> dict[str, Any]:
        """As plain data, for the checkpoint."""
        return {**self._run, "since": list(self.since)} if self._run else {}

    def compare(self, saved: dict[str, Any]) -> str | None:
        """Called once the engine has been restored.

        Returns:
            What differs and whose are used, one sentence; None if nothing does.

        Raises:
            UnsupportedEngineError: a schedule of the script has fewer steps than the run.
        """
        self._run = {key: value for key, value in copy.deepcopy(saved).items() if key != "since"}
        self.since = list(saved.get("since", []))
        if not self._run or self._script is None:
            return None
        different = differences(self._run, self._script)
        fixed = differences(self._run, self._script, closures=True)
        if self._choice == "checkpoint":
            keep_settings(self._adapter, self._run)
        elif different or fixed:
            apply_settings(self._adapter, self._run, self._script)
            self._run |= self._script
            self.since.append(self._adapter.iteration)
        return self._sentence(different, fixed)

    def register(self, name: str, schedule: Any, restored: Any) -> str | None:
        """A schedule is registered; called before its state is restored.

        Args:
            name: under which it is registered.
            schedule: torch's.
            restored: loads its state and the learning rates; None: there is none.

        Returns:
            As `compare`.
        """
        now = schedule_settings(schedule)
        then = self._run.get("registered", {}).get(name, now)
        if self._run:
            self._run["registered"][name] = then
        if restored is None:
            return None
        restored()
        different = differences({"": then}, {"": now})
        fixed = differences({"": then}, {"": now}, closures=True)
        if self._choice == "checkpoint":
            keep_given(schedule, then)
        elif different or fixed:
            self._advance(schedule, now)
            self._run["registered"][name] = now
            self.since.append(self._adapter.iteration)
        return self._sentence(different, fixed)

    def _advance(self, schedule: Any, now: dict[str, Any]) -> None:
        rates = [] if self._script is None else self._script["groups"]
        for optimizer, groups in zip(self._adapter.optimizers, rates, strict=False):
            if optimizer.param_groups is schedule.optimizer.param_groups:
                kept = [{key: group[key] for key in ("lr", "initial_lr") if key in group} for group in groups]
                optimizer_state.load_hyperparameters(optimizer, kept)
        begin_anew([schedule], [now])

    def _sentence(self, different: list[str], fixed: list[str]) -> str | None:
        if not different and not fixed:
            return None
        closed = f". The script's are used of {', '.join(fixed)}: no checkpoint can hold functions" if fixed else ""
        return script_sentence([*different, *fixed], self._choice) + closed


def script_sentence(different: list[str], choice: Literal["checkpoint", "script"]) -> str:
    """What the script sets otherwise than the run did, and whose values are used."""
    used = "script's are used, as restart.hyperparameters: script says; repeated steps differ from before"
    if choice == "checkpoint":
        used = "run's are used. To use the script's, set restart.hyperparameters: script"
    return f"the script sets {', '.join(different)}: the {used}"
