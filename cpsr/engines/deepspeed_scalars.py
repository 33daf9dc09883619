"""What a DeepSpeed engine counts and scales by, beside its optimizer and schedule."""

from typing import Any

from cpsr.engines.deepspeed_masters import advance_loss_scale
from cpsr.engines.grad_scaler import advance_scaler, autocast_scaler, scaler_state
from cpsr.errors import UnsupportedEngineError

__all__ = ["EngineScalars"]

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
# DeepSpeed's names for the running values of its two kinds of dynamic loss scaler; the rest is configuration.
_LOSS_SCALE_VALUES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class EngineScalars:
    """Counters, loss scale and gradient scaler of one engine.

    Args:
        engine: DeepSpeed's.
        pipeline: whether it is one.

    Attributes:
        scaler: of `torch_autocast` at ZeRO 0 with float16; None for none.
    """

    def __init__(self, engine: Any, *, pipeline: bool) -> None:
        self._engine = engine
        self._pipeline = pipeline
        self.scaler = autocast_scaler(engine)

    def state(self, micro_steps: int, *, on_device: bool) -> dict[str, Any]:
        """As plain data.

        Args:
            micro_steps: micro-batches of complete steps.
            on_device: as in `EngineAdapter.scalars`.
        """
        counters = {name: int(getattr(self._engine, name)) for name in _COUNTERS} | {"micro_steps": micro_steps}
        return {
            "counters": counters,
            "micro_batches": int(self._engine.gradient_accumulation_steps()),
            "loss_scale": {
                name: getattr(scaler, name)
                for scaler in self._loss_scalers()
                for name in _LOSS_SCALE_VALUES
                if hasattr(scaler, name)
            },
            "grad_scaler": None if self.scaler is None else scaler_state(self.scaler, on_device=on_device),
        }

    def require_same_parts(self, scalars: dict[str, Any]) -> None:
        """Raise UnsupportedEngineError where one of this engine and the saved one has a gradient scaler alone."""
        saved = scalars.get("grad_scaler")
        if (saved is None) != (self.scaler is None):
            raise UnsupportedEngineError(
                f"the saved run had {'no' if saved is None else 'a'} gradient scaler of torch_autocast with "
                f"float16, and this one has {'none' if self.scaler is None else 'one'}; set torch_autocast as it was"
            )

    def load(self, scalars: dict[str, Any]) -> None:
        """Put `state()` back."""
        for name in _COUNTERS:
            setattr(self._engine, name, scalars["counters"][name])
        now = int(self._engine.gradient_accumulation_steps())
        if scalars.get("micro_batches", now) != now and not self._pipeline:
            # A step ends where the count is a multiple of them: else the first one would be too short.
            self._engine.micro_steps = self._engine.global_steps * now
        for scaler in self._loss_scalers():
            for name, value in scalars["loss_scale"].items():
                setattr(scaler, name, value)
        if self.scaler is not None:
            self.scaler.load_state_dict(scalars["grad_scaler"])
        self._engine._unmanaged_backward_count = 0  # of a step that the loop was in

    def skip_ahead(self, iterations: int, tensors: int) -> None:
        """Advance all as so many applied steps would have.

        Args:
            iterations: that are skipped.
            tensors: that the optimizer updates on this rank.
        """
        engine = self._engine
        for _ in range(iterations):
            advance_loss_scale(engine.optimizer)
        # ZeRO steps its flat tensors one by one, and the scaler is updated after each.
        advance_scaler(self.scaler, iterations * (tensors if engine.zero_optimization() else 1))
        engine.global_steps += iterations
        engine.global_samples += iterations * engine.train_batch_size()
        if not self._pipeline:  # pipelines leave this counter at zero
            engine.micro_steps += iterations * int(engine.gradient_accumulation_steps())

    def _loss_scalers(self) -> list[Any]:
        """The one object with the running loss scale, none where the precision needs none."""
        optimizer = self._engine.optimizer
        return [getattr(optimizer, name) for name in ("loss_scaler", "loss_scale_config") if hasattr(optimizer, name)]
