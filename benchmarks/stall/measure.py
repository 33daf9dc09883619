"""One run: every method in every round, in random order, between steps without a checkpoint."""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from cpsr.benchmarks.stall.job import Job, Size
from cpsr.benchmarks.stall.methods import Memcpy, Method
from cpsr.benchmarks.stall.rivals import Entry

__all__ = ["Block", "SizeSamples", "measure_methods", "measure_size"]

ORDER_SEED = 0
WARM_UP_STEPS = 5
PAIR_STEPS = 2  # the checkpoint's step and the next one


@dataclass(frozen=True)
class Steps:
    """Some steps in a row.

    Attributes:
        seconds: of the training thread, for each.
        processor_seconds: of all threads of this process, for all of them together.
    """

    seconds: list[float]
    processor_seconds: float


@dataclass(frozen=True)
class Block:
    """One checkpoint and the steps around it.

    Attributes:
        method: its name.
        before: the two steps before it; no checkpoint is under way.
        during: the checkpoint's step, the next one, and all that began before it was durable.
        durable_seconds: from the update that is saved until it is on the disk.
    """

    method: str
    before: Steps
    during: Steps
    durable_seconds: float


@dataclass
class SizeSamples:
    """Everything measured at one size.

    Attributes:
        state_bytes: weights and moments.
        blocks: in the order they ran; each one's following neighbours are the next one's `before`.
        after: the two steps behind the last block.
        memcpy_seconds: one copy per round.
    """

    state_bytes: int
    blocks: list[Block] = field(default_factory=list)
    after: Steps = field(default_factory=lambda: Steps([], 0.0))
    memcpy_seconds: list[float] = field(default_factory=list)


def measure_size(job: Job, methods: Sequence[Method], rounds: int, on_block: Callable[[], None]) -> SizeSamples:
    """Run all methods `rounds` times.

    The first round only warms up and is not kept. No checkpoint begins before the last one is durable and removed, so
    that no disk's backlog reaches the next pair.
    """
    memcpy = Memcpy(job)
    samples = SizeSamples(job.adapter.shard().state_bytes)
    _train(job, WARM_UP_STEPS)
    order = random.Random(ORDER_SEED)  # noqa: S311 - an order, not a secret
    for number in range(-1, rounds):
        copy_seconds, blocks = _round(job, methods, memcpy, order, on_block)
        if number >= 0:
            samples.memcpy_seconds.append(copy_seconds)
            samples.blocks += blocks
    samples.after = _neighbours(job)
    return samples


def _round(
    job: Job,
    methods: Sequence[Method],
    memcpy: Memcpy,
    order: random.Random,
    on_block: Callable[[], None],
) -> tuple[float, list[Block]]:
    turns: list[Method | None] = [*methods, None]  # None is the memcpy's turn
    order.shuffle(turns)
    copy_seconds, blocks = 0.0, []
    for method in turns:
        if method is None:
            copy_seconds = memcpy.seconds()
        else:
            blocks.append(_block(job, method))
            on_block()
    return copy_seconds, blocks


def _block(job: Job, method: Method) -> Block:
    before = _neighbours(job)
    method.arm()
    began = time.process_time()
    seconds = [job.step(then=method.save)]
    asked = job.updated_unix_seconds
    seconds += _train(job, PAIR_STEPS - 1)
    while (durable := method.durable_unix_seconds()) is None:
        seconds += _train(job, 1)
    during = Steps(seconds, time.process_time() - began)
    method.clean()
    return Block(method.name, before, during, durable - asked)


def _neighbours(job: Job) -> Steps:
    _train(job, 1)  # what a checkpoint or a copy left in the caches is gone after one step
    began = time.process_time()
    return Steps(_train(job, PAIR_STEPS), time.process_time() - began)


def _train(job: Job, count: int) -> list[float]:
    return [job.step() for _ in range(count)]


def measure_methods(
    size: Size, entries: Sequence[Entry], pairs: int, parent: Path, on_block: Callable[[], None]
) -> SizeSamples:
    """As `measure_size`, with methods that are opened here, each in a directory of its own under `parent`."""
    job = Job(size)
    directory = parent / size.name.replace(" ", "-")
    with ExitStack() as opened:
        methods = []
        for number, entry in reversed(list(enumerate(entries))):  # CPSR last: its signal handlers go first
            home = directory / f"method-{number}"
            home.mkdir(parents=True)
            methods.append(opened.enter_context(entry.open(job, home)))
        return measure_size(job, methods, pairs, on_block)
