"""One rank of a real mixture of experts under CPSR, which kills itself when it is told to."""

import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpsr.benchmarks.harness.ranks import become_rank, state_digest
from cpsr.benchmarks.recovery.workload import BATCH_WINDOWS, GPTTask, scheduled_rate
from cpsr.demo.model import GPTConfig

__all__ = ["Mixture", "Part", "found_path", "rank_main"]

SEED = 3
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


def found_path(result: Path, rank: int) -> Path:
    """Where a rank's figures lie: one JSON object a line, the first of the beginning, then one a step."""
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
    from cpsr.benchmarks.replay.model import PEAK_LEARNING_RATE, MixtureGPT, engine_of
    from cpsr.demo.device import join_ranks

    join_ranks(f"file://{part.result.with_suffix('.ranks')}")  # a port that was free may be taken by now
    torch.set_num_threads(1)
    mixture = part.mixture
    torch.manual_seed(SEED)
    engine = engine_of(MixtureGPT(mixture, rank, ranks, SEED), BATCH_WINDOWS // ranks)
    task = GPTTask(mixture.gpt)
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(part.iterations)))
    with CPSRRecovery(engine, part.config) as recovery, found_path(part.result, rank).open("w") as found:

        def note(**values: Any) -> None:
            found.write(json.dumps(values | {"unix_seconds": time.time()}) + "\n")
            found.flush()

        guard = recovery.restored.guard
        note(iteration=recovery.iteration, method=recovery.restored.method, lost_tokens=guard.get("lost_tokens"))
        rival = None if part.policy is None else LiveInterval(recovery.life, part.policy, part.profile)
        for (index,) in recovery.resume(loader, repeat=True):
            if recovery.iteration >= part.iterations:
                break
            for group in engine.optimizer.param_groups:
                group["lr"] = scheduled_rate("cosine", PEAK_LEARNING_RATE, recovery.iteration, SCHEDULE_ITERATIONS)
            loss = engine(task.batch(SEED, int(index))[rank::ranks])
            engine.backward(loss)
            engine.step()
            note(iteration=recovery.iteration, loss=loss.item())
            if rival is not None and (profile := rival.after_step()) is not None:
                note(profile=profile)
            if recovery.iteration == part.killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if recovery.iteration >= part.iterations:
                break
        job = recovery.life.job
        note(digest=state_digest(job.adapter), state_bytes=job.shard.state_bytes)
    torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit
