"""Lives of a small training with windows; each is a process of its own, forked from one that has imported everything.

`python -m tests.replay.lives <folder> <runs>`: JSON of lives by the name of a run, each with the fields of `LifeOf`.
Each one leaves a line of JSON: its run, where it began and why, its losses by iteration, and at its end a digest of the
whole state. The next life begins when the one before was killed or has ended.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tests.imported_later  # noqa: F401 - for what it imports
from cpsr import CPSRRecovery, MixtureOfExperts, TorchAdapter
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.run_directory import run_id
from cpsr.errors import CPSRError
from cpsr.journal import JournalReader
from cpsr.state.witness import ARITHMETIC, CHECKED, NOT_RESTORED

ITERATIONS = 30
TOKENS = [4, 1, 3, 2]


@dataclasses.dataclass(frozen=True)
class LifeOf:
    """What happens in a life.

    Attributes:
        killed_at: iteration after whose step the process kills itself; None: it ends well.
        window_iterations: of the configuration.
        interval_iterations: between checkpoints.
        awaited: iteration of a state that must be in memory before the kill.
        enabled: whether windows are taken and used.
        factor: on the loss; another one than in the life before makes another training.
        damage: a byte of the newest window is flipped before.
        shrinks: the loop multiplies weights after each step whose turn comes last.
        mixture: the model has experts, whose tokens are counted.
        logged: the loop reports its losses.
        replicated: a peer holds what is in memory when the loop begins.
    """

    killed_at: int | None = None
    window_iterations: int | None = 3
    interval_iterations: int = 1000
    awaited: int | None = None
    enabled: bool = True
    factor: float = 1.0
    damage: bool = False
    shrinks: bool = False
    mixture: bool = False
    logged: bool = False
    replicated: bool = False


class Routed(nn.Module):
    """Sends the items of a batch of ten to four experts, always in the same parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in TOKENS)
        self.counts = torch.zeros(len(TOKENS), dtype=torch.int64)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.counts = torch.tensor(TOKENS)
        parts = torch.split(values, TOKENS)
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])


class Network(nn.Module):
    """Dropout draws random numbers, the running statistics change with each forward, and one layer is unused."""

    def __init__(self, mixture: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 24)
        self.layers = nn.ModuleList([nn.Linear(24, 24), Routed(24) if mixture else nn.Linear(24, 24)])
        self.norm, self.head, self.unused = nn.BatchNorm1d(24), nn.Linear(24, 1), nn.Linear(2, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, *self.layers):
            values = nn.functional.dropout(torch.tanh(layer(values)), 0.1)
        found: torch.Tensor = self.head(self.norm(values))
        return found


def live(run_dir: Path, life: LifeOf) -> dict[str, Any]:
    torch.manual_seed(3)
    inputs = torch.randn(120, 8)
    model = Network(life.mixture)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(
        TensorDataset(inputs, inputs.sum(1, keepdim=True)), sum(TOKENS) if life.mixture else 4, shuffle=True
    )
    config = {
        "run_dir": str(run_dir),
        "mode": "exact",
        "checkpoint": {"interval_iterations": life.interval_iterations},
        "replay": {"enabled": life.enabled, "window_iterations": life.window_iterations},
    }
    left: dict[str, Any] = {"run": run_dir.name, "losses": {}}
    experts = MixtureOfExperts(lambda layer: layer.counts) if life.mixture else None  # type: ignore[arg-type, return-value]
    with CPSRRecovery(TorchAdapter(model, optimizer, experts=experts), config) as recovery:
        restored = recovery.restored
        left |= {"iteration": recovery.iteration, "reason": restored.reason}
        if life.replicated:
            for state in Arena(run_id(run_dir)).list():
                shutil.copy(state.path, state.path.with_name(state.name.replace("window-", "replica-0000")))
        for batch, targets in recovery.resume(loader, repeat=True):
            loss = life.factor * nn.functional.mse_loss(model(batch), targets)
            if life.logged:
                recovery.log_loss(loss)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if life.shrinks:
                with torch.no_grad():
                    model.first.weight.mul_(0.99)
            left["losses"][recovery.iteration] = loss.item()
            if recovery.iteration == life.killed_at:
                while life.awaited is not None and not holds(run_dir, life.awaited):
                    time.sleep(0.005)
                leave(left)
                os.kill(os.getpid(), signal.SIGKILL)
            if recovery.iteration >= ITERATIONS:
                break
    return left | {"digest": digest_of(model, optimizer)}


def holds(run_dir: Path, iteration: int) -> bool:
    return iteration in [state.iteration for state in Arena(run_id(run_dir)).list()]


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    digest = hashlib.sha256()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    for tensor in (*model.state_dict().values(), *moments):
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def verdict(run_dir: Path) -> str:
    """What the last check of repeated steps has found."""
    with JournalReader(run_dir / "journal.db") as reader:
        found = [one.message for one in reader.events() if one.kind in (CHECKED, ARITHMETIC, NOT_RESTORED)]
    return found[-1] if found else ""


def leave(life: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(life) + "\n")
    sys.stdout.flush()


def damage_newest_window(run_dir: Path) -> None:
    windows = [state for state in Arena(run_id(run_dir)).list() if state.kind == "window"]
    newest = max(windows, key=lambda state: state.iteration)
    with newest.path.open("r+b") as file:
        file.seek(newest.size.header_bytes + 900)
        byte = file.read(1)
        file.seek(newest.size.header_bytes + 900)
        file.write(bytes([byte[0] ^ 1]))


def run(run_dir: Path, lives: list[LifeOf]) -> None:
    for life in lives:
        if life.damage:
            damage_newest_window(run_dir)
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            continue
        try:
            left = live(run_dir, life)
        except CPSRError as error:
            left = {"run": run_dir.name, "error": f"{type(error).__name__}: {error}"}
        leave(left | {"repeated": verdict(run_dir)})
        os._exit(0)
    remove_memory_states(run_id(run_dir))


if __name__ == "__main__":
    for name, wanted in json.loads(sys.argv[2]).items():
        run(Path(sys.argv[1]) / name, [LifeOf(**one) for one in wanted])
