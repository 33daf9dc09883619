"""What a repeated step costs beside an ordinary one, and what the default budget makes of that."""

import logging
import time
from pathlib import Path
from typing import Any

import torch

from cpsr.benchmarks.harness.ranks import join_ranks
from cpsr.config import CPSRConfig
from cpsr.demo.model import BATCH, GPT, GPTConfig, zero_engine
from cpsr.engines import TorchAdapter
from cpsr.recovery import CPSRRecovery
from cpsr.verification.account import Account
from cpsr.verification.verification import Verification

__all__ = ["main"]

INTERVAL, STEPS = 4, 120
WINDOWS = 4096
AFFORDABLE_SECONDS = 1e9


def main(run_dir: Path, layout: str, default_seconds: float) -> dict[str, Any] | None:
    """Train with a repeated step after each checkpoint, then with the default; the seconds of both, on rank 0.

    Args:
        run_dir: of the first run.
        layout: `plain` or `zero1`.
        default_seconds: of the second run.
    """
    logging.getLogger("cpsr").setLevel(logging.ERROR)
    if layout != "plain":
        join_ranks(run_dir)
    measured = _Training(layout)
    measured.run(run_dir / "each", 1.0, STEPS)
    default = _Training(layout)
    fraction = CPSRConfig(run_dir=run_dir).verification.budget_fraction
    default.run(run_dir / "default", fraction, 10**6, default_seconds)
    if measured.rank:
        return None
    account = default.account
    return {
        "layout": layout,
        "ranks": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        "parameters": measured.parameters,
        "step_seconds": measured.step_seconds,
        "repeated_seconds": measured.repeated_seconds,
        "default_repeated_seconds": default.repeated_seconds,
        "trained_seconds": account.trained_seconds,
        "spent_seconds": account.spent_seconds,
    }


class _Training:
    """A small GPT on random bytes.

    Attributes:
        step_seconds: of steps that are not repeated.
        repeated_seconds: by which repeating made others longer.
        account: of the run, once it has ended.
    """

    def __init__(self, layout: str) -> None:
        torch.manual_seed(0)
        self._layout = layout
        self._model = GPT(GPTConfig())
        self._optimizer = torch.optim.AdamW(self._model.parameters(), 1e-3)
        self._engine: Any = self._model if layout == "plain" else zero_engine(self._model, self._optimizer)
        self.parameters = sum(one.numel() for one in self._model.parameters())
        self.rank = torch.distributed.get_rank() if layout != "plain" else 0
        self.step_seconds: list[float] = []
        self.repeated_seconds: list[float] = []
        self.account = Account()

    def run(self, run_dir: Path, fraction: float, steps: int, seconds: float = float("inf")) -> None:
        """Train until so many steps are done, or so much time is over on rank 0."""
        run_dir.mkdir(parents=True, exist_ok=True)
        if fraction == 1.0 and self.rank == 0:
            Account(trained_seconds=AFFORDABLE_SECONDS).save(run_dir)
        config = {
            "run_dir": run_dir,
            "mode": "exact",
            "checkpoint": {"interval_iterations": INTERVAL if fraction == 1.0 else 50},
            "verification": {"budget_fraction": fraction},
        }
        engine = TorchAdapter(self._model, self._optimizer) if self._layout == "plain" else self._engine
        loader: Any = torch.utils.data.DataLoader(_windows(), batch_size=BATCH)
        deadline = time.monotonic() + seconds
        with CPSRRecovery(engine, config) as recovery:
            verification = recovery.life.verification
            self._time(verification)
            for windows in recovery.resume(loader, repeat=True):
                started, repeats = time.perf_counter(), verification.running
                self._step(windows)
                if not repeats:
                    self.step_seconds.append(time.perf_counter() - started)
                over = torch.tensor(float(recovery.iteration >= steps or time.monotonic() > deadline))
                if self._layout != "plain":
                    torch.distributed.broadcast(over, 0)
                if over.item():
                    break
        self.account = Account.of_run(run_dir)

    def _time(self, verification: Verification) -> None:
        """Note how long each repetition takes."""
        conclude = verification.conclude

        def timed(iteration: int) -> Any:
            started = time.perf_counter()
            verdict = conclude(iteration)
            if verdict is not None:
                self.repeated_seconds.append(time.perf_counter() - started)
            return verdict

        verification.conclude = timed  # type: ignore[method-assign]

    def _step(self, windows: torch.Tensor) -> None:
        loss = self._engine(windows)
        if self._layout == "plain":
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
        else:
            self._engine.backward(loss)
            self._engine.step()


def _windows() -> Any:
    return torch.randint(256, (WINDOWS, GPTConfig().context + 1))
