"""A training script with data-loader workers of its own, as a user writes it; started by `terminated.py`.

At a chosen moment every rank writes a file, and stays until another file shows that the signal was sent.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import cpsr.checkpoint.rank_part as part_module
from cpsr import CPSRRecovery, TorchAdapter
from cpsr.demo.device import join_ranks
from tests.device import DEVICE, compute_exactly

ITEMS, BATCH, FEATURES, WIDTH = 64, 4, 6, 16
AFTER = 6  # iterations are complete when the moment comes, but where it is the first step
EVALUATED_EVERY = 3


@dataclass(frozen=True)
class Options:
    """What the job does.

    Attributes:
        directory: of all that the job leaves.
        engine: `deepspeed` or `torch`.
        iterations: end of the run.
        moment: `forward`, `backward`, `evaluation`, `save`, `next` or `first step`; nothing happens where empty.
        loader: more of the loaders' settings.
    """

    directory: str
    engine: str = "torch"
    iterations: int = 20
    moment: str = ""
    loader: dict[str, Any] = field(default_factory=dict)


class Moment:
    """Where this rank is when the signal comes; in its first life alone."""

    def __init__(self, options: Options, rank: int) -> None:
        self._moment = options.moment
        self._there, self._sent = there_path(options.directory, rank), sent_path(options.directory)
        self._after = 0 if options.moment == "first step" else AFTER

    def at(self, moment: str, iteration: int) -> None:
        """Training is at `moment` after so many iterations."""
        chosen = "forward" if self._moment == "first step" else self._moment
        if moment == chosen and iteration >= self._after and not self._sent.exists():
            self._there.write_text(str(os.getpid()))
            if moment != "next":  # there it waits for its workers
                self.wait()

    def wait(self) -> None:
        """Once it is there; in whatever thread or worker, so that the training does not run away."""
        while self._there.exists() and not self._sent.exists():
            time.sleep(0.01)


def there_path(directory: str | Path, rank: int) -> Path:
    """Exists once the rank is at the moment."""
    return Path(directory) / f"there.{rank}"


def sent_path(directory: str | Path) -> Path:
    """Exists once the signal was sent."""
    return Path(directory) / "sent"


class Items(Dataset[Any]):
    """Loads in a worker, which calls `wait` first."""

    def __init__(self, seed: int, wait: Callable[[], None]) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._x = torch.randn(ITEMS, FEATURES, generator=generator)
        self._wait = wait

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._wait()
        return self._x[index], self._x[index].sum().reshape(1)


class Model(torch.nn.Module):
    """Returns its loss."""

    def __init__(self, moment: Callable[[str], None]) -> None:
        super().__init__()
        layers = [torch.nn.Linear(FEATURES, WIDTH), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, 1)]
        self.layers = torch.nn.Sequential(*layers)
        self._moment = moment

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        predicted = self.layers(x)
        if self.training:
            self._moment("forward")
            predicted.register_hook(lambda gradient: self._moment("backward"))
        return torch.nn.functional.mse_loss(predicted, y)


def done() -> None:
    """There is nothing to wait for."""


class Job:
    """One rank."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.moment = Moment(options, self.rank)
        self.iteration = 0
        torch.manual_seed(7)
        self.model = Model(lambda name: self.moment.at(name, self.iteration)).to(DEVICE)
        self.loader = self.batches(Items(1, self.moment.wait if options.moment == "next" else done))
        self.evaluated = self.batches(Items(2, done))

    def batches(self, data: Items) -> "DataLoader[Any]":
        sampler: DistributedSampler[Any] = DistributedSampler(data, self.ranks, self.rank, seed=3)
        return DataLoader(data, BATCH, sampler=sampler, **self.options.loader)

    def evaluate(self) -> None:
        """As users do: between two steps, with a loader that CPSR does not know."""
        self.model.eval()
        with torch.no_grad():
            for x, y in self.evaluated:
                self.model(x.to(DEVICE), y.to(DEVICE))
                self.moment.at("evaluation", self.iteration)
        self.model.train()

    def slow_saves(self) -> None:
        module: Any = part_module
        write = module.write_tensors

        def slowly(*args: Any, **kwargs: Any) -> Any:
            self.moment.at("save", self.iteration)
            return write(*args, **kwargs)

        module.write_tensors = slowly

    def settings(self) -> dict[str, Any]:
        return {
            "run_dir": str(Path(self.options.directory) / "run"),
            "mode": "exact",
            "checkpoint": {"interval_iterations": 4, "fsync": False},
        }

    def note(self, loss: torch.Tensor) -> None:
        line = json.dumps([self.iteration, float(loss.detach()).hex()]) + "\n"
        with (Path(self.options.directory) / f"losses.{self.rank}").open("a") as file:
            file.write(line)

    def trained(self) -> tuple[Any, Callable[[Any], torch.Tensor]]:
        """What CPSR is given, and one step."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if self.options.engine == "deepspeed":
            return self.in_deepspeed(optimizer)

        def step(batch: Any) -> torch.Tensor:
            loss: torch.Tensor = self.model(*(part.to(DEVICE) for part in batch))
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return TorchAdapter(self.model, optimizer), step

    def in_deepspeed(self, optimizer: torch.optim.Optimizer) -> tuple[Any, Callable[[Any], torch.Tensor]]:
        import deepspeed

        join_ranks()  # DeepSpeed by itself would compile a kernel into a folder that all jobs of the user share
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        engine, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)

        def step(batch: Any) -> torch.Tensor:
            loss: torch.Tensor = engine(*(part.to(engine.device) for part in batch))
            engine.backward(loss)
            engine.step()
            return loss

        return engine, step

    def train(self) -> None:
        if self.options.moment == "save":
            self.slow_saves()
        engine, step = self.trained()
        with CPSRRecovery(engine, self.settings()) as recovery:
            self.iteration = recovery.iteration
            batches = recovery.resume(self.loader, repeat=True)
            while recovery.iteration < self.options.iterations:
                self.moment.at("next", self.iteration)
                if self.options.moment == "save":
                    self.moment.wait()  # its thread is the writer's
                batch = next(batches)
                loss = step(batch)
                self.iteration = recovery.iteration
                self.note(loss)
                if self.iteration % EVALUATED_EVERY == 0:
                    self.evaluate()


def main(options: Options) -> None:
    compute_exactly()
    Job(options).train()


if __name__ == "__main__":
    main(Options(**json.loads(sys.argv[1])))
