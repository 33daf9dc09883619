"""One rank of a pipeline whose stages wait for each other long enough for the predictor to learn meanwhile."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import cpsr.learning.learning
import cpsr.learning.pace
import cpsr.predictor.training
from cpsr import CPSRRecovery
from cpsr.predictor.vitp import VITPPredictor
from tests.learning.accounts import account_of
from tests.recovery import worker
from tests.recovery.engines import FEATURES, WIDTH, configuration, dataset, initialize, loader
from tests.recovery.job import LifeOptions

COMPUTE_SECONDS = 0.02  # of a stage and micro-batch: the other stage waits as long, and a slice takes some milliseconds
STAGES, MICRO_BATCHES = 2, 2
LATER_ITERATIONS = (8, 16)  # in place of the usual ones: the network is trained on some 30 iterations, and not on 120
STARVED_SECONDS = 0.3  # likewise: the job takes no longer than some seconds


@dataclass(frozen=True)
class Options(LifeOptions):
    """What the job does.

    Attributes:
        alone: train without CPSR.
    """

    alone: bool = False


class Slow(nn.Module):
    """Computes for a while."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(COMPUTE_SECONDS)
        return x


def main(options: Options, rank: int, ranks: int) -> None:
    cpsr.predictor.training.LATER_ITERATIONS = LATER_ITERATIONS
    cpsr.learning.pace.STARVED_SECONDS = STARVED_SECONDS
    turning = partial(VITPPredictor, direction="vitp")  # a network that is never asked is not trained
    setattr(cpsr.learning.learning, "VITPPredictor", turning)  # noqa: B010 - mypy refuses it otherwise
    worker.initialize_ranks(options.result)
    worker.seed()
    engine = initialize(stages(), configuration(0, "fp32", MICRO_BATCHES))
    data = loader(dataset(), 1, 0)
    found: dict[str, Any] = {"losses": []}
    with ExitStack() as stack:
        batches: Iterator[Any] = passes(data)
        if not options.alone:
            recovery = stack.enter_context(CPSRRecovery(engine, options.config))
            learning = recovery.life.loop.learning
            pace = learning.learner.pace
            assert pace is not None
            account = account_of(pace, learning.bubbles)
            batches = recovery.resume(data, repeat=True)
        found["started"] = 0 if options.alone else recovery.iteration
        pairs = ((inputs, targets) for inputs, targets, _ in batches)
        for _ in range(found["started"], options.iterations):
            found["losses"].append(engine.train_batch(pairs).item().hex())
        found["weights"] = [parameter.double().sum().item().hex() for parameter in engine.module.parameters()]
        if not options.alone:
            learned = recovery.life.loop.learning.predictor.state_dict()["vitp"]
            found["learned"], found["trained"] = learned["statistics"]["seen"], learned["head"] is not None
    if not options.alone:
        found["account"] = vars(account)
    found["threads"] = [thread.name for thread in threading.enumerate()]
    options.leave(rank, found)
    torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit


def passes(data: Any) -> Iterator[Any]:
    """Every pass in an order of its own, as `resume(repeat=True)` deals them."""
    for epoch in count():
        data.sampler.set_epoch(epoch)
        yield from data


def stages() -> PipelineModule:
    layers = [
        LayerSpec(nn.Linear, FEATURES, WIDTH),
        LayerSpec(Slow),
        LayerSpec(nn.Dropout, 0.1),
        LayerSpec(Slow),
        LayerSpec(nn.Linear, WIDTH, 1),
    ]
    return PipelineModule(layers, num_stages=STAGES, loss_fn=nn.MSELoss(), partition_method="uniform")
