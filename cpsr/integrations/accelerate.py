"""CPSR in a loop over objects that `accelerator.prepare` returned.

CPSR iterates over numbers in place of the batches, with one stream for each pass: at the end of a pass loaders may draw
from their generators, which a stream over several passes would not see. So it knows when the loop requests a batch,
keeps and restores the position, and captures the random states at the start of a pass. The batches come from the loader
itself.
"""

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import isgeneratorfunction
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, SeedableRandomSampler
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DeepSpeedSchedulerWrapper, memory
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from cpsr.engines import EngineAdapter, TorchAdapter, adapt
from cpsr.errors import UnsupportedEngineError
from cpsr.recovery import CPSRRecovery
from cpsr.state.host_random import capture_host_rng, restore_host_rng
from cpsr.state.loader import ResumableLoader
from cpsr.state.loader_passes import GlobalBatches

__all__ = ["Passes", "engine_of", "order_of_the_pass", "resume"]


class Passes(GlobalBatches):
    """Numbers in place of the batches of a loader, for `recovery.resume`.

    Args:
        length: numbers in a pass.
        loader: prepared by accelerate; the generator of its sampler, or its own, may decide the order of a pass. A
            sampler that seeds its generator anew at each pass keeps nothing in it.
        batches: of the loader, for each number.
    """

    def __init__(self, length: int, loader: Any, batches: int = 1) -> None:
        sampler = _batch_sampler(loader)
        samples = None if sampler is None else loader.total_batch_size * batches
        one_order = sampler is not None and type(loader) is DataLoaderShard and _draws_one_order(sampler.sampler)
        super().__init__(length, samples, one_order=one_order)
        self.generator = _generator(loader)
        self._base = weakref.ref(loader.base_dataloader)  # not followed in the search for generators

    @property
    def base(self) -> Any:
        """The torch loader that accelerate iterates over."""
        return self._base()


def _batch_sampler(loader: Any) -> BatchSampler | None:
    """What makes the batches that accelerate deals to the ranks in turn; None where it is not torch's own."""
    shard: Any = getattr(loader, "batch_sampler", None)
    sampler = shard.batch_sampler if type(shard) is BatchSamplerShard else shard
    return sampler if type(sampler) is BatchSampler and not isinstance(sampler.sampler, BatchSampler) else None


def _draws_one_order(sampler: Any) -> bool:
    """Whether it draws the same order on any number of ranks.

    On several ranks accelerate gives a `RandomSampler` a generator. On one it draws from the global random state.
    """
    if type(sampler) is RandomSampler:
        return sampler.generator is not None
    return type(sampler) in (SeedableRandomSampler, SequentialSampler)


def _generator(loader: Any) -> torch.Generator | None:
    holders = [loader]
    for holder in holders:  # grows: accelerate puts a sampler around a batch sampler around a sampler
        parts = (getattr(holder, name, None) for name in ("batch_sampler", "sampler"))
        holders += [part for part in parts if part is not None and all(part is not other for other in holders)]
    found = [getattr(one, "generator", None) for one in reversed(holders) if not hasattr(one, "initial_seed")]
    return next((one for one in found if isinstance(one, torch.Generator)), None)


@contextmanager
def order_of_the_pass(stream: ResumableLoader, *, continued: bool) -> Iterator[None]:
    """Inside, the first batch of a pass is fetched: the loader draws as at the start of the pass.

    Afterwards the random states of a continued pass are those of training again.
    """
    states = stream.position.states
    if not continued or states is None or "host" not in states:  # a new run, or weights alone are left
        with stream.seeding(continued=continued):
            yield
        return
    training = capture_host_rng()
    restore_host_rng(states["host"])
    try:
        with stream.seeding(continued=True):
            yield
    finally:
        restore_host_rng(training)


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
