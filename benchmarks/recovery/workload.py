"""Which training runs are interrupted: the model, its text, the schedule of its learning rate, and its length."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Protocol, cast, get_args

import torch
from torch import nn

from cpsr.demo.model import GPT, GPTConfig, read_corpus, split_files
from cpsr.errors import ConfigError

__all__ = [
    "BATCH_WINDOWS",
    "FINAL_CHUNKS",
    "ITERATIONS",
    "OPTIMIZERS",
    "RATE_STEP",
    "SCHEDULES",
    "SEED_STRIDE",
    "TASKS",
    "WORKLOADS",
    "GPTTask",
    "OptimizerName",
    "Schedule",
    "Task",
    "Workload",
    "find_workloads",
    "scheduled_rate",
    "trained_with",
]

# `sgd` has momentum, without Nesterov's step. `muon` updates the 2-D hidden weights with Muon, the rest with AdamW.
OptimizerName = Literal["adamw", "sgd", "muon"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
# `cosine` falls to 0 as half a cosine, `cosine10` to a tenth of the peak. `wsd` (warm-up, stable, decay) stays at the
# peak, and falls linearly to 0 over the last fifth.
Schedule = Literal["cosine", "cosine10", "wsd"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
WARM_UP_ITERATIONS = 50
FLOOR_SHARE = 0.1
DECAY_SHARE = 0.2

FINAL_CHUNKS = 64  # at the end of a training, where a gap of one iteration is some 0.0002 nats
FINAL_CHUNK_WINDOWS = 8
BATCH_WINDOWS = 8
SEED_STRIDE = 1_000_003  # a prime far above any iteration: no two (seed, iteration) share a generator's seed
# Every so many pieces of a text are held out: a twelfth of it.
TOPICS_VALIDATION_EVERY = 12
PACKAGES_VALIDATION_EVERY = 14

_Text = tuple[torch.Tensor, torch.Tensor]  # training and held-out bytes


class Task(Protocol):
    """A model and its data; nothing in it depends on what was drawn before."""

    def model(self) -> nn.Module:
        """A new model, initialised from torch's default generator."""

    def batch(self, seed: int, iteration: int) -> Any:
        """The batch that takes a run from `iteration` to the next: a pure function of its arguments."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Mean loss of the batch in nats, a scalar."""

    def final_losses(self, model: nn.Module) -> torch.Tensor:
        """Mean loss of each chunk of held-out data, `(FINAL_CHUNKS,)` in nats: what the end is judged on."""


def batch_generator(seed: int, iteration: int) -> torch.Generator:
    """Random numbers for one batch, whatever was drawn before."""
    return torch.Generator().manual_seed(seed * SEED_STRIDE + iteration)


@cache
def _library() -> _Text:
    return read_corpus()


@cache
def _headers() -> _Text:
    """The C++ headers that torch installs."""
    root = Path(torch.__file__).parent / "include"
    files = sorted(root.rglob("*.h"))
    if not files:
        raise ConfigError(f"no C++ headers under {root}: this torch was installed without them")
    return split_files(files)


@cache
def _documentation() -> _Text:
    """The language reference that Python's `help()` shows, by topic."""
    from pydoc_data.topics import topics  # half a megabyte, for this one task

    return _split((topics[name] for name in sorted(topics)), TOPICS_VALIDATION_EVERY)


@cache
def _descriptions() -> _Text:
    """What the installed packages, but for this one, say about themselves: mostly English, about a megabyte."""
    known = {package.metadata["Name"].lower(): package.metadata for package in metadata.distributions()}
    known.pop("cpsr", None)
    texts = (str(known[name].json.get("description", "")) for name in sorted(known))
    return _split(texts, PACKAGES_VALIDATION_EVERY)


def _split(pieces: Iterable[str], validation_every: int) -> _Text:
    parts: tuple[list[str], list[str]] = ([], [])
    for place, text in enumerate(pieces):
        parts[place % validation_every == 0].append(text)
    training, validation = (torch.frombuffer(bytearray("".join(part).encode()), dtype=torch.uint8) for part in parts)
    return training, validation


_TEXTS: dict[str, Callable[[], _Text]] = {
    "library": _library,
    "headers": _headers,
    "documentation": _documentation,
    "descriptions": _descriptions,
}


