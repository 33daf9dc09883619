"""Memory of a training process over a run with a failure, with the predictor and without it."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from cpsr.benchmarks.harness.sampling import Sampling
from cpsr.benchmarks.predictor_cost.memory import resident
from cpsr.config import CPSRConfig
from cpsr.demo.model import GPT, GPTConfig, Windows, read_corpus
from cpsr.engines.torch import TorchAdapter
from cpsr.learning.memory import history_checkpoints
from cpsr.predictor.footprint import fitted
from cpsr.recovery import CPSRRecovery

__all__ = ["MODEL", "Timeline", "bound_bytes", "record_life"]

# 7 million weights; its larger matrices take two slices of the predictor's and more.
MODEL = GPTConfig(layers=4, heads=6, width=384)
BATCH = 1  # windows
INTERVAL_ITERATIONS = 10
SAMPLE_SECONDS = 0.02
# Enough that a checkpoint is learned from before the next one: what is asked here is how much, not how fast.
LEARNING_BUDGET_FRACTION = 0.25


@dataclass
class Timeline:
    """One life of a run, in a process of its own.

    Attributes:
        samples: seconds since the start, and the process's own memory then in bytes (RssAnon).
        trained_seconds: when it began to train.
        learned_checkpoints: that the predictor had learned from at its end.
        predicted: whether it began at a predicted state.
    """

    samples: list[tuple[float, int]] = field(default_factory=list)
    trained_seconds: float = 0.0
    learned_checkpoints: int = 0
    predicted: bool = False

    @property
    def peak_bytes(self) -> int:
        """The largest sample."""
        return max(memory for _, memory in self.samples)


class _FailureError(Exception):
    """Ends a life as an error in the user's loop would."""


def record_life(run_dir: Path, predicts: bool, iterations: int, fails: bool, model: GPTConfig, device: str) -> Timeline:
    """Train, or come back and train on; in a process of its own.

    Args:
        run_dir: of the run; where its last life failed, this one recovers.
        predicts: with the predictor: it learns from every checkpoint, and predicts the state at the failure. Without,
            the run goes on from its last checkpoint.
        iterations: that it trains.
        fails: ends with an error in the training loop.
        model: shape of the model.
        device: that it trains on; the memory is the host's.
    """
    logging.getLogger().addHandler(logging.NullHandler())  # no line for every checkpoint
    timeline, started = Timeline(), time.perf_counter()

    def note() -> None:
        timeline.samples.append((time.perf_counter() - started, resident().anonymous_bytes))

    with Sampling(note, SAMPLE_SECONDS), suppress(_FailureError), _life(run_dir, predicts, model, device) as life:
        recovery, train = life
        timeline.trained_seconds = time.perf_counter() - started
        timeline.predicted = recovery.restored.predicted
        for _ in range(iterations):
            next(train)
        learned: dict[str, Any] = recovery.life.loop.learning.learner.state_dict()
        timeline.learned_checkpoints = learned["vitp"]["checkpoints"]
        if fails:
            raise _FailureError
    return timeline


def bound_bytes(model: GPTConfig) -> int:
    """What the predictor may take in such a run by its own arithmetic."""
    with torch.device("meta"):
        operators = len(list(GPT(model).parameters()))
    config = CPSRConfig.load(_configuration(Path(), predicts=True))
    limit, chunk = config.learning.memory_limit_bytes, config.predictor.chunk_elements
    return fitted(limit, operators, history_checkpoints(config), chunk).peak_bytes


def _configuration(run_dir: Path, predicts: bool) -> dict[str, Any]:
    return {
        "run_dir": run_dir,
        "mode": "predict" if predicts else "exact",
        # What the first life leaves in shared memory is exact, and would spare the second its prediction.
        "checkpoint": {"interval_iterations": INTERVAL_ITERATIONS, "final": False, "shared_memory": False},
        "learning": {"budget_fraction": LEARNING_BUDGET_FRACTION if predicts else 0.0},
    }


@contextmanager
def _life(
    run_dir: Path, predicts: bool, shape: GPTConfig, device: str
) -> Iterator[tuple[CPSRRecovery, Iterator[None]]]:
    torch.manual_seed(0)
    model = GPT(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    text, _ = read_corpus()
    loader = DataLoader(Windows(text, shape.context), batch_size=BATCH, drop_last=True)

    def train(recovery: CPSRRecovery) -> Iterator[None]:
        for batch in recovery.resume(loader, repeat=True):
            optimizer.zero_grad()
            model(batch.to(device)).backward()
            optimizer.step()
            yield

    with CPSRRecovery(TorchAdapter(model, optimizer), _configuration(run_dir, predicts)) as recovery:
        yield recovery, train(recovery)
