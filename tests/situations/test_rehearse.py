"""Rehearsals of loops: what the verdict says of one that comes back, and of those that do not."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.checkpoint.store import CheckpointStore
from cpsr.life.rehearsed_life import REHEARSED, Cut, RehearsedJob
from cpsr.rehearse.command import Rehearsal
from cpsr.rehearse.jobs import Ran, plan_cuts
from cpsr.rehearse.verdict import Reference, Verdict, compare, judge
from cpsr.state.witness import Difference, SampledBytes, Witness, Witnesses, witness_path
from tests.checkpoint.conftest import save
from tests.situations.lives import Life, backward, live

STEPS = 12
KILLED, LEFT = -9, 143


class Trainer:
    """A user's loop as a class, with whatever the option asks for."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.noise = random.Random(3)
        self.average: dict[str, torch.Tensor] = {}
        self.steps_here = 0

    def scale(self) -> float:
        """Of the loss."""
        self.steps_here += 1
        return 1.0 + self.noise.random() if self.fault in ("noise", "registered") else 1.0

    def follow(self, model: torch.nn.Module) -> None:
        """Average the weights, which changes nothing of the training."""
        for name, one in model.named_parameters():
            self.average[name] = 0.9 * self.average.get(name, one.detach()) + 0.1 * one.detach()


def training(life: Life) -> str:
    os.environ[REHEARSED] = life.options["asked"]
    fault = life.options["fault"]
    torch.manual_seed(time.time_ns() if "no seed" in fault else 0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :4]), batch_size=8, shuffle=True)
    trainer = Trainer(fault)
    cut = next((job for job in range(3) if fault == "fails" and f"cut-{job}" in life.options["asked"]), None)
    if (cut == 0 and life.number) or cut == 2:  # after the restart, and before it comes to be cut
        raise ValueError("cannot start")
    with CPSRRecovery(TorchAdapter(model, optimizer), life.config()) as recovery:
        if fault == "registered":
            recovery.register("noise", trainer.noise)
        batches = recovery.resume(loader, epochs=5)
        while recovery.iteration < (3 if cut == 1 else 40):
            x, y = (inputs[:8], inputs[:8, :4]) if "no loader" in fault else next(batches)
            optimizer.zero_grad()
            backward(torch.nn.functional.mse_loss(model(x), y) * trainer.scale())
            optimizer.step()
            if fault == "registered":
                trainer.follow(model)
    return "done"


def rehearsed(loop: Callable[[Life], Any], folder: Path, said: StringIO | None = None, **options: Any) -> Verdict:
    """The verdict on a loop whose lives are forked; what is printed goes to `said`."""

    def launch(asked: RehearsedJob, limit_seconds: float | None) -> Ran:
        place = Path(asked.folder)
        for number in range(3):
            life = Life(place / "lives", number=number, options={"asked": asked.to_variable(), **options})
            ended = live(loop, life)
            with (place / "output").open("a") as output:
                output.write(ended.output)
            status = ended.statuses[0]
            ran = Ran(asked, 1 if status == KILLED else status, 1.0)
            if status != KILLED and (status != LEFT or ran.succeeded):
                return ran
        return ran

    return Rehearsal(Console(file=said or StringIO()), folder, launch, STEPS).verdict()


def test_a_loop_that_comes_back(tmp_path: Path) -> None:
    verdict = rehearsed(training, tmp_path, fault="registered")
    assert verdict.status == 0, verdict
    assert verdict.sentence.startswith("Your script comes back bit for bit: 3 restarts, ")
    lost = " ".join(verdict.unprotected)
    assert "trainer.steps_here" in lost  # it counts this process's steps
    assert "trainer.average" in lost  # nobody saves it
    assert "trainer.noise" not in lost


def test_a_generator_that_is_not_registered_is_named(tmp_path: Path) -> None:
    verdict = rehearsed(training, tmp_path, fault="noise")
    assert verdict.status == 1
    assert "after SIGKILL of rank 0" in verdict.sentence
    assert "trainer.noise" in verdict.causes[0]
    assert "recovery.register" in verdict.advice


