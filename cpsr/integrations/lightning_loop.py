"""What CPSR puts into the loop of Lightning's `Trainer`: the place in the data, its progress, and a plain step."""

from collections.abc import Iterator
from functools import wraps
from typing import Any

from cpsr.errors import ConfigError, UnsupportedEngineError

__all__ = ["LoopProgress", "RestOfPass", "require_supported", "run_closure_first"]

STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")


class RestOfPass:
    """What is left of the current pass, at each iteration over it."""

    def __init__(self, stream: Any, length: int) -> None:
        self._stream, self._length = stream, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._length - self._stream.position.advanced(0).batch):
            yield next(self._stream)


class LoopProgress:
    """Lightning's loops and callbacks, as an object that `recovery.register` takes."""

    def __init__(self, trainer: Any, own: Any) -> None:
        self._trainer, self._own = trainer, own
        self._steps: int | None = None
        self._length: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors."""
        kept = {one.state_key: one.state_dict() for one in self._trainer.callbacks if one is not self._own}
        length = self._trainer.num_training_batches
        return {"loops": self._trainer.fit_loop.state_dict(), "callbacks": kept, "batches_of_a_pass": length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it back before the loop runs, which then goes on in the middle of its pass."""
        self._trainer.fit_loop.load_state_dict(state["loops"])
        self._steps = self._trainer.fit_loop.epoch_loop._batches_that_stepped
        self._length = state.get("batches_of_a_pass")
        for one in self._trainer.callbacks:
            if state["callbacks"].get(one.state_key):
                one.load_state_dict(state["callbacks"][one.state_key])

    def place(self, batch: int, length: int) -> None:
        """Let the loop go on at this batch: another number of ranks counts other batches of the pass.

        Args:
            batch: of the pass, that comes next on this rank.
            length: batches of a pass on this rank.
        """
        if self._steps is None:  # a new run
            return
        loop = self._trainer.fit_loop
        passes, current = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current
        if batch == 0 and passes.completed == passes.ready:
            loop.epoch_loop.restarting = False  # the run had ended with a pass, and goes on with the next one
        elif self._length not in (None, length):  # an earlier version did not save it
            further = batch - current.ready
            for name in ("ready", "started", "processed", "completed"):
                setattr(current, name, getattr(current, name) + further)

    def settle(self) -> None:
        """The first batch begins: where a validation follows the restored step, Lightning has counted it twice."""
        if self._steps is not None:
            self._trainer.fit_loop.epoch_loop._batches_that_stepped = self._steps
            self._steps = None


def run_closure_first(optimizer: Any) -> None:
    """Lightning hands forward and backward to `optimizer.step`, which runs them before it updates: so here, too."""
    step = optimizer.step

    @wraps(step)
    def after_closure(closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        step()
        return loss

    # In place of the method, as torch's schedulers do it themselves.
    optimizer.step = after_closure


def require_supported(trainer: Any, module: Any) -> None:
    """Refuse what CPSR cannot follow, by name.

    Raises:
        UnsupportedEngineError: another strategy, manual optimization, several optimizers.
        ConfigError: `ckpt_path` would replace what CPSR restores.
    """
    strategy = type(trainer.strategy).__name__
    if strategy not in STRATEGIES:
        raise UnsupportedEngineError(
            f"the strategy is {strategy}, and CPSR follows Lightning on one device and with strategy='ddp'. With "
            "DeepSpeed or FSDP write the loop yourself, or use the Trainer of transformers"
        )
    if not module.automatic_optimization or len(trainer.optimizers) != 1:
        raise UnsupportedEngineError(
            f"{type(module).__name__} has {len(trainer.optimizers)} optimizers and automatic_optimization="
            f"{module.automatic_optimization}: CPSR follows automatic optimization with one optimizer"
        )
    if trainer.ckpt_path is not None:
        raise ConfigError(
            f"fit(ckpt_path={str(trainer.ckpt_path)!r}) would replace the state that CPSR restores: leave it out. To "
            "begin from it, load its weights into the module and take a new run_dir"
        )
