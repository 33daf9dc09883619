"""A user's training loop of which steps are repeated, for subclasses that each do one thing otherwise."""

import collections
import os
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery
from cpsr.engines import TorchAdapter
from cpsr.journal import JournalReader
from cpsr.verification.account import Account
from tests.device import DEVICE
from tests.situations.lives import backward

WORDS, STEPS, INTERVAL = 40, 14, 2
DISK_SECONDS = 30.0


class Net(nn.Module):
    """Keeps a buffer, a counter and a hidden state, and drops some activations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(WORDS, 12), nn.Linear(12, 24)
        self.norm, self.drop, self.head = nn.BatchNorm1d(24), nn.Dropout(0.2), nn.Linear(24, WORDS)
        self.calls = self.ds_calls = 0  # as DeepSpeed begins its names
        self.hidden: torch.Tensor | None = None
        self.slow = torch.zeros(24, device=DEVICE)  # no buffer
        self.norms: list[float] = []
        self.chance = random.Random(5)
        self.remembers, self.secret, self.scale = True, False, 1.0
        self.targets: torch.Tensor | None = None
        self._private, self.counts, self.recent = 0, collections.Counter[str](), collections.deque[int](maxlen=3)

    def forward(self, tokens: torch.Tensor) -> Any:
        self.calls += 1
        self.ds_calls += 1
        self._private += 1
        self.counts["forward"] += 1
        self.recent.append(self._private)
        hidden = torch.relu(self.norm(self.up(self.embed(tokens)))) * self.scale
        hidden = (
            hidden + 1e-3 * (self._private + self.ds_calls + self.counts["forward"] + self.recent[0]) * self.remembers
        )
        if self.hidden is not None:
            hidden = hidden + 0.1 * self.hidden
        self.hidden = hidden.detach().mean(0) if self.remembers else None
        if self.hidden is not None:
            self.slow.mul_(0.9).add_(self.hidden)
            self.norms.append(self.slow.norm().item() + self.chance.random())
            hidden = hidden + 0.01 * self.slow + 1e-3 * self.norms[-1]
        if self.secret:
            hidden = hidden * (1.0 + int.from_bytes(os.urandom(1)) / 1e4)
        logits: torch.Tensor = self.head(self.drop(hidden)) * (1.01 if self.remembers and self.calls % 3 == 0 else 1.0)
        if self.targets is not None:
            return functional.cross_entropy(logits, self.targets), logits
        return logits


class Loop:
    """A user's loop; a subclass does one thing otherwise. `run` returns all that it trained.

    Attributes:
        verified: iterations that were verified.
        off: why no step is verified any more.
    """

    micro_batches = 1

    def __init__(self) -> None:
        torch.manual_seed(3)
        random.seed(3)
        self.model = Net().to(DEVICE)
        self.begin_training()
        data = torch.randint(WORDS, (512, 2))
        self.loader: Any = DataLoader(TensorDataset(data[:, 0], data[:, 1]), batch_size=8, shuffle=True)

    def begin_training(self) -> None:
        """Make what trains the parameters that the model has now."""
        self.optimizer = self.make_optimizer()
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), 1e-2)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(tokens), targets)

    def begin(self, recovery: CPSRRecovery) -> None:
        """Before the first step."""

    def before_update(self) -> None:
        """Between backward and step."""

    def update(self) -> None:
        self.optimizer.step()
        self.scheduler.step()

    def after_update(self) -> None:
        """After the step."""

    def before_step(self, recovery: CPSRRecovery) -> None:
        """Before the forward."""

    def run(self, run_dir: Path, fraction: float, steps: int = STEPS) -> list[torch.Tensor]:
        torch.manual_seed(4)
        random.seed(4)
        Account(trained_seconds=1e9).save(prepared(run_dir))
        config = {
            "run_dir": run_dir,
            "mode": "exact",
            "checkpoint": {"interval_iterations": INTERVAL},
            "memory": {"interval_iterations": 10**6},
            "verification": {"budget_fraction": fraction},
        }
        adapter = TorchAdapter(
            self.model, self.optimizer, self.scheduler, micro_batches_per_iteration=self.micro_batches
        )
        with CPSRRecovery(adapter, config) as recovery:
            self.begin(recovery)
            taken = 0
            for tokens, targets in recovery.resume(self.loader, epochs=4):
                recovery.life.saver.drain(DISK_SECONDS)
                self.before_step(recovery)
                backward(self.loss(tokens.to(DEVICE), targets.to(DEVICE)) / self.micro_batches)
                taken += 1
                if taken % self.micro_batches:
                    continue
                self.before_update()
                self.update()
                self.after_update()
                self.optimizer.zero_grad()
                if recovery.iteration >= steps:
                    break
        account = Account.of_run(run_dir)
        self.verified, self.off = account.verified, account.off
        moments = [values for one in self.optimizer.state.values() for values in one.values()]
        state = [*self.model.state_dict().values(), torch.tensor(self.model.calls), torch.get_rng_state(), *moments]
        state += [self.model.slow, torch.tensor(self.model.norms)]
        return [one.clone() for one in state if isinstance(one, torch.Tensor)]


def prepared(run_dir: Path) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def trained_as_alone(kind: type[Loop], folder: Path) -> Loop:
    """A loop whose steps were repeated, and that came to the same bits as one that was left alone."""
    alone, watched = kind(), kind()
    expected, found = alone.run(folder / "alone", 0.0), watched.run(folder / "watched", 1.0)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert not alone.verified
    return watched


def kinds_of(run_dir: Path) -> list[str]:
    with JournalReader(run_dir / "journal.db") as reader:
        return [event.kind for event in reader.events()]
