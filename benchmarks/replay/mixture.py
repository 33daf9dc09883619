"""One rank of a real mixture of experts under CPSR, which kills itself when it is told to."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpsr.benchmarks.harness.ranks import become_rank, state_digest
from cpsr.benchmarks.recovery.tasks import BATCH_WINDOWS, TextTask, gpt_task
from cpsr.benchmarks.recovery.workload import scheduled_rate
from cpsr.benchmarks.replay.in_turn import in_turn
from cpsr.demo.model import GPTConfig

if TYPE_CHECKING:
    from cpsr.benchmarks.replay.live_interval import LiveInterval

__all__ = ["ALONE", "LIVE", "Mixture", "Part", "found_path", "rank_main"]

ALONE, LIVE = "without CPSR", "with CPSR"
BLOCK, SETTLING = 12, 4  # steps that are timed in turn, and those before them that are not
SEED = 3
PEAK_LEARNING_RATE = 1e-3
SCHEDULE_ITERATIONS = 3000  # as of the dense model of this size


@dataclass(frozen=True)
class Mixture:
    """A GPT whose every second feed-forward layer is a mixture of experts with one expert for a token.

    Attributes:
        experts: of a layer, which the ranks share equally.
        gpt: the dense model.
    """

    experts: int = 8
    gpt: GPTConfig = field(default_factory=lambda: GPTConfig(layers=4, heads=4, width=96, context=64))

    @property
    def tokens_per_iteration(self) -> int:
        """Routed to experts, in all layers that have them."""
        return BATCH_WINDOWS * self.gpt.context * (self.gpt.layers // 2)


@dataclass(frozen=True)
class Part:
    """What a life of the job does.

    Attributes:
        config: CPSR's configuration.
        result: where logs and figures go, `.<rank>` and an ending appended.
        iterations: end of the run.
        killed_at: iteration after which every rank kills itself; None: the job comes to its end.
        paired_steps: that are timed then, half of them of an engine without CPSR, in turn; 0: the job ends instead.
        mixture: shape of the model.
        policy: of `LiveInterval`, which sets the interval; None: nobody changes it.
        profile: that an earlier life has left for it.
    """

    config: dict[str, Any]
    result: Path
    iterations: int
    killed_at: int | None
    mixture: Mixture
    policy: str | None = None
    profile: dict[str, Any] | None = None
    paired_steps: int = 0


def found_path(result: Path, rank: int) -> Path:
    """Where a rank's figures lie: one JSON object a line, the first of the beginning, then one a step, then the end."""
    return result.with_suffix(f".{rank}.jsonl")


def rank_main(part: Part, rank: int, ranks: int) -> None:
    """What a rank's process runs."""
    become_rank(part.result.with_suffix(f".{rank}.log"), rank, ranks)
    train(part, rank, ranks)


def train(part: Part, rank: int, ranks: int) -> None:
    """Train to the end, or to the kill."""
    import torch  # here: the process that launches does without
    from torch.utils.data import DataLoader, TensorDataset

    from cpsr import CPSRRecovery
    from cpsr.benchmarks.replay.live_interval import LiveInterval
    from cpsr.benchmarks.replay.model import MixtureGPT, engine_of
    from cpsr.demo.device import join_ranks

    join_ranks(f"file://{part.result.with_suffix('.ranks')}")  # a port that was free may be taken by now
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    engine = engine_of(MixtureGPT(part.mixture, rank, ranks, SEED), BATCH_WINDOWS // ranks)
    train_one = partial(_train, gpt_task(part.mixture.gpt), rank, ranks)
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(part.iterations + part.paired_steps)))
    with CPSRRecovery(engine, part.config) as recovery, found_path(part.result, rank).open("w") as found:

        def note(**values: Any) -> None:
            found.write(json.dumps(values | {"unix_seconds": time.time()}) + "\n")
            found.flush()

        def step() -> None:
            (index,) = next(stream)
            train_one(engine, int(index))
            note(iteration=recovery.iteration)
            if rival is not None and (profile := rival.after_step()) is not None:
                note(profile=profile)

        guard = recovery.restored.guard
        note(iteration=recovery.iteration, method=recovery.restored.method, lost_tokens=guard.get("lost_tokens"))
        rival = None if part.policy is None else LiveInterval(recovery.life, part.policy, part.profile)
        stream = iter(recovery.resume(loader, repeat=True))
        while recovery.iteration < part.iterations:
            step()
            if recovery.iteration == part.killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
        if part.paired_steps:
            other = engine_of(MixtureGPT(part.mixture, rank, ranks, SEED), BATCH_WINDOWS // ranks)
            places = count()

            def alone() -> None:
                train_one(other, next(places))
                if rival is not None:
                    rival.rest()

            note(blocks=_in_blocks(alone, step, part.paired_steps, rival))
        job = recovery.life.job
        note(digest=state_digest(job.adapter), state_bytes=job.shard.state_bytes)
    torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit


def _train(task: TextTask, rank: int, ranks: int, engine: Any, index: int) -> None:
    """One step on this rank's part of the batch of that place."""
    for group in engine.optimizer.param_groups:
        group["lr"] = scheduled_rate("cosine", PEAK_LEARNING_RATE, engine.global_steps, SCHEDULE_ITERATIONS)
    loss = engine(task.batch(SEED, index)[rank::ranks])
    engine.backward(loss)
    engine.step()
    loss.item()


def _in_blocks(
    alone: Callable[[], object], live: Callable[[], object], steps: int, rival: "LiveInterval | None"
) -> dict[str, list[float]]:
    """Blocks as long as a rival's interval, so that each has a checkpoint."""
    block = max(BLOCK, 0 if rival is None else rival.interval_iterations)
    rounds = max(1, steps // (2 * (SETTLING + block)))
    return in_turn({ALONE: alone, LIVE: live}, rounds, block, SETTLING)
