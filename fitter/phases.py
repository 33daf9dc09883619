"""Phases of training: stretches over which the second moments of the gradients stay much the same."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Phase", "PhaseDetector"]

# The paper's threshold, section VI-C5.
CHANGE_FRACTION = 0.05
# So many losses separate a slope from their noise, and a plan for fewer iterations would hardly have been followed.
MIN_ITERATIONS = 100
# Where gradients are clipped at every step their mean square stays at the limit for good, and no phase would ever end;
# the paper's own phases ended after about 1000 and 2000 iterations.
MAX_ITERATIONS = 1000
# Kept for a roll-back, which goes back by a few checkpoints; the journal has them all.
PHASES_KEPT = 16


@dataclass(frozen=True)
class Phase:
    """A phase that has ended.

    Attributes:
        first_iteration: of the phase.
        last_iteration: at which it ended; the next one begins there.
        xi: mean second moment of the gradients when it began (the paper's Eq. 7), free of Adam's bias.
        last_xi: the same when it ended.
        ended_by: the change of xi, or the longest length.
    """

    first_iteration: int
    last_iteration: int
    xi: float
    last_xi: float
    ended_by: Literal["change", "length"]


class PhaseDetector:
    """Ends a phase when the mean second moment has moved by a fraction since the phase began.

    The change is accumulated with its sign, `|xi / xi_at_the_beginning - 1|`: what goes up and comes down again does
    not count, so that neither noise nor frequent observations end phases. Two bounds hold besides. No phase is shorter
    than `min_iterations`, whatever the early iterations do: at most `iterations / min_iterations` phases. None is
    longer than `max_iterations` by more than the distance between two observations: clipped gradients
    have a constant norm, and their second moments show no phases at all.

    Args:
        change_fraction: of xi that ends a phase, positive.
        min_iterations: shortest length, at least 1.
        max_iterations: longest length, at least the shortest.
        beta2: Adam's; moments that began as zeros are divided by `1 - beta2^updates`. Zero where the observed values
            are free of that bias already.

    Source: CPSR, sections V-A and V-C.
    """

    def __init__(
        self,
        change_fraction: float = CHANGE_FRACTION,
        min_iterations: int = MIN_ITERATIONS,
        max_iterations: int = MAX_ITERATIONS,
        beta2: float = 0.999,
    ) -> None:
        self.change_fraction = change_fraction
        self.min_iterations = min_iterations
        self.max_iterations = max_iterations
        self.beta2 = beta2
        self._phases: list[Phase] = []
        self._begun: tuple[int, float] | None = None  # iteration and xi
        self._newest: tuple[int, float] | None = None
        self._ended = 0

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The last 16 that have ended, oldest first; each begins where the one before ended."""
        return tuple(self._phases)

    @property
    def ended(self) -> int:
        """Number of phases that have ended and were not taken back."""
        return self._ended

    @property
    def first_iteration(self) -> int | None:
        """Where the phase that has not ended began; None before the first observation."""
        return None if self._begun is None else self._begun[0]

    @property
    def xi(self) -> float | None:
        """Mean second moment at its beginning, which stands for the whole phase (the paper's Eq. 7)."""
        return None if self._begun is None else self._begun[1]

    def observe(self, iteration: int, mean_exp_avg_sq: float) -> Phase | None:
        """Take in the mean of `exp_avg_sq` over all elements; the phase that it ends, if any.

        What is not finite or negative is skipped. An iteration before the newest is a roll-back: what was
        observed after it is forgotten, and phases that had not ended by then go on; where even the oldest that is kept
        began later, phases begin anew.

        Args:
            iteration: completed iterations, as many as updates of the moments.
            mean_exp_avg_sq: as the optimizer has it, biased towards zero.

        Raises:
            ValueError: the iteration is 0 or less.
        """
        if iteration < 1:
            raise ValueError(f"iteration {iteration}: second moments begin with the first update")
        # 1 - beta2^iteration, exact also where beta2 is close to 1.
        unbiased = -math.expm1(iteration * math.log(self.beta2)) if self.beta2 else 1.0
        xi = mean_exp_avg_sq / unbiased
        if not 0 <= xi < math.inf:
            return None
        self._roll_back(iteration)
        self._newest = iteration, xi
        if self._begun is None:
            self._begun = iteration, xi
            return None
        begun, length = self._begun, iteration - self._begun[0]
        changed = abs(xi - begun[1]) >= self.change_fraction * begun[1] and xi != begun[1]
        if length < self.min_iterations or not (changed or length >= self.max_iterations):
            return None
        phase = Phase(begun[0], iteration, begun[1], xi, "change" if changed else "length")
        self._phases = [*self._phases, phase][-PHASES_KEPT:]
        self._ended += 1
        self._begun = iteration, xi
        return phase

    def state_dict(self) -> dict[str, Any]:
        """Plain data without NaN: what was observed, not the settings."""
        return {
            "phases": [asdict(phase) for phase in self._phases],
            "begun": None if self._begun is None else list(self._begun),
            "newest": None if self._newest is None else list(self._newest),
            "ended": self._ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Raises:
            ValueError: it is no such state; the detector is left as it was.
        """
        try:
            phases = [Phase(**phase) for phase in state["phases"]]
            begun, newest = (None if state[key] is None else _observed(state[key]) for key in ("begun", "newest"))
            ended = int(state["ended"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no state of a phase detector ({error!r}); nothing was taken over") from error
        self._phases, self._begun, self._newest, self._ended = phases, begun, newest, ended

    def _roll_back(self, iteration: int) -> None:
        if self._newest is None or iteration >= self._newest[0]:
            return
        while self._phases and self._phases[-1].last_iteration > iteration:
            phase = self._phases.pop()
            self._begun = phase.first_iteration, phase.xi
            self._ended -= 1
        if self._begun is not None and self._begun[0] > iteration:  # before all that is known
            self._begun, self._ended = None, 0


def _observed(pair: Any) -> tuple[int, float]:
    iteration, xi = pair
    return int(iteration), float(xi)
