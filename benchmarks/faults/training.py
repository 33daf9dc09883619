"""One rank of the job that live faults meet: a small DeepSpeed job, which notes every step with its state's digest."""

import hashlib
import json
import os
import random
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import deepspeed
import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cpsr import CPSRRecovery
from cpsr.benchmarks.faults.moments import arm
from cpsr.benchmarks.faults.part import Fault, Part, notes_path
from cpsr.benchmarks.harness.checkpoint_files import commit_file
from cpsr.benchmarks.harness.ranks import state_digest
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.run_directory import run_id
from cpsr.checkpoint.tiers import Source
from cpsr.demo.device import join_ranks
from cpsr.engines import adapt
from cpsr.engines.adapter import EngineAdapter
from cpsr.state.codec import encode

__all__ = ["main"]

ITEMS, BATCH, FEATURES, WIDTH = 48, 4, 6, 16
SEED = 7
POISON = 100.0  # factor on the targets that a predicted state is to diverge from
# Steps this short would outrun the disk, and checkpoints would be skipped: before one is due the last is waited for.
SAVE_SECONDS = 5.0
HANG_SECONDS = 600.0  # longer than any life may take


class Notes:
    """What this rank says while it lives, readable whatever becomes of it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, **values: Any) -> None:
        """One line, at once."""
        os.write(self._descriptor, (json.dumps(values | {"unix_seconds": time.time()}) + "\n").encode())


class Faults:
    """What happens to this rank."""

    def __init__(self, faults: tuple[Fault, ...], rank: int, notes: Notes) -> None:
        self._mine = [fault for fault in faults if rank in fault.ranks]
        self._notes = notes

    def arm(self) -> None:
        """Make ready for all moments but those of the loop."""
        for fault in self._mine:
            arm(fault.moment, fault.at, lambda fault=fault: self._meet(fault))  # type: ignore[misc]

    def at_batch(self, iteration: int) -> None:
        """A step begins after that iteration."""
        for fault in self._mine:
            if fault.moment != "step" or fault.at != iteration:
                continue
            if fault.signal == "hang" or fault.delay_seconds == 0.0:
                self._meet(fault)
            else:
                threading.Timer(fault.delay_seconds, self._meet, [fault]).start()

    def _meet(self, fault: Fault) -> None:
        self._notes.add(kind="injected", fault=str(fault))
        if fault.signal == "hang":
            time.sleep(HANG_SECONDS)
        else:
            os.kill(os.getpid(), getattr(signal, fault.signal))


class Regression(nn.Module):
    """Returns its loss; the dropout makes random states matter, the buffer is state outside the optimizer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, 1))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return nn.functional.mse_loss(self.layers(x), y)


def main(part: Part, rank: int, ranks: int) -> None:
    """Train to the end, or until a fault says otherwise."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a segmentation fault is meant, and nobody looks at its core
    notes = Notes(notes_path(part.result, rank))
    faults = Faults(part.faults, rank, notes)
    engine, batches = _built(part, rank, ranks)
    adapter = adapt(engine)
    faults.arm()
    with CPSRRecovery(engine, part.config) as recovery:
        restored = recovery.restored
        notes.add(
            kind="started",
            iteration=recovery.iteration,
            method=restored.method,
            checkpoint_iteration=restored.checkpoint_iteration,
            reason=restored.reason,
            replayed_until=_replayed_until(restored.sources),
            state=state_digest(adapter),
        )
        for inputs, targets, indices in recovery.resume(batches, repeat=True):
            if recovery.iteration >= part.iterations:
                break  # the last life ended after its last step
            before = recovery.iteration
            if recovery.restored.restored_iteration == 0 and Fault.step_after(part.faults, before):
                _await_window(part, rank, before)
            faults.at_batch(before)
            predicted = recovery.restored.predicted
            if not predicted:  # while such a state is watched none is due
                _keep_pace(part, recovery.restored.restored_iteration, before + 1)
            poisoned = part.poison and predicted
            engine.backward(engine(inputs, POISON * targets if poisoned else targets))
            engine.step()
            notes.add(
                kind="step",
                iteration=before + 1,
                reached=recovery.iteration,
                batch=indices.tolist(),
                state=state_digest(adapter),
                small=_small(adapter),
            )
            if recovery.iteration >= part.iterations:
                break
    notes.add(kind="ended", iteration=recovery.iteration)
    torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit


def _built(part: Part, rank: int, ranks: int) -> tuple[Any, Any]:
    """The engine and the data, both the same in every life."""
    # Through a file: a port that was free a moment ago may be taken by now.
    join_ranks(f"file://{part.result.with_suffix('.ranks')}")
    torch.manual_seed(SEED)
    random.seed(SEED)
    numpy.random.seed(SEED)
    module = Regression()
    x = torch.randn(ITEMS, FEATURES)
    data = TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(ITEMS, 1), torch.arange(ITEMS))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=ranks, rank=rank, seed=SEED)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.01 * step))
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": part.zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=schedule, config=config)
    return engine, DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)


def _keep_pace(part: Part, began_at: int, iteration: int) -> None:
    """Before the checkpoint of `iteration` is due, wait for the last of this life."""
    interval = part.config["checkpoint"]["interval_iterations"]
    if (iteration - began_at) % interval or iteration - began_at == interval:
        return
    last = commit_file(Path(part.config["run_dir"]) / "checkpoints" / step_name(iteration - interval))
    deadline = time.monotonic() + SAVE_SECONDS
    while not last.exists() and time.monotonic() < deadline:
        time.sleep(0.002)


def _await_window(part: Part, rank: int, iteration: int) -> None:
    """Before a failure, wait for the last window that has ended: where it goes back to is then no chance."""
    length = part.config.get("replay", {}).get("window_iterations")
    if length is None:
        return
    first = 1 + (iteration // length - 1) * length
    deadline = time.monotonic() + SAVE_SECONDS
    while time.monotonic() < deadline:
        states = Arena(run_id(Path(part.config["run_dir"]))).list()
        if any((state.rank, state.kind, state.iteration) == (rank, "window", first) for state in states):
            return
        time.sleep(0.002)


def _replayed_until(sources: tuple[Source, ...]) -> int | None:
    """Until after this iteration the state is not whole; None: it is."""
    return max((entry.last for source in sources for entry in source.entries if entry.kind == "window"), default=None)


def _small(adapter: EngineAdapter) -> str:
    """Random states, counters and schedule."""
    tree, tensors = encode(adapter.scalars())
    digest = hashlib.sha256(repr((random.getstate(), numpy.random.get_state(), tree)).encode())
    for _, tensor in sorted([*tensors.items(), ("", torch.get_rng_state())]):
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
