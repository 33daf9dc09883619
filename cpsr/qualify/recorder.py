"""An observer of an engine adapter that records what it reports."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Recorder"]


class Recorder:
    """Records what an adapter reports; `at_step_end` lets a case act where CPSR does."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.losses: list[torch.Tensor] = []
        self.waits: list[str] = []
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.at_step_end: Callable[[int], None] = lambda iteration: None
        self.at_change: Callable[[], None] = lambda: None

    def state_changes(self) -> None:
        """The optimizer is about to change the state; follows `before_update`."""
        assert self.events[-1][0] == "before_update"
        self.at_change()

    def before_update(self) -> None:
        """An update follows."""
        self.events.append(("before_update",))

    def after_step(self, iteration: int, applied: bool) -> None:
        """A step has ended."""
        self.events.append(("after_step", iteration, applied))
        self.at_step_end(iteration)

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training forward begins with these inputs."""
        self.inputs = args, kwargs

    def on_other_forward(self) -> None:
        """The module is called for something else."""

    def on_loss(self, loss: torch.Tensor) -> None:
        """A training forward returned this loss."""
        assert not loss.requires_grad
        self.losses.append(loss.clone())

    def before_external_load(self) -> None:
        """The user loads a checkpoint of the engine's own."""
        self.events.append(("before_external_load",))

    def after_external_load(self, iteration: int | None) -> None:
        """That checkpoint is loaded."""
        self.events.append(("after_external_load", iteration))

    def on_train_batch(self) -> None:
        """Nothing is deferred."""

    def wait_begins(self, place: str) -> None:
        """A pipeline stage waits for another."""
        self.waits.append(place)

    def wait_ends(self) -> None:
        """That wait is over."""
        self.waits.append("")

    def steps(self) -> list[tuple[int, bool]]:
        """Iteration, and whether the update was applied, of each step."""
        return [(event[1], event[2]) for event in self.events if event[0] == "after_step"]
