"""What a replay leaves out: the weight gradients of parameters whose turn is still to come on every rank."""

from collections.abc import Mapping
from typing import Any

from cpsr.job import Job
from cpsr.replay.conversion import Conversion

__all__ = ["FrozenGradients"]


class FrozenGradients:
    """Notes the outcome of each step, and repeats steps with it.

    What a frozen operator becomes in a repeated step is overwritten after it. So its gradient may be anything, where
    what the step makes of all gradients together comes from the first time.

    Args:
        job: this rank's.

    Attributes:
        outcome: of the last step, as plain data; None where the engine must compute every gradient.
        leaves_out: whether the replay that is under way leaves anything out.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._steps = job, job.adapter.repeated_steps()
        self.outcome: dict[str, Any] | None = None
        self.leaves_out = False
        self._outcomes: list[Any] = []
        self._first = 0
        self._turns: dict[str, int] = {}

    @property
    def left_out(self) -> int:
        """Calls of layers, so far, whose weights got no gradient."""
        return 0 if self._steps is None else self._steps.left_out

    def plan(self, conversion: Conversion) -> None:
        """Agree on what is left out until the state is whole; a collective, before the first repeated step.

        A window is replayed in this way only in the first life after its own. If that one ends early, whatever the
        reason, the next life computes every gradient.
        """
        steps, job = self._steps, self._job
        mine: Mapping[str, int] | None = None
        known = [one for one in conversion.outcomes if one is not None]
        complete = len(known) == conversion.last - conversion.first
        if steps is not None and complete and job.journal.life == conversion.sealed_in_life + 1:
            mine = steps.by_parameter(conversion.anchors)
        turns: dict[str, int] = {}
        for one in job.group.gather(mine):
            if one is None:
                return
            for name, turn in one.items():
                turns[name] = min(turn, turns.get(name, turn))
        self._turns, self._first, self._outcomes = turns, conversion.first, known
        self.leaves_out = True
        self.before(conversion.first + 1)

    def after_step(self, iteration: int) -> None:
        """Note the outcome of the step that has just ended, and prepare the next one."""
        if self._steps is not None:
            self.outcome = self._steps.outcome()
        self.before(iteration + 1)

    def before(self, iteration: int) -> None:
        """The next step is that of this iteration."""
        if self._steps is None or not self.leaves_out:
            return
        if not self._first < iteration <= self._first + len(self._outcomes):
            self._steps.train()
            return
        without = [name for name, turn in self._turns.items() if turn >= iteration]
        self._steps.repeat(self._outcomes[iteration - self._first - 1], without)

    def end(self) -> None:
        """Nothing is repeated any more."""
        self.leaves_out = False
        if self._steps is not None:
            self._steps.train()

    def close(self) -> None:
        """The engine is as before."""
        if self._steps is not None:
            self._steps.close()
