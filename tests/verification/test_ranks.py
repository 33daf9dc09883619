"""Steps of several ranks are repeated, by every engine without a trace; a rank may be killed meanwhile."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery
from cpsr.engines import TorchAdapter
from cpsr.engines.recorded_step import RecordedStep
from cpsr.verification.account import Account
from tests import two_ranks
from tests.device import ON_CUDA
from tests.situations.lives import Life, backward, digest, live
from tests.verification.loops import kinds_of

CELLS = """
import json, os, sys
from pathlib import Path

import deepspeed
import torch

from cpsr.qualify.cells import Scene, cells_of
from cpsr.recovery import CPSRRecovery
from cpsr.verification.account import Account

MICRO_BATCHES, STEPS, INTERVAL = 2, 8, 2
deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
torch.distributed.init_process_group("gloo")
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])

def trained(cell, fraction):
    run_dir = folder.with_name(f"{cell.name.replace(' ', '-')}-{fraction:g}")
    if rank == 0:
        run_dir.mkdir()
        Account(trained_seconds=1e9).save(run_dir)
    torch.manual_seed(1)
    job = Scene(torch.device("cpu"), rank, 2, 2, folder).builder(cell, MICRO_BATCHES, "cosine")()
    torch.manual_seed(2 + rank)
    config = {"run_dir": run_dir, "mode": "exact", "checkpoint": {"interval_iterations": INTERVAL},
              "memory": {"interval_iterations": 10**6}, "verification": {"budget_fraction": fraction}}
    with CPSRRecovery(job.adapter, config) as recovery:
        for step in range(STEPS):
            recovery.life.saver.drain(30.0)
            job.train_step(step)
    job.train_step(STEPS)  # the loop's own, after a checkpoint was due at the last step
    state = {key: values.detach().clone() for key, values in job.adapter.shard().tensors()}
    return state, torch.get_rng_state(), Account.of_run(run_dir)

found = {}
for cell in cells_of("cpu", 2, True):
    (one, random, _), (other, other_random, account) = trained(cell, 0.0), trained(cell, 1.0)
    same = all(torch.equal(one[key].view(torch.uint8), other[key].view(torch.uint8)) for key in one)
    found[cell.name] = same and torch.equal(random, other_random), account.verified
