"""One rank of a pipeline with windows, whose ranks kill themselves at chosen points; used by `test_localized.py`."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.memory_states import SHARED_MEMORY
from cpsr.checkpoint.run_directory import run_id
from tests.recovery.job import LifeOptions
from tests.recovery.worker import final_state, initialize_ranks, seed

WORDS, WIDTH, HIDDEN, BATCH = 24, 8, 16, 4
OVERFLOWS_AT = 19  # the loss of this iteration has no number in fp16


@dataclass(frozen=True)
class Options(LifeOptions):
    """What one life does.

    Attributes:
        zero, precision, micro_batches, stages: of the engine.
        killed: rank -> the iteration after which it kills itself, once `awaited` is there.
        awaited: a window of every rank that begins with this iteration, or a later one.
        received: another machine must have a window of it that begins with this iteration, or a later one, too.
        step_seconds: how much longer each step takes: in short ones few windows are sent.
        noisy: a rank whose layers give something else in this life.
        evaluates: an iteration after which the loop evaluates.
        averages: the loop registers an average of its stage's weights.
    """

    zero: int = 1
    precision: str = "fp32"
    micro_batches: int = 2
    stages: int = 3
    killed: dict[int, int] = field(default_factory=dict)
    awaited: int = 0
    received: int | None = None
    step_seconds: float = 0.0
    noisy: int | None = None
    evaluates: int | None = None
    averages: bool = False


def main(options: Options, rank: int, ranks: int) -> None:
    initialize_ranks(options.result)
    seed()
    engine = build(options)
    if rank == options.noisy:
        engine.module.register_forward_hook(lambda module, args, output: output * 1.001)
    tokens = torch.randint(0, WORDS, (60, 6))
    replicas = ranks // options.stages
    part = tokens[rank % replicas :: replicas]
    loader = DataLoader(TensorDataset(part[:, :-1], part[:, 1:]), BATCH, shuffle=True, drop_last=True)
    average = {name: one.detach().clone() for name, one in engine.module.named_parameters() if options.averages}
    with CPSRRecovery(engine, options.config) as recovery:
        if average:
            recovery.register("average", average)
        started = {"iteration": recovery.iteration, "reason": recovery.restored.reason}
        losses = train(recovery, engine, loader, options, rank, average)
        result = {"started": started, "losses": losses} | final_state(recovery, engine)
        result["average"] = [float(values.double().sum()) for values in average.values()]
    options.leave(rank, result)
    torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit


def build(options: Options) -> Any:
    layers = [
        TiedLayerSpec("embed", nn.Embedding, WORDS, WIDTH),
        LayerSpec(nn.Dropout, 0.2),
        LayerSpec(nn.Linear, WIDTH, HIDDEN),
        LayerSpec(nn.Tanh),
        LayerSpec(nn.Linear, HIDDEN, HIDDEN),
        LayerSpec(nn.Dropout, 0.1),
        LayerSpec(nn.Linear, HIDDEN, WIDTH),
        TiedLayerSpec("embed", nn.Embedding, WORDS, WIDTH, forward_fn=project),
    ]
    loss = Loss()
    module = PipelineModule(layers, options.stages, loss_fn=loss, partition_method="uniform", seed_layers=False)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": options.micro_batches,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": options.zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if options.precision != "fp32":
        more = {"initial_scale_power": 8, "loss_scale_window": 5} if options.precision == "fp16" else {}
        config[options.precision] = {"enabled": True, **more}
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.01 * step))
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=schedule, config=config)
    if options.precision == "fp16":
        loss.engine = engine
    return engine


class Loss:
    """Cross-entropy, which overflows in one iteration of fp16."""

    engine: Any = None

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        overflows = self.engine is not None and self.engine.global_steps + 1 == OVERFLOWS_AT
        return loss * 1e8 if overflows else loss


def project(embedding: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(hidden, embedding.weight)


def train(
    recovery: CPSRRecovery, engine: Any, loader: Any, options: Options, rank: int, average: dict[str, torch.Tensor]
) -> dict[int, list[Any]]:
    losses: dict[int, list[Any]] = {}
    data = batches(recovery, loader)
    while recovery.iteration < options.iterations:
        if recovery.iteration == options.killed.get(rank):
            await_window(Path(options.config["run_dir"]), options)
            await_replica(Path(options.config["run_dir"]), rank, options.received)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(options.step_seconds)
        loss = engine.train_batch(data)
        for name, values in average.items():  # of this step, whose state is saved when train_batch is called again
            values.lerp_(engine.module.get_parameter(name).detach(), 0.1)
        losses[recovery.iteration] = [float(loss), str(engine.get_global_grad_norm())]
        if recovery.iteration == options.evaluates:
            engine.eval_batch(iter([next(iter(loader))] * options.micro_batches))
    return losses


def batches(recovery: CPSRRecovery, loader: Any) -> Iterator[Any]:
    yield from recovery.resume(loader, repeat=True)


def await_window(run_dir: Path, options: Options) -> None:
    deadline = time.monotonic() + 20
    while options.awaited and time.monotonic() < deadline:
        windows = [state for state in Arena(run_id(run_dir)).list() if state.kind == "window"]
        ranks: dict[int, set[int]] = {}
        for window in windows:
            ranks.setdefault(window.iteration, set()).add(window.rank)
        whole = [at for at, there in ranks.items() if len(there) == torch.distributed.get_world_size()]
        if any(at >= options.awaited for at in whole):
            return
        time.sleep(0.005)


def await_replica(run_dir: Path, rank: int, first: int | None) -> None:
    deadline = time.monotonic() + 20
    arenas = [Arena(run_id(run_dir), node) for node in SHARED_MEMORY.parent.iterdir()]
    while first is not None and time.monotonic() < deadline:
        states = [state for arena in arenas for state in arena.list() if state.place == "replica"]
        if any((state.rank, state.kind) == (rank, "window") and state.iteration >= first for state in states):
            return
        time.sleep(0.005)
