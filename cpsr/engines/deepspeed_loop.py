"""How a user's loop over a DeepSpeed engine is watched; and what the engine counts, times and draws beside it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from deepspeed.runtime.pipe import schedule

from cpsr.engines.adapter import StepObserver
from cpsr.engines.deepspeed_masters import advance_loss_scale, torch_optimizer
from cpsr.engines.evaluation import loss_of
from cpsr.engines.hooks import Hooks
from cpsr.engines.schedules import advance_scaler, autocast_scaler, scaler_state
from cpsr.errors import UnsupportedEngineError

__all__ = [
    "DeepSpeedLoop",
    "EngineScalars",
    "load_tracked_states",
    "preserved_tracked_states",
    "tracked_states",
    "untimed",
    "watch_receives",
]


class DeepSpeedLoop:
    """The hooks on one engine instance.

    Order within a step: `on_forward` and `on_loss` per micro-batch, `before_update` inside `engine.step` (or
    `train_batch`). `state_changes` comes when the gradients' norm is known and torch's optimizer begins. `after_step`
    comes when that call is about to return and every counter is settled.

    Args:
        engine: a `DeepSpeedEngine` or `PipelineEngine`.
        pipeline: whether it is the latter.

    Attributes:
        gives_loss: whether the last training forward returned a loss.
    """

    def __init__(self, engine: Any, pipeline: bool) -> None:
        self._engine, self._pipeline = engine, pipeline
        self._hooks = Hooks()
        self._observer: StepObserver | None = None
        self.gives_loss = False
        self._updates = False  # whether the optimizer stepped in the update in progress
        self.forget_step()

    def attach(self, observer: StepObserver) -> None:
        """Install the hooks on this engine instance.

        Raises:
            RuntimeError: an observer is attached already.
        """
        if self._hooks.installed:
            raise RuntimeError("this adapter already has an observer; detach it first")
        self._observer = observer
        engine, hooks = self._engine, self._hooks
        hooks.wrap(engine, "_take_model_step", self._around_update)
        hooks.add(torch_optimizer(engine).register_step_pre_hook(self._before_optimizer_step))
        hooks.wrap(engine, "load_checkpoint", self._around_load)
        if self._pipeline:
            hooks.wrap(engine, "train_batch", self._around_train_batch)
            watch_receives(engine, hooks, self._watching)
            return
        hooks.wrap(engine, "backward", self._around_backward)
        hooks.wrap(engine, "step", self._around_step)
        # On the engine: the inputs as the user gave them, before DeepSpeed casts them, and outside of what
        # `engine.compile` compiles.
        hooks.add(engine.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True))
        hooks.add(engine.register_forward_hook(self._after_forward))

    def detach(self) -> None:
        """Remove the hooks; without any it does nothing."""
        self._hooks.remove()
        self._observer = None
        self.forget_step()

    @property
    def micro_steps(self) -> int:
        """The engine's at the end of its last step: those of a step that is not complete do not count."""
        iteration, at_end = self._boundary
        now, per_step = int(self._engine.micro_steps), int(self._engine.gradient_accumulation_steps())
        if iteration == self._engine.global_steps:
            return at_end
        return now - now % per_step if self._engine.managed_gradient_accumulation() else now

    def _watching(self) -> StepObserver:
        assert self._observer is not None  # hooks are installed only while there is one
        return self._observer

    def _around_update(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._updates = False
        self._watching().before_update()
        return original(*args, **kwargs)

    def _before_optimizer_step(self, *_: Any) -> None:
        self._updates = True
        self._watching().state_changes()

    def _around_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        before = self._engine.global_steps
        result = original(*args, **kwargs)
        if self._engine.global_steps != before:
            self._complete_step()
        return result

    def _around_train_batch(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._watching().on_train_batch()
        before = self._engine.global_steps
        result = original(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self._watching().on_loss(result.detach())
        if self._engine.global_steps != before:
            self._complete_step()
        return result

    def _complete_step(self) -> None:
        losses = [] if self._backward_seen else self._forward_losses
        self.forget_step()
        for loss in losses:
            self._watching().on_loss(loss)
        # Last, and nothing after it: the observer may roll the whole engine back, or leave the process.
        self._watching().after_step(self._engine.global_steps, self._applied())

    def _applied(self) -> bool:
        """Whether the optimizer stepped: the engine does not count a step that a gradient scaler of torch left out."""
        left_out = autocast_scaler(self._engine) is not None and not self._updates
        return bool(self._engine.was_step_applied()) and not left_out

    def forget_step(self) -> None:
        """Drop what was seen of the step in progress: the engine is at the end of a step."""
        self._boundary = int(self._engine.global_steps), int(self._engine.micro_steps)
        self._backward_seen = False
        self._forward_losses: list[torch.Tensor] = []

    def _around_backward(self, original: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(loss, *args, **kwargs)
        self._backward_seen = True
        self._watching().on_loss(loss.detach())
        return result

    def _around_load(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._watching().before_external_load()
        result = original(*args, **kwargs)
        if result[0] is None:  # DeepSpeed found no checkpoint, and has changed nothing
            self._watching().after_external_load(None)
            return result
        self.forget_step()
        self._watching().after_external_load(self._engine.global_steps)
        return result

    def _before_forward(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if engine.module.training and torch.is_grad_enabled():
            self._watching().on_forward(args, kwargs)
        else:
            self._watching().on_other_forward()

    def _after_forward(self, engine: Any, args: tuple[Any, ...], output: Any) -> None:
        if engine.module.training and torch.is_grad_enabled():
            loss = loss_of(output)
            self.gives_loss = loss is not None
            if loss is not None and not self._backward_seen:
                self._forward_losses.append(loss.detach().clone())  # for loops that call loss.backward() themselves


RECEIVES = (schedule.RecvActivation, schedule.RecvGrad)


def watch_receives(engine: Any, hooks: Hooks, watching: Callable[[], StepObserver]) -> None:
    """Report to the observer every receive of a training batch, by the name of DeepSpeed's instruction.

    A receive over gloo blocks its thread until the other stage has sent, which is the stage's idle time. Over NCCL it
    is only put into the device's queue, and what the host does meanwhile is no wait.

    Args:
        engine: a `PipelineEngine`; the table of instructions of this instance is replaced, not its class's.
        hooks: take the replacement off again.
        watching: the observer of the moment.
    """
    instructions = dict(engine._INSTRUCTION_MAP)
    for receive in RECEIVES:
        instructions[receive] = _watched(instructions[receive], receive.__name__, watching)
    hooks.replace(engine, "_INSTRUCTION_MAP", instructions)


def _watched(original: Callable[..., Any], place: str, watching: Callable[[], StepObserver]) -> Callable[..., Any]:
    def receive(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if not engine.module.training:  # eval_batch has another schedule
            return original(engine, *args, **kwargs)
        observer = watching()
        observer.wait_begins(place)
        try:
            return original(engine, *args, **kwargs)
        finally:
            observer.wait_ends()

    return receive


@contextmanager
def untimed(engine: Any) -> Iterator[None]:
    """Keep DeepSpeed's throughput and forward timers, and those of MoE layers, out of an evaluation."""
    timed = [layer for layer in (*engine.moe_layers, *engine.gate_modules) if layer.wall_clock_breakdown]
    forward_timers, throughput = engine.engine_timers.forward_timers, dict(vars(engine.tput_timer))
    engine.engine_timers.forward_timers = []
    for layer in timed:
        layer.wall_clock_breakdown = False
    try:
        yield
    finally:
        for layer in timed:
            layer.wall_clock_breakdown = True
        engine.engine_timers.forward_timers = forward_timers
        vars(engine.tput_timer).clear()
        vars(engine.tput_timer).update(throughput)


def tracked_states() -> dict[str, torch.Tensor]:
    """The states by name; none where the script added none."""
    states: dict[str, torch.Tensor] = get_cuda_rng_tracker().get_states()
    return states


def load_tracked_states(saved: dict[str, torch.Tensor]) -> str | None:
    """Put `tracked_states` back, of the names that the script has added.

    Adding the others here would make the script's own `add` fail.

    Returns:
        Which names could not be restored, for people; None if all were.
    """
    tracker = get_cuda_rng_tracker()
    own = tracker.get_states()
    fitting = {name: state for name, state in saved.items() if name in own and state.numel() == own[name].numel()}
    tracker.set_states({**own, **{name: state.clone() for name, state in fitting.items()}})
    other = sorted((saved.keys() | own.keys()) - fitting.keys())
    if not other:
        return None
    return (
        f"of DeepSpeed's random-state tracker {sorted(fitting) or 'nothing'} is restored, and {other} is not: it is "
        "either not in the checkpoint, or of another kind of device, or not added before CPSR restores"
    )


@contextmanager
def preserved_tracked_states() -> Iterator[None]:
    """The states are as before on exit."""
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    try:
        yield
    finally:
        tracker.set_states(states)


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
