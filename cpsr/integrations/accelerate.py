"""CPSR in a loop over objects that `accelerator.prepare` returned."""

import sys
from collections.abc import Iterator
from inspect import isgeneratorfunction
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DeepSpeedSchedulerWrapper, memory

from cpsr.engines import EngineAdapter, TorchAdapter, adapt
from cpsr.errors import UnsupportedEngineError
from cpsr.integrations.passes import Passes, order_of_the_pass
from cpsr.recovery import CPSRRecovery
from cpsr.state.loader import ResumableLoader

__all__ = ["engine_of", "resume"]


def engine_of(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, scheduler: Any = None, **adapter: Any
) -> EngineAdapter:
    """The engine for `CPSRRecovery`, of what `accelerator.prepare` returned.

    All prepared schedulers come back with it, and objects that `accelerator.register_for_checkpointing` was given
    before the `with` block. The loop calls `scheduler.step()` right after `optimizer.step()`, both inside
    `accelerator.accumulate(model)` where gradients are accumulated.

    Args:
        accelerator: its gradient scaler and its number of accumulated batches are taken.
        model: also one that is sharded, or DeepSpeed's engine, whose optimizer and schedule are its own.
        optimizer: prepared.
        scheduler: that the loop steps after every optimizer step, prepared or not.
        adapter: more arguments of `TorchAdapter`.

    Raises:
        UnsupportedEngineError: see `TorchAdapter`; or a part that was not prepared; or accelerate's search for a batch
            size calls this.
    """
    _require_one_batch_size()
    schedulers = [scheduler, *accelerator._schedulers]
    if accelerator.distributed_type == "DEEPSPEED":
        return _with_state(accelerator, _for_its_schedulers(adapt(model), schedulers), None)
    if not hasattr(optimizer, "step_was_skipped"):
        raise UnsupportedEngineError(
            f"this {type(optimizer).__name__} was not prepared: pass the optimizer that accelerator.prepare returned"
        )
    adapter = {"micro_batches_per_iteration": accelerator.gradient_accumulation_steps, **adapter}
    engine = TorchAdapter(model, optimizer.optimizer, scheduler, accelerator.scaler, **adapter)
    return _with_state(accelerator, _for_its_schedulers(engine, schedulers), scheduler)


def _require_one_batch_size() -> None:
    """Refuse a search that begins the run again with another batch size, in this process and at each restart."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == memory.__file__:
            raise UnsupportedEngineError(
                "find_executable_batch_size begins the run again with another batch size, and each restart would begin "
                "with the first one, where the run could not go on. Nothing was trained. Find the size before, without "
                "CPSR, and give it to the script"
            )


def _with_state(accelerator: Accelerator, engine: EngineAdapter, scheduler: Any) -> EngineAdapter:
    """Let CPSR save what `accelerator.save_state` saves beside the engine, whose scheduler this is."""

    def companions() -> dict[str, Any]:
        of_engine = scheduler, getattr(scheduler, "scheduler", None)
        others = {
            f"accelerate scheduler {number}": one
            for number, one in enumerate(accelerator._schedulers)
            if not isinstance(one, DeepSpeedSchedulerWrapper)
            and not any(one is own or getattr(one, "scheduler", one) is own for own in of_engine)
        }
        objects = enumerate(accelerator._custom_objects)
        return others | {f"accelerate object {number} {type(one).__name__}": one for number, one in objects}

    setattr(engine, "companions", companions)  # noqa: B010 - engines of other packages have none
    return engine


def _for_its_schedulers(engine: EngineAdapter, schedulers: list[Any]) -> EngineAdapter:
    """Accelerate steps a scheduler once for each rank: where it does, another number of ranks is refused."""
    per_rank = [one for one in schedulers if type(one) is AcceleratedScheduler]
    if not any(one.step_with_optimizer and not one.split_batches for one in per_rank):
        return engine

    def of_as_many_ranks(scalars: dict[str, Any]) -> dict[str, Any]:
        raise UnsupportedEngineError(
            "accelerate takes a step of a prepared scheduler for each rank at every optimizer step, so that the "
            "learning rate would follow another course on another number of ranks. Nothing was changed. Begin the run "
            "with a scheduler that is not prepared, and step it once for each optimizer step (if "
            "accelerator.sync_gradients: scheduler.step()); this one goes on with as many ranks as it had"
        )

    engine.resharded = of_as_many_ranks  # type: ignore[method-assign]
    return engine


def resume(recovery: CPSRRecovery, loader: Any, *, epochs: int | None = None) -> Iterator[Any]:
    """As `recovery.resume(loader, epochs=epochs)`, for a loader that `accelerator.prepare` returned.

    Batches that were trained before a restart are skipped without loading them.

    Raises:
        UnsupportedEngineError: a loader without a length, or one whose batches could not be dealt again.
        ConfigError: outside the `with` block of `recovery`.
    """
    if not hasattr(loader, "end_of_dataloader") or not isgeneratorfunction(type(loader).__iter__):
        raise UnsupportedEngineError(
            f"this {type(loader).__name__} was not prepared by accelerate: pass it to recovery.resume(loader)"
        )
    if hasattr(loader.base_dataloader, "state_dict"):
        raise UnsupportedEngineError(
            "use_stateful_dataloader=True keeps a place in the data of its own, beside that of CPSR: leave it out of "
            "the DataLoaderConfiguration"
        )
    try:
        length = len(loader)
    except TypeError:
        raise UnsupportedEngineError(
            f"the dataset {type(loader.dataset).__name__} has no length, so that the end of a pass is not known: give "
            "it a __len__"
        ) from None
    passes = Passes(length, loader)
    if epochs is None:
        return _batches(loader, recovery.resume(passes))
    return _all_batches(recovery, loader, passes, epochs)


def _all_batches(recovery: CPSRRecovery, loader: Any, passes: Passes, epochs: int) -> Iterator[Any]:
    while recovery.epoch < epochs:
        yield from _batches(loader, recovery.resume(passes))


def _batches(loader: Any, numbers: ResumableLoader) -> Iterator[Any]:
    """What is left of the current pass; also what is before it, once the state was rolled back."""
    batches: Iterator[Any] = iter(())
    opened, expected = loader, (0, 0)  # the next number, with its pass
    for number in numbers:  # before each the last step is over, and may have been rolled back
        epoch = numbers.position.epoch
        continued = number > 0 and (epoch, number) != expected
        if number == 0 or continued:
            if expected[1] == len(loader):
                next(batches, None)  # the end of the last pass, of which accelerate is told
            elif expected[1]:
                opened.end()
            loader.set_epoch(epoch)
            opened = skip_first_batches(loader, number) if number else loader
            batches = iter(opened)
        with order_of_the_pass(numbers, continued=continued):
            batch = next(batches)
        expected = (epoch, number + 1)
        yield batch
    next(batches, None)
