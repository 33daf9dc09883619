"""A step looks for work only where there is some; no life may differ from one whose every step looks."""

import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.journal import JournalReader
from cpsr.life.attention import Attention

ITERATIONS = 70
# Of the machine, or where its disk or a worker of its copies was slow.
BY_CHANCE = {"file system", "checkpoint skipped", "memory snapshot skipped"}


def test_a_call_while_a_step_looks_is_for_the_next() -> None:
    attention = Attention()
    assert attention.is_due(1)
    attention.call()
    attention.look_at(5)
    assert attention.is_due(2)
    attention.look_at(5)
    assert [iteration for iteration in range(3, 7) if attention.is_due(iteration)] == [5, 6], "until it names the next"


@dataclass(frozen=True)
class Script:
    """What happens in a life, by the iteration before which it happens.

    Attributes:
        steps_per_batch: how often the loop trains on each batch.
        plans: intervals between checkpoints and between snapshots in memory, as all ranks would agree on them.
        loads: iterations of states that the script loads.
    """

    interval: int
    memory_interval: int
    steps_per_batch: int
    plans: dict[int, tuple[int, int]]
    loads: dict[int, int]
    saves: frozenset[int]
    sigterm_at: int | None


@dataclass
class Seen:
    """When saves and snapshots in memory were due, what was reported and agreed on, and which losses were recorded."""

    begun: list[int] = field(default_factory=list)
    in_memory: list[tuple[int, int]] = field(default_factory=list)
    events: list[tuple[str, int | None]] = field(default_factory=list)
    plans: list[tuple[int, int]] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)


def live(script: Script, *, every_step_looks: bool) -> Seen:
    seen = Seen()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        try:
            _train(script, seen, folder, every_step_looks)
        except SystemExit:
            seen.events.append(("left", None))
        with JournalReader(Path(folder, "run", "journal.db")) as journal:
            seen.events += [(row.kind, row.iteration) for row in journal.events() if row.kind not in BY_CHANCE]
            seen.plans = [(row.from_iteration, row.interval_iterations) for row in journal.plans()]
            seen.losses = [row.iteration for row in journal.losses(0, 10 * ITERATIONS)]
    seen.events.sort(key=repr)  # some come from other threads
    return seen


def _train(script: Script, seen: Seen, folder: str, every_step_looks: bool) -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)
    adapter = TorchAdapter(module, optimizer)
    config: dict[str, Any] = {
        "run_dir": f"{folder}/run",
        "mode": "exact",
        "checkpoint": {"interval_iterations": script.interval},
        "memory": {"interval_iterations": script.memory_interval},
        "service": {"enabled": False},
        "verification": {"budget_fraction": 0.0},  # the clock decides which steps it repeats
    }
    with CPSRRecovery(adapter, config) as recovery:
        life = recovery.life
        life.planner.close()  # its thread proposes at moments of its own
        begin = life.saver.begin_checkpoint

        def noted(iteration: int, **more: Any) -> None:
            seen.begun.append(iteration)
            begin(iteration, **more)

        life.saver.begin_checkpoint = noted  # type: ignore[method-assign]
        for step, batch in enumerate(_batches(recovery, script.steps_per_batch)):
            if step == ITERATIONS:
                break
            life.saver.drain(10.0)  # no save is skipped because the disk is slow
            if step in script.plans:
                interval, memory_interval = script.plans[step]
                changed = replace(
                    life.saver.plan, interval_iterations=interval, memory_interval_iterations=memory_interval
                )
                life.saver.adopt(changed, recovery.iteration)
            if step in script.loads:
                life.before_external_load()
                adapter.load_scalars(adapter.scalars() | {"iteration": script.loads[step]})
                life.after_external_load(adapter.iteration)
            if step in script.saves:
                life.saver.save_now(recovery.iteration)
            if step == script.sigterm_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if every_step_looks:
                life.attention.call()
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()
            due = life.saver.memory.taken + life.saver.memory.skipped
            if not seen.in_memory or seen.in_memory[-1][1] != due:
                seen.in_memory.append((recovery.iteration, due))


def _batches(recovery: CPSRRecovery, steps_per_batch: int) -> Iterator[torch.Tensor]:
    for batch in recovery.resume(torch.randn(8, 4, 3), repeat=True):
        for _ in range(steps_per_batch):
            yield batch


moments = st.integers(1, ITERATIONS - 1)
intervals = st.tuples(st.integers(3, 30), st.integers(1, 12))
scripts = st.builds(
    Script,
    st.integers(3, 40),
    st.integers(1, 12),
    st.sampled_from([1, 1, 2, 3]),
    st.dictionaries(moments, intervals, max_size=3),
    st.dictionaries(moments, st.integers(1, 50), max_size=1),
    st.frozensets(moments, max_size=1),
    st.none() | moments,
)


@settings(max_examples=12)
@given(scripts)
def test_a_life_is_that_of_a_loop_whose_every_step_looks(script: Script) -> None:
    assert live(script, every_step_looks=False) == live(script, every_step_looks=True)
