"""A bit that flips in one rank: in a weight, a moment, a gradient or an activation, once or each time."""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from cpsr.engines.adapter import EngineAdapter

__all__ = ["KINDS", "Fault", "Injector"]

KINDS = ("weight", "moment", "gradient", "activation")
_INTEGERS = {4: torch.int32, 2: torch.int16}


@dataclass(frozen=True)
class Fault:
    """One fault; its place is drawn with the seed.

    Attributes:
        kind: of `KINDS`.
        persistent: it comes again each time; else once, while the loop runs the step.
        rank: that has it.
        seed: draws tensor, element, bit, and when in the step.
    """

    kind: str
    persistent: bool
    rank: int
    seed: int


class Injector:
    """Injects one fault into the steps of this rank, until it is removed.

    In a step that will be repeated the loop calls `before_forward` and `before_update`; hooks do the rest.

    Attributes:
        changes: how often a bit was changed by it; a bit that is stuck may have the right value.
    """

    def __init__(self, adapter: EngineAdapter, fault: Fault) -> None:
        self._adapter, self._fault = adapter, fault
        self._random = Random(fault.seed)  # noqa: S311 - nothing secret is drawn
        self._late = self._random.random() < 0.5
        self._here = adapter.rank == fault.rank
        self._bit, self._element = self._random.random(), self._random.random()
        self._stuck: tuple[torch.Tensor, int, int] | None = None
        self._done = self._armed = False
        self.changes = 0
        self._handles: list[Any] = []
        if self._here:
            self._install()

    def _install(self) -> None:
        module, fault = self._adapter.module, self._fault
        trained = [one for one in module.parameters() if one.requires_grad]
        if fault.kind == "gradient" and not self._is_reduced:
            hooked: Any = self._random.choice(trained)
            self._handles.append(hooked.register_hook(self._in_gradient))
        elif fault.kind == "activation":
            inner = [one for one in module.modules() if not list(one.children())]
            self._handles.append(self._random.choice(inner).register_forward_hook(self._in_activation))
        elif fault.persistent:
            self._handles.append(module.register_forward_pre_hook(lambda *_: self._stick()))

    @property
    def _is_reduced(self) -> bool:
        """Whether the gradient changes after the ranks have reduced it, where the loop has it."""
        return self._late and not self._adapter.updates_itself and not self._fault.persistent

    def before_forward(self) -> None:
        """The loop is about to call the module."""
        self._armed = True
        if self._here and not self._late:
            self._flip_state()

    def before_update(self) -> None:
        """The loop is about to call the optimizer."""
        if self._here and self._late:
            self._flip_state()
            if self._fault.kind == "gradient" and self._is_reduced and not self._done:
                present = [one.grad for one in self._adapter.module.parameters() if one.grad is not None]
                self._flip(self._random.choice(present))
                self._done = True

    def rearm(self) -> None:
        """A fault that comes once comes in the next step that will be repeated."""
        self._done = self._armed = False

    def remove(self) -> None:
        """The rank is sound again."""
        for handle in self._handles:
            handle.remove()

    def _flip_state(self) -> None:
        if self._fault.kind not in ("weight", "moment") or self._fault.persistent or self._done:
            return
        self._flip(self._random.choice(self._of_state()))
        self._done = True

    def _of_state(self) -> list[torch.Tensor]:
        operators = [one for one in self._adapter.shard().operators.values() if one.parameter.numel]
        if self._fault.kind == "weight":
            return [one.parameter.values for one in operators]
        return [values for one in operators for values in one.moments.values() if values.numel() > 1]

    def _stick(self) -> None:
        """A cell of memory that keeps one of its bits, whatever is written there."""
        if self._stuck is None:
            words = _words(self._random.choice(self._of_state()))
            place, bit = self._placed(words)
            self._stuck = words, place, bit
        words, place, bit = self._stuck
        self.changes += int(words[place] & bit == 0)
        words[place] = words[place] | bit

    def _in_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if not self._fires():
            return None
        changed = gradient.clone()
        self._flip(changed)
        return changed

    def _in_activation(self, module: Any, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and self._fires():
            self._flip(output.data)

    def _fires(self) -> bool:
        """Whether what comes along now is changed."""
        fires = self._fault.persistent or (self._armed and not self._done)
        self._done |= fires
        return fires

    def _placed(self, words: torch.Tensor) -> tuple[int, int]:
        width = 8 * words.element_size()
        bit = int(self._bit * width)
        return int(self._element * len(words)), -(1 << bit) if bit == width - 1 else 1 << bit

    def _flip(self, values: torch.Tensor) -> None:
        words = _words(values.detach())
        place, bit = self._placed(words)
        self.changes += 1
        words[place] = words[place] ^ bit


def _words(values: torch.Tensor) -> torch.Tensor:
    return values.data.view(-1).view(_INTEGERS[values.element_size()])  # torch sees no new version