class GPTTask:
    """Next-byte prediction (a `Task`); a batch is `(8, context + 1)` int64 windows at random places."""

    def __init__(self, config: GPTConfig, text: str = "library") -> None:
        self._config = config
        self._text, self._held_out = _TEXTS[text]()

    def model(self) -> nn.Module:
        """A new model, initialised from torch's default generator."""
        return GPT(self._config)

    def batch(self, seed: int, iteration: int) -> torch.Tensor:
        """Windows that begin anywhere in the training text."""
        last = self._text.numel() - self._config.context
        starts = torch.randint(last, (BATCH_WINDOWS,), generator=batch_generator(seed, iteration))
        return self._windows(self._text, starts)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Mean cross-entropy in nats a byte."""
        loss: torch.Tensor = model(batch)
        return loss

    def final_losses(self, model: nn.Module) -> torch.Tensor:
        """Mean loss of each chunk of eight held-out windows, the same in all runs."""
        device = next(model.parameters()).device
        count = FINAL_CHUNKS * FINAL_CHUNK_WINDOWS
        starts = torch.linspace(0, self._held_out.numel() - self._config.context - 1, count).long()
        chunks = self._windows(self._held_out, starts).view(FINAL_CHUNKS, FINAL_CHUNK_WINDOWS, -1)
        return torch.stack([cast(GPT, model).losses(chunk.to(device)).mean() for chunk in chunks])

    def _windows(self, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return text[starts[:, None] + torch.arange(self._config.context + 1)].long()


def scheduled_rate(schedule: Schedule, peak: float, iteration: int, iterations: int) -> float:
    """Learning rate of the update that takes a training from `iteration` to the next."""
    warmed = peak * min(1.0, (iteration + 1) / WARM_UP_ITERATIONS)
    done = min(1.0, iteration / iterations)
    if schedule == "wsd":
        return warmed * min(1.0, (1.0 - done) / DECAY_SHARE)
    falling = 0.5 * (1.0 + math.cos(math.pi * done))
    floor = FLOOR_SHARE if schedule == "cosine10" else 0.0
    return warmed * (floor + (1.0 - floor) * falling)


@dataclass(frozen=True)
class Workload:
    """One training run, up to its seed.

    Attributes:
        name: task and schedule, as on the command line.
        task: builds the model and its data.
        schedule: of the learning rate, after a warm-up.
        peak_learning_rate: reached after the warm-up.
        iterations: length of the whole training; fractions of it say where a failure strikes.
        snapshot_iterations: weights are kept this often: every interval that divides by it can be studied.
        optimizer: its name.
    """

    name: str
    task: Callable[[], Task] = field(compare=False)  # made anew in every process
    schedule: Schedule
    peak_learning_rate: float
    iterations: int
    snapshot_iterations: int = 10
    optimizer: OptimizerName = "adamw"

    def learning_rate(self, iteration: int) -> float:
        """Of the update that takes the run from `iteration` to the next."""
        return scheduled_rate(self.schedule, self.peak_learning_rate, iteration, self.iterations)

    @cached_property
    def times(self) -> list[float]:
        """Cumulative learning rate up to each iteration, `iterations + 1` of them."""
        sums = [0.0]
        for iteration in range(self.iterations):
            sums.append(sums[-1] + self.learning_rate(iteration))
        return sums

    def of_length(self, iterations: int) -> "Workload":
        """The same training under a schedule of another length."""
        return replace(self, name=f"{self.name}-{iterations}", iterations=iterations)

    def peak_until(self, iteration: int) -> float:
        """Largest learning rate of the updates before `iteration`."""
        return max((self.learning_rate(at) for at in range(iteration)), default=0.0)


# A context of 64 keeps a step at 20 and 40 ms on one core.
_SIZES = {
    "gpt-0.1M": GPTConfig(layers=2, heads=4, width=64, context=64),  # for the prior: four times the recoveries an hour
    "gpt-0.4M": GPTConfig(layers=3, heads=4, width=96, context=64),
}
TASKS: dict[str, Callable[[], Task]] = {
    **{size: partial(GPTTask, config) for size, config in _SIZES.items()},
    "gpt-0.1M-descriptions": partial(GPTTask, _SIZES["gpt-0.1M"], "descriptions"),
    "gpt-0.4M-headers": partial(GPTTask, _SIZES["gpt-0.4M"], "headers"),
    "gpt-0.4M-documentation": partial(GPTTask, _SIZES["gpt-0.4M"], "documentation"),
}


def trained_with(task: str, optimizer: OptimizerName) -> str:
    """The task's name, and the optimizer's where it is not AdamW."""
    return task if optimizer == "adamw" else f"{task}-{optimizer}"


ITERATIONS = 1200
RATE_STEP = 1.4
# Peak rates at which trainings of this length end best: benchmarks/results/2026-11-23-tune*.json (`cpsr bench tune`).
TUNED: dict[tuple[str, Schedule], float] = {
    ("gpt-0.1M", "cosine"): 2.744e-3,
    ("gpt-0.1M", "cosine10"): 2.744e-3,
    ("gpt-0.1M", "wsd"): 2.744e-3,
    ("gpt-0.4M", "cosine10"): 2.744e-3,
    ("gpt-0.4M-documentation", "cosine10"): 3.842e-3,
    ("gpt-0.4M-headers", "cosine10"): 3.842e-3,
}
# Of the best rate, and of its neighbours in the sweep.
BESIDE = {"": 1.0, "-lower": 1 / RATE_STEP, "-higher": RATE_STEP}
WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(f"{task}-{schedule}{beside}", TASKS[task], schedule, best * factor, ITERATIONS)
        for (task, schedule), best in TUNED.items()
        for beside, factor in BESIDE.items()
    )
}


def find_workloads(names: str) -> tuple[str, ...]:
    """Names of workloads from a comma-separated list, where a task stands for all its schedules at the best rates.

    Raises:
        ConfigError: a name is none of a workload or a task.
    """
    found: list[str] = []
    for name in names.split(","):
        matching = [known for known in WORKLOADS if known == name or known.removeprefix(f"{name}-") in SCHEDULES]
        if not matching:
            raise ConfigError(f"no workload is called '{name}'; there are {', '.join(WORKLOADS)}")
        found += [known for known in matching if known not in found]
    return tuple(found)
