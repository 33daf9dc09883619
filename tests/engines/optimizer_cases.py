"""Jobs with one optimizer or several, and a checkpoint of each on the disk; see `test_optimizer_state.py`."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.engines import TorchAdapter
from cpsr.qualify.conformance import Recorder, seed
from cpsr.restart.injection import Injection
from tests.device import DEVICE
from tests.engines.torch_cases import lay_out

Make = Callable[[nn.Module], Any]
WIDTH = 12


class Mixed(nn.Module):
    """Parameters of every shape, one in `channels_last`, one without dimensions, and one that has never a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, 3)
        lay_out(self.conv, torch.channels_last)
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.idle = nn.Parameter(torch.ones(5, 3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(images).mean((2, 3))
        loss: torch.Tensor = ((self.down(torch.tanh(self.up(hidden))) * self.scale - hidden) ** 2).mean()
        return loss

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(4, 3, 5, 5)


class Alike(nn.Module):
    """Four matrices and three vectors of one shape each, and one matrix of another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=index < 3) for index in range(4))
        self.last = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = rows + torch.tanh(layer(rows))
        loss: torch.Tensor = self.last(rows).square().mean()
        return loss

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(4, WIDTH)


class Embedded(nn.Module):
    """Gradients of its embedding are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.embed(tokens) ** 2).mean()
        return loss

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randint(0, 9, (6,))


class Large(nn.Module):
    """A matrix large enough for optimizers that keep 8 bits of large tensors alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(70, 80)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.first(rows), torch.arange(len(rows), device=rows.device))

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(4, 70)


def train_step(module: Any, optimizers: list[torch.optim.Optimizer], batch: torch.Tensor) -> float:
    """One step of a plain loop; the loss."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = module(batch)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return float(loss.item())


class Job:
    """A plain loop; what its optimizers keep is laid out before the first step, as a life does."""

    def __init__(self, make: Make, model: type[Any] = Mixed, start: int = 0) -> None:
        seed(start)
        self.module: Any = model().to(DEVICE)
        made = make(self.module)
        self.optimizers: list[torch.optim.Optimizer] = made if isinstance(made, list) else [made]
        self.adapter = TorchAdapter(self.module, made)
        self.recorder = Recorder()
        self.adapter.attach(self.recorder)
        self.pool = SnapshotPool(self.adapter.shard(), 1)

    def train(self, first: int, steps: int) -> list[float]:
        """The losses of these steps, whose batches depend on their numbers alone."""
        losses = []
        for step in range(first, first + steps):
            seed(1000 + step)
            batch = self.module.batch().to(DEVICE)
            losses.append(train_step(self.module, self.optimizers, batch))
        return losses

    def save(self, store: CheckpointStore) -> int:
        """Commit a checkpoint of the state as it is; returns its iteration."""
        at = self.adapter.iteration
        small = {"engine": self.adapter.scalars(on_device=True)}
        assert self.pool.begin(self.adapter.shard(), at, small) is not None
        snapshot = self.pool.finish()
        assert snapshot is not None
        store.write(snapshot)
        assert store.commit(at, 5.0, threading.Event()).committed
        self.pool.release(snapshot)
        return at

    def restore(self, store: CheckpointStore, iteration: int) -> None:
        """Take a committed checkpoint from the disk, as a restart does."""
        snapshot = self.pool.acquire(iteration)
        assert snapshot is not None
        snapshot.scalars = store.load(iteration, snapshot.shard)
        job: Any = SimpleNamespace(adapter=self.adapter, group=None, config=SimpleNamespace(run_dir=Path()))
        unused: Any = None
        Injection(job, unused, unused, None).inject(snapshot)
        self.pool.release(snapshot)

    def state(self) -> list[Any]:
        """Weights, and all that the optimizers keep: entries that are absent, too."""
        parameters = [
            one for optimizer in self.optimizers for group in optimizer.param_groups for one in group["params"]
        ]
        kept = [[optimizer.state.get(one, "absent") for one in parameters] for optimizer in self.optimizers]
        groups = [
            [{key: value for key, value in group.items() if key != "params"} for group in one.param_groups]
            for one in self.optimizers
        ]
        return [list(self.module.parameters()), kept, groups]


def store_in(directory: Path) -> CheckpointStore:
    store = CheckpointStore(directory, 0, 1, "run", 0)
    store.prepare()
    return store


def differences(found: Any, expected: Any, place: str = "") -> list[str]:
    """Where two trees differ: in a type, a key, the bits of a tensor, its strides, type or device."""
    if type(found) is not type(expected):
        return [f"{place}: {type(found).__name__} for {type(expected).__name__}"]
    if isinstance(found, torch.Tensor):
        kind = [(one.shape, one.stride(), one.dtype, one.device) for one in (found, expected)]
        if kind[0] != kind[1]:
            return [f"{place}: {kind[0]} for {kind[1]}"]
        same = torch.equal(*(one.detach().reshape(-1).view(torch.uint8) for one in (found, expected)))
        return [] if same else [f"{place}: other bits"]
    if isinstance(found, dict):
        if list(found) != list(expected):
            return [f"{place}: keys {list(found)} for {list(expected)}"]
        return [one for key in found for one in differences(found[key], expected[key], f"{place}.{key}")]
    if isinstance(found, list | tuple):
        if len(found) != len(expected):
            return [f"{place}: {len(found)} items for {len(expected)}"]
        pairs = enumerate(zip(found, expected, strict=True))
        return [one for index, (a, b) in pairs for one in differences(a, b, f"{place}.{index}")]
    # Numbers to the sign of a zero.
    return [] if repr(found) == repr(expected) else [f"{place}: {found!r} for {expected!r}"]


def check_resumed(make: Make, directory: Path, model: type[Any] = Mixed, at: int = 3) -> Job:
    """A checkpoint from the disk in another job, also in one that has trained: bitwise what never stopped would be.

    Returns:
        The job that was restored.
    """
    store = store_in(directory)
    first = Job(make, model)
    first.train(0, at)
    assert first.save(store) == at
    losses = first.train(at, 3)
    other = Job(make, model, start=7)
    for name, weights in other.adapter.frozen().items():  # a life has files of their own for these
        weights.copy_(first.adapter.frozen()[name])
    for before in (0, 2):  # steps that the other has trained
        other.train(50, before)
        other.restore(store, at)
        assert other.train(at, 3) == losses
        assert differences(other.state(), first.state()) == []
    return other


class AveragingAdamW(torch.optim.AdamW):
    """Keeps more than its base: an average of the weights, and a counter among its own attributes."""

    def __init__(self, parameters: Iterable[Any], **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.taken += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    average = self.state[parameter].setdefault("average", parameter.detach().clone())
                    average.lerp_(parameter, 1 / self.taken)
        return result


class Nested(torch.optim.Optimizer):
    """State of every kind and depth, created in its first and its second step."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    self._create(state, parameter)
                self._move(state, parameter, group["lr"])
        beside: dict[Any, Any] = self.state  # of no parameter
        beside["calls"] = beside.get("calls", 0) + 1

    def _create(self, state: dict[Any, Any], parameter: torch.Tensor) -> None:
        rows, where = parameter.shape[0] if parameter.dim() else 1, parameter.device
        state["a.b/c"] = {"rows": torch.zeros(rows, device=where), 3: [torch.zeros_like(parameter), None, "text", True]}
        state["pair"] = (torch.zeros(1, device=where), OrderedDict(half=torch.zeros(2, 3, dtype=torch.float16)))
        state["mask"] = torch.zeros(parameter.shape, dtype=torch.bool, device=where)
        state["x.y/z"], state[7] = torch.zeros(rows, device=where), torch.zeros_like(parameter)
        state["counts"] = {"steps": 0, "scale": -0.0, "single": torch.tensor(0, dtype=torch.int16), "empty": {}}
        state["none"] = None

    def _move(self, state: dict[Any, Any], parameter: torch.Tensor, lr: float) -> None:
        gradient = parameter.grad
        assert gradient is not None
        inner, counts = state["a.b/c"], state["counts"]
        inner["rows"].add_(gradient.reshape(len(inner["rows"]), -1).mean(1))
        inner[3][0].lerp_(gradient, 0.5)
        state["pair"][0].add_(gradient.abs().max())
        state["pair"][1]["half"].add_(0.25)
        state["mask"] = gradient > 0  # a new tensor in every step
        state["x.y/z"].add_(inner["rows"])
        state[7].sub_(gradient)
        counts["steps"] += 1
        counts["single"] += 1
        if "late" not in state and counts["steps"] == 2:
            state["late"] = torch.zeros_like(parameter)
        parameter.sub_(inner[3][0], alpha=lr / (1 + float(state["pair"][0])))
        if "late" in state:
            state["late"].add_(parameter)


class Stacked(torch.optim.Optimizer):
    """Keeps one state for all parameters of a shape, at the first of them: a momentum, and one number a row of each.

    Args:
        parameters: of any shapes.
        short: of so many steps the momentum is kept by step, so that it grows.
    """

    def __init__(self, parameters: Iterable[Any], short: int = 0) -> None:
        super().__init__([one for one in parameters if one.dim()], {"lr": 0.05, "short": short})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            shapes: dict[Any, list[Any]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for alike in shapes.values():
                self._move(alike, group)

    def _move(self, alike: list[Any], group: dict[str, Any]) -> None:
        gradients = torch.stack([one.grad for one in alike])
        state = self.state[alike[0]]
        if not state:
            state["momentum"] = torch.zeros_like(gradients)
            state["rows"] = torch.zeros(gradients.shape[:2], device=gradients.device)
            state["past"] = gradients[:0].sum(0, keepdim=True)
        state["momentum"].mul_(0.9).add_(gradients)
        state["rows"].lerp_(gradients.square().flatten(2).mean(2) if gradients.dim() > 2 else gradients, 0.5)
        if len(state["past"]) < group["short"]:
            state["past"] = torch.cat([state["past"], gradients[:1]])
        for parameter, momentum in zip(alike, state["momentum"], strict=True):
            parameter.sub_(momentum + state["past"].mean(0), alpha=group["lr"] / (1 + float(state["rows"].mean())))


class Untried(torch.optim.SGD):
    """Steps on no other parameters than its own, so that no copy of it can be tried; keeps a number beside its state.

    Args:
        parameters: its own.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        own = list(parameters)
        super().__init__(own, lr=0.1, momentum=0.9)
        self.decay = 1.0
        self._own = frozenset(map(id, own))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if any(id(one) not in self._own for one in group["params"]):
                raise ValueError("parameters of another optimizer")
            group["lr"] = 0.1 * self.decay
        self.decay *= 0.9
        return super().step(closure)


def two_dimensional(module: nn.Module) -> tuple[list[Any], list[Any]]:
    """The matrices, and the rest."""
    every: Sequence[Any] = list(module.parameters())
    return [one for one in every if one.dim() == 2], [one for one in every if one.dim() != 2]