def test_a_loop_that_does_not_reproduce_itself_and_takes_no_loader(tmp_path: Path) -> None:
    verdict = rehearsed(training, tmp_path, fault="no seed, no loader")
    assert (verdict.result, verdict.status) == ("does not reproduce itself", 1)
    assert "two undisturbed runs differ at step" in verdict.sentence
    assert any("No batch came from recovery.resume" in one for one in verdict.unprotected)


def test_jobs_that_fail_whether_they_were_cut_or_not_and_one_that_ends_before_its_cut(tmp_path: Path) -> None:
    said = StringIO()
    verdict = rehearsed(training, tmp_path, said, fault="fails")
    assert (verdict.result, verdict.status) == ("does not come back", 1)
    assert "the job failed (exit status 1)" in verdict.sentence
    assert said.getvalue().count("ValueError: cannot start") == 2
    of_one, of_all, by_sigterm = (line for line in said.getvalue().splitlines() if line.startswith("  SIG"))
    assert of_one.endswith("the job failed (exit status 1)")
    assert "was not reached" in of_all
    assert by_sigterm.endswith("the job failed (exit status 1)")


def test_a_job_that_ends_too_early_after_its_restart_did_not_come_back_even_where_steps_vary(tmp_path: Path) -> None:
    def ran(name: str, last: int) -> Ran:
        asked = RehearsedJob(str(tmp_path / name), last_iteration=10, interval_iterations=5)
        save(CheckpointStore(tmp_path / name / "run", 0, 1, "run", 0), last)
        return Ran(asked, 0, 1.0)

    rounded = (0, Difference(3, "loss", "1.0", "1.0000001", 1e-7, rounding=True))
    first, cut = ran("undisturbed", 10), plan_cuts(10, 1, [])[0]
    early = compare(cut, Reference(first, rounded), ran("early", 5), first)
    assert early.result == "differs at the end: the last checkpoint, of step 5 and not 10"


def test_ranks_that_train_on_the_same_batches_are_listed(tmp_path: Path) -> None:
    def unprotected(apart: float) -> str:
        folder = tmp_path / str(apart)
        for rank in range(2):
            ring = Witnesses(witness_path(folder / "run", rank))
            for step in (1, 2, 3):
                loss = 1 / step + rank * apart
                ring.put(Witness(step, 0, 0, 0, step, step, (0.1,), 0, loss, SampledBytes(b"", (0, 0, 0, 0)), 1e-7))
            ring.close()
            (folder / f"end-{rank}.json").write_text('{"iteration": 3, "ranks": 2, "life": 0}')
        asked = RehearsedJob(str(folder), last_iteration=3, interval_iterations=5)
        return " ".join(judge(Reference(Ran(asked, 0, 1.0)), []).unprotected)

    assert "they train on the same batches: give the DataLoader sampler=DistributedSampler" in unprotected(0.0)
    assert "same batches" not in unprotected(0.01)


def test_cuts_lie_inside_a_pass_and_at_its_end() -> None:
    inside, at_end, left = (one.cut for one in plan_cuts(30, 2, [12, 24]))
    assert inside == Cut("SIGKILL", 14, 1)
    assert at_end == Cut("SIGKILL", 13)
    assert left.signal == "SIGTERM"
    assert plan_cuts(30, 2, [12, 24])[1].interval_iterations == 4  # a checkpoint at the end of the pass
    assert plan_cuts(30, 1, [])[1].cut == Cut("SIGKILL", 18)


@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_rehearsal_leaves_nothing_behind(how: signal.Signals, status: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nopen('begun', 'w').close()\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "cpsr", "rehearse", "--workdir", "jobs", "train.py"]
    # A shell that runs the tests in the background has told them to ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 60.0
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(how)
    output, _ = process.communicate(timeout=60.0)
    assert process.returncode == status
    assert children
    assert not psutil.wait_procs(children, timeout=5.0)[1]
    assert output.splitlines()[-1].startswith("Interrupted: all jobs have ended")
    assert not list((tmp_path / "jobs").iterdir())
