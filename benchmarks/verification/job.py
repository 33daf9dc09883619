"""One small job whose steps are all repeated, and into which faults are injected, one after another."""

import logging
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from cpsr.benchmarks.harness.ranks import join_ranks
from cpsr.benchmarks.verification.faults import Fault, Injector
from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.torch import TorchAdapter
from cpsr.recovery import CPSRRecovery
from cpsr.verification.account import Account
from cpsr.verification.evidence import Verdict

__all__ = ["main"]

VOCABULARY, WIDTH, LENGTH, BATCH = 40, 24, 8, 4
BATCHES = 64  # of a pass
ATTEMPTS = 3  # steps that are repeated with a persistent fault; with another the first one is
STEPS_MAX = 10  # until one is repeated
SETTLING = 3  # steps that are repeated before the first fault
AFFORDABLE_SECONDS = 1e9  # of training, so that each step may be repeated
DISK_SECONDS = 60.0
CLIPPED_NORM = 0.5


class Model(torch.nn.Module):
    """A small language model with attention, dropout and a buffer that each forward changes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.attend = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.act, self.down = torch.nn.Linear(WIDTH, 48), torch.nn.GELU(), torch.nn.Linear(48, WIDTH)
        self.norm, self.dropout = torch.nn.LayerNorm(WIDTH), torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.embed(tokens)
        query, key, value = self.attend(hidden).chunk(3, dim=-1)
        hidden = hidden + functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(self.down(self.act(self.up(hidden))))
        with torch.no_grad():
            self.seen.mul_(0.9).add_(hidden.mean((0, 1)).to(self.seen.dtype), alpha=0.1)
        return functional.cross_entropy(self.head(self.norm(hidden)).float().flatten(0, 1), targets.flatten())


class Job:
    """The loop of one layout: `plain`, `ddp`, `zero1` to `zero3`."""

    adapter: EngineAdapter

    def __init__(self, layout: str, precision: str) -> None:
        torch.manual_seed(0)
        module = Model()
        self.engine: Any = None
        if layout.startswith("zero"):
            from cpsr.engines import adapt
            from cpsr.qualify.deepspeed_jobs import configuration, initialize

            config = configuration(int(layout[-1]), precision, micro_batches=1)
            self.engine = initialize(module, config)
            self.adapter = adapt(self.engine)
            return
        if precision == "bf16":
            module = module.bfloat16()
        self.called: Any = DistributedDataParallel(module) if layout == "ddp" else module
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.1)
        self.adapter = TorchAdapter(self.called, self.optimizer)

    def train(self, batch: torch.Tensor, injector: Injector | None) -> None:
        """One step."""
        tokens, targets = batch[:, :-1], batch[:, 1:]
        if injector is not None:
            injector.before_forward()
        if self.engine is not None:
            self.engine.backward(self.engine(tokens, targets))
        else:
            self.optimizer.zero_grad()
            self.called(tokens, targets).backward()
        if injector is not None:
            injector.before_update()
        if self.engine is not None:
            self.engine.step()
        else:
            torch.nn.utils.clip_grad_norm_(self.called.parameters(), CLIPPED_NORM)
            self.optimizer.step()


class Trials:
    """Trains step by step, and keeps the verdicts.

    Args:
        job: what trains.
        recovery: entered.
        loader: of the job.
    """

    def __init__(self, job: Job, recovery: CPSRRecovery, loader: Any) -> None:
        self._job, self._recovery = job, recovery
        self._stream = iter(recovery.resume(loader, repeat=True))
        self._verdicts: list[Verdict | None] = []
        verification = self._verification = recovery.life.verification
        conclude = verification.conclude

        def concluded(iteration: int) -> Verdict | None:
            self._verdicts.append(conclude(iteration))
            return self._verdicts[-1]

        verification.conclude = concluded  # type: ignore[method-assign]

    def verdict(self, injector: Injector | None = None) -> dict[str, Any] | None:
        """The verdict on the next step that is repeated, as plain data; None: none was in many steps."""
        for _ in range(STEPS_MAX):
            self._recovery.life.saver.drain(DISK_SECONDS)
            before = len(self._verdicts)
            batch = next(self._stream)
            self._job.train(batch, injector if self._verification.running else None)
            if len(self._verdicts) > before and self._verdicts[-1] is not None:
                return vars(self._verdicts[-1])
            if injector is not None:
                injector.rearm()  # this step was not repeated after all: no host buffer was free
        return None

    def row(self, fault: Fault) -> dict[str, Any]:
        """What came of a fault: its verdict, after how many steps, and how many bits it changed."""
        injector, tried = Injector(self._job.adapter, fault), 0
        verdict: dict[str, Any] | None = None
        while tried < (ATTEMPTS if fault.persistent else 1) and (verdict is None or verdict["kind"] == "verified"):
            verdict, tried = self.verdict(injector), tried + 1
        injector.remove()
        self._verification.account.wrong.clear()  # else the second fault would end the job
        changes = self._recovery.life.job.group.sum(injector.changes)
        return {"fault": vars(fault), "verdict": verdict, "tried": tried, "changes": changes}


def main(
    run_dir: Path, layout: str, precision: str, kinds: list[tuple[str, bool]], clean: int, seed: int
) -> dict[str, Any] | None:
    """Train, and repeat each step that can be; what came of the faults, and of the steps without, on rank 0.

    Args:
        run_dir: of the run.
        layout: see `Job`.
        precision: `fp32` or `bf16`.
        kinds: of each fault, and whether it is persistent.
        clean: steps without a fault that are repeated, beside one before each fault.
        seed: draws the rank and the place of each fault.
    """
    logging.getLogger("cpsr").setLevel(logging.CRITICAL)
    if layout != "plain":
        join_ranks(run_dir)
    job, random = Job(layout, precision), Random(seed)  # noqa: S311 - nothing secret is drawn
    adapter = job.adapter
    if adapter.rank == 0:
        run_dir.mkdir()
        Account(trained_seconds=AFFORDABLE_SECONDS).save(run_dir)
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(VOCABULARY, (BATCH * BATCHES * adapter.world_size, LENGTH + 1), generator=generator)
    batches: Any = data[adapter.rank :: adapter.world_size]
    config = {
        "run_dir": run_dir,
        "mode": "exact",
        "checkpoint": {"interval_iterations": 1},
        "memory": {"interval_iterations": 10**6},
        "verification": {"budget_fraction": 1.0},
    }
    with CPSRRecovery(adapter, config) as recovery:
        trials = Trials(job, recovery, torch.utils.data.DataLoader(batches, batch_size=BATCH))
        for _ in range(SETTLING):
            trials.verdict()
        sound = [trials.verdict() for _ in range(clean)]
        rows = []
        for kind, persistent in kinds:
            sound.append(trials.verdict())
            fault = Fault(kind, persistent, random.randrange(adapter.world_size), random.randrange(2**31))
            rows.append(trials.row(fault))
    return {"layout": layout, "precision": precision, "sound": sound, "rows": rows} if adapter.rank == 0 else None
