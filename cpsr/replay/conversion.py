"""Makes a whole state of a window while the training loop repeats its iterations.

The loop goes on from the window's first iteration, with its data and random states. After each repeated step the
operators whose turn it was get the state of that iteration, and those whose turn is still to come the compute weights
of that iteration. So every forward and backward is that of the first time, and so is every gradient. After the last
step of the window each operator is what a whole snapshot of that iteration would have held, bit for bit.

Source: moevement, section 3.3. The paper's frozen operators take part in no update; here their update is overwritten,
and `cpsr.replay.frozen` leaves out their weight gradients where that can be done.
"""

from collections.abc import Mapping
from typing import Any

import torch

from cpsr.checkpoint.memory_reader import OpenState, ages_in_memory
from cpsr.checkpoint.memory_states import MemoryState
from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.weight_sample import sampled
from cpsr.errors import CheckpointError, RecoveryError
from cpsr.replay.layout import SAMPLED_ELEMENTS, compute_key, sample_key
from cpsr.state.codec import same_bits
from cpsr.state.shard import OperatorState, Shard

__all__ = ["REPEATED", "VOID", "Conversion", "load_window"]

_DIFFERS = "Something in the step is not deterministic, or its data, code or libraries are others than before."
VOID = "is not used again: the next start goes on from another state"
REPEATED = "is used once more: the next start computes every gradient"
_WRITES = (
    "It was given its values right after the step, and the loop has written to it since: what the loop does after a "
    "step cannot be repeated so."
)


def load_window(state: MemoryState, into: Shard) -> Any:
    """Copy what a window has of its first iteration into the views of `into`; moments that it lacks become zero.

    Returns:
        The small state of that iteration.

    Raises:
        CheckpointError: the window is no longer whole, or of another model or split; `into` holds anything.
    """
    with OpenState(state) as window, torch.no_grad():
        anchors = window.taken_at(into)
        for name, values in into.others.items():
            values.copy_(window.tensor(f"other/{name}", values))
        for name, operator in into.operators.items():
            _fill(window, anchors[name], state.iteration, state.iteration, operator)
        return window.scalars()["start"]


class Conversion:
    """One window, from its first iteration to its last.

    Args:
        state: the window, of this life.
        adapter: the engine, which has what `load_window` gave.

    Attributes:
        first: the iteration that the loop goes on from.
        last: the iteration after which the state is whole.
        anchors: by operator, the iteration at which the window has it whole.
        outcomes: of the steps after the first iteration, as `RepeatedSteps.outcome` gives them.
        sealed_in_life: number of the life that took the window.

    Raises:
        CheckpointError: the window is no longer whole.
    """

    def __init__(self, state: MemoryState, adapter: EngineAdapter) -> None:
        self._window, self._adapter = OpenState(state), adapter
        self._name = state.path.name
        self.anchors: Mapping[str, int] = ages_in_memory(state)
        scalars = self._window.scalars()
        self.first, self.last = state.iteration, int(scalars["last"])
        self.outcomes: list[Any] = scalars.get("outcomes", [])
        self.sealed_in_life = int(scalars.get("life", -1))

    def small_state(self) -> Any:
        """Of the first iteration."""
        return self._window.scalars()["start"]

    def after_step(self, iteration: int) -> None:
        """Give the engine what the window has of this iteration; a collective where `push_down` is one."""
        with torch.no_grad():
            for name, operator in self._adapter.shard().operators.items():
                _fill(self._window, self.anchors[name], self.first, iteration, operator, evolving=True)
        self._adapter.push_down()

    def require_same(self, iteration: int, then: str = VOID) -> None:
        """Compare the weights with those of the first time, when the loop has finished a repeated iteration.

        Args:
            iteration: the finished one.
            then: what an error says of the window.

        Raises:
            RecoveryError: they differ: what was repeated is not what was trained.
        """
        step = iteration - self.first
        for name, operator in self._adapter.shard().operators.items():
            values, few = operator.parameter.values.detach(), f"other/{sample_key(step, name)}"
            if self.anchors[name] >= iteration:
                before, cause = self._weights(name, step), _WRITES
            elif self._window.has(few):
                values, before, cause = sampled(values, SAMPLED_ELEMENTS), self._window.as_it_is(few), _DIFFERS
            else:
                continue
            if not same_bits(values.to(before.device), before.to(values.dtype)):
                raise RecoveryError(
                    f"iteration {iteration} was repeated from the window of iterations {self.first} to {self.last}, "
                    f"and {name} is not what it was the first time. {cause} The window ({self._name}) {then}. "
                    "Set replay.enabled to false if this repeats"
                )

    def _weights(self, name: str, step: int) -> torch.Tensor:
        whole = self.anchors[name] == self.first + step
        return self._window.as_it_is(f"param/{name}" if whole else f"other/{compute_key(step, name)}")

    def close(self) -> None:
        """Let the file go."""
        del self._window


def _fill(
    window: OpenState, anchor: int, first: int, iteration: int, operator: OperatorState, *, evolving: bool = False
) -> None:
    """What a window has of an operator at this iteration.

    Args:
        window: of it.
        anchor: iteration at which the window has the operator whole.
        first: iteration of the window.
        iteration: the present one.
        operator: views that are written.
        evolving: an operator with an earlier anchor is left to the training.
    """
    values, name = operator.parameter.values, operator.name
    if anchor == iteration:
        values.copy_(window.tensor(f"param/{name}", values))
        for moment, target in operator.moments.items():
            source = window.tensor(f"moment/{moment}/{name}", target)
            if not _is_absent(target):
                target.copy_(source)
            elif bool(source.any()):
                raise CheckpointError(f"the optimizer has no {moment} of {name} yet, and had it the first time")
    elif anchor > iteration:
        values.copy_(window.as_it_is(f"other/{compute_key(iteration - first, name)}").view(values.shape))
        for target in operator.moments.values() if not evolving else ():
            target.zero_()  # until its own come
    elif not evolving:
        raise CheckpointError(f"the window holds {name} of iteration {anchor}, before its first")


def _is_absent(moment: torch.Tensor) -> bool:
    """Whether the optimizer has still to create it: its zeros are one number, which cannot be written."""
    return moment.numel() > 1 and moment.stride() == (0,)
