"""Iterations that each expert has missed and not made up for."""

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["MissedIterations"]


class MissedIterations:
    """Age of experts at the last restart, less the iterations that longer steps have made up since then.

    A life that begins with a checkpoint passes its state to `load_state_dict`, and calls `restarted` where experts are
    older than the checkpoint. Iterations that an optimizer skipped (overflows) count as trained.

    Args:
        step_factor: of the steps from the next restart on: each makes up for `step_factor - 1` iterations.

    Attributes:
        step_factor: of the steps since the last restart.
    """

    def __init__(self, step_factor: float) -> None:
        self._configured = step_factor
        self.step_factor = step_factor
        self._since = 0  # the last restart
        self._missed: dict[str, float] = {}  # then

    def at(self, iteration: int) -> dict[str, float]:
        """Missed iterations by unit, at an iteration since the last restart; without units that missed none."""
        made_up = (self.step_factor - 1.0) * (iteration - self._since)
        return {unit: missed - made_up for unit, missed in self._missed.items() if missed > made_up}

    def made_up_at(self, iteration: int) -> int | None:
        """The iteration from which nothing will be missing; None where nothing is missing now."""
        missed = self.at(iteration)
        return iteration + math.ceil(max(missed.values()) / (self.step_factor - 1.0)) if missed else None

    def restarted(self, taken_at: Mapping[str, int], iteration: int) -> None:
        """Record a restart with units of these ages.

        Args:
            taken_at: unit -> iteration of its weights, where that is older.
            iteration: of everything else, not before the last restart.
        """
        missed = self.at(iteration)
        for unit, taken in taken_at.items():
            if taken >= self._since:
                missed[unit] = iteration - taken + self.at(taken).get(unit, 0.0)
            else:  # iterations made up since the last restart are lost, too
                then = max(self._missed.get(unit, 0.0), float(self._since - taken))
                missed[unit] = iteration - self._since + then
        self._since, self._missed = iteration, {unit: left for unit, left in missed.items() if left > 0}
        self.step_factor = self._configured

    def forget(self) -> None:
        """Forget all missed iterations."""
        self._missed = {}

    def state_dict(self) -> dict[str, Any]:
        """Plain data, the same until the next restart."""
        return {"since": self._since, "missed": dict(self._missed), "step_factor": self.step_factor}

    def load_state_dict(self, state: Mapping[str, Any], iteration: int) -> None:
        """Go on from `state_dict()`; from an empty one with nothing missing at this iteration."""
        self._since = state.get("since", iteration)
        self._missed = dict(state.get("missed", {}))
        self.step_factor = state.get("step_factor", self._configured)