Path(f"{folder}.{rank}").write_text(json.dumps(found))
torch.distributed.destroy_process_group()
"""
NOT_REPEATED = ("ddp fp16", "pipeline")


@pytest.mark.skipif(ON_CUDA, reason="a script of the CPU")
def test_each_engine_repeats_its_steps_without_a_trace(tmp_path: Path) -> None:
    first, second = two_ranks.run(CELLS, tmp_path)
    assert len(first) > 20
    for name, (same, verified) in first.items():
        assert same, name
        assert second[name][0], name
        assert bool(verified) is not name.startswith(NOT_REPEATED), name


def trained_with_a_hook_that_keeps_state(life: Life) -> list[Any]:
    """Two ranks of DDP, whose gradients are compressed with a memory of what compressing lost."""
    (life.directory / "run").mkdir(exist_ok=True)
    Account(trained_seconds=1e9).save(life.directory / "run")
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    adapter = TorchAdapter(
        wrapper := DistributedDataParallel(model), optimizer := torch.optim.AdamW(model.parameters())
    )
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    wrapper.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    data = torch.randn(96, 8, generator=torch.Generator().manual_seed(life.rank))
    config = life.config(
        checkpoint={"interval_iterations": 2}, verification={"budget_fraction": float(life.options["verifies"])}
    )
    with CPSRRecovery(adapter, config) as recovery:
        for batch in recovery.resume([data[at : at + 8] for at in range(0, 96, 8)]):
            backward((adapter.called(batch) - batch.sum(1, keepdim=True)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    torch.distributed.destroy_process_group()
    return [digest(model), kinds_of(life.directory / "run").count("verification is off")]


def test_a_communication_hook_with_state_is_not_called_twice(tmp_path: Path) -> None:
    lives = {
        verifies: live(
            trained_with_a_hook_that_keeps_state,
            Life(tmp_path / str(verifies), ranks=2, options={"verifies": verifies}),
        )
        for verifies in (False, True)
    }
    assert [one[0] for one in lives[True].results] == [one[0] for one in lives[False].results]
    assert [lives[verifies].result[1] for verifies in (False, True)] == [0, 1]


def trained_by_ranks_that_differ(life: Life) -> list[Any]:
    """Ranks of DDP whose first one divides by something else; or whose module fails when the loop does not call it."""
    (life.directory / "run").mkdir(exist_ok=True)
    Account(trained_seconds=1e9).save(life.directory / "run")
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    calls = threading.local()  # of no module

    class Model(torch.nn.Linear):
        temperature = 1.1 if life.rank and life.options["kind"] == "other attributes" else 1.0

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            if life.options["kind"] == "fails" and not calls.by_loop:
                raise LookupError("only the loop may call it")
            return super().forward(given) / self.temperature

    model = Model(8, 1)
    model.temperature = Model.temperature
    wrapper, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters())
    data = torch.randn(96, 8, generator=torch.Generator().manual_seed(life.rank))
    fraction = float(life.options["verifies"])
    config = life.config(checkpoint={"interval_iterations": 2}, verification={"budget_fraction": fraction})
    with CPSRRecovery(TorchAdapter(wrapper, optimizer), config) as recovery:
        for batch in recovery.resume([data[at : at + 8] for at in range(0, 96, 8)]):
            recovery.life.saver.drain(30.0)
            calls.by_loop = True
            backward((wrapper(batch) - batch.sum(1, keepdim=True)).square().mean())
            calls.by_loop = False
            optimizer.step()
            optimizer.zero_grad()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return [digest(model), kinds_of(life.directory / "run")]


@pytest.mark.parametrize(
    ("kind", "ranks", "event"),
    [("other attributes", 3, "neighbors are not compared"), ("fails", 2, "verification is off")],
)
def test_a_healthy_job_goes_on_whatever_its_ranks_do(kind: str, ranks: int, event: str, tmp_path: Path) -> None:
    def results(verifies: bool) -> list[Any]:
        options = {"kind": kind, "verifies": verifies}
        found = live(trained_by_ranks_that_differ, Life(tmp_path / str(verifies), ranks=ranks, options=options))
        assert found.statuses == [0] * ranks, found.output[-3000:]
        return list(found.results)

    alone, watched = results(False), results(True)
    assert [one[0] for one in watched] == [one[0] for one in alone]
    assert watched[0][1].count(event) == 1
    assert "wrong arithmetic" not in watched[0][1]
    assert ("verified" in watched[0][1]) is (kind != "fails")


def killed_while_a_step_is_repeated(life: Life) -> str:
    """Two ranks of DDP; in the first life the second one is killed while a later step is repeated."""
    if life.options["verifies"] and life.number == 0:
        (life.directory / "run").mkdir(exist_ok=True)
        Account(trained_seconds=1e9).save(life.directory / "run")
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    adapter = TorchAdapter(DistributedDataParallel(model), optimizer := torch.optim.AdamW(model.parameters()))
    repeat = RecordedStep.repeat

    def dying(self: RecordedStep, *given: Any, **more: Any) -> Any:
        if life.options["verifies"] and (life.number, life.rank) == (0, 1) and adapter.iteration >= 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return repeat(self, *given, **more)

    RecordedStep.repeat = dying  # type: ignore[method-assign]
    data = torch.randn(96, 4, generator=torch.Generator().manual_seed(life.rank))
    loader: Any = DataLoader(TensorDataset(data), batch_size=8)
    fraction = float(life.options["verifies"])
    config = life.config(checkpoint={"interval_iterations": 2}, verification={"budget_fraction": fraction})
    with CPSRRecovery(adapter, config) as recovery:
        for (batch,) in recovery.resume(loader, epochs=1):
            recovery.life.saver.drain(30.0)
            backward((adapter.called(batch) - batch.sum(1, keepdim=True)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    torch.distributed.destroy_process_group()
    return digest(model)


def test_a_rank_that_is_killed_while_a_step_is_repeated(tmp_path: Path) -> None:
    """The others take it for lost, and verification stays on."""
    alone = live(killed_while_a_step_is_repeated, Life(tmp_path / "alone", ranks=2, options={"verifies": False}))
    cut = Life(tmp_path / "cut", ranks=2, options={"verifies": True})
    assert live(killed_while_a_step_is_repeated, cut).statuses[1] == -signal.SIGKILL
    again = live(killed_while_a_step_is_repeated, replace(cut, number=1))
    assert again.results == alone.results
    account = Account.of_run(tmp_path / "cut" / "run")
    assert account.off is None
    assert account.verified
