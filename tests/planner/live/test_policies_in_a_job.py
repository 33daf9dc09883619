"""Every value of `planner.policy` in a running job: real checkpoints, losses, backtests and phases."""

import math
import os
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.journal import FitRow, JournalReader, PlanRow

MTBF_HOURS = 0.02
STEP_SECONDS = 0.004  # as of a step on a device: the disk keeps up with an interval of 10 or 20
LONGEST = 200
ITERATIONS = 1500


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be written: steps this short would wait for a disk most of the time."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def trained(run_dir: Path, policy: str, iterations: int, **sections: Any) -> list[dict[str, Any]]:
    """Train a small network, at a learning rate that falls for 1000 steps, and return its predictor's backtests."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(16, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(16, 16, generator=generator)
        return inputs, (inputs @ teacher).sin() + 0.3 * torch.randn(16, generator=generator)

    config = {
        "run_dir": str(run_dir),
        "checkpoint": {"shared_memory": False},
        "planner": {"policy": policy, "mtbf_hours": MTBF_HOURS, "interval_max_iterations": LONGEST},
        "learning": {"budget_fraction": 1.0},  # steps of milliseconds leave little time to learn
        **sections,
    }
    with CPSRRecovery(TorchAdapter(model, optimizer), config) as recovery:
        recovery.register("draws", generator)
        for inputs, targets in recovery.resume(draw):
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * math.exp(-min(recovery.iteration, 1000) / 400)
            loss = functional.mse_loss(model(inputs)[:, 0], targets)
            torch.autograd.backward(loss)
            time.sleep(STEP_SECONDS)
            recovery.log_loss(loss)
            optimizer.step()
            if recovery.iteration >= iterations:
                break
        return recovery.life.loop.learning.predictor.accuracy()


def plans(run_dir: Path) -> list[PlanRow]:
    with JournalReader(run_dir / "journal.db") as journal:
        assert journal.events("planning ended") == []
        return journal.plans()


def theorems(plan: PlanRow) -> Any:
    """What Theorem 1 chose before any bound."""
    return plan.explanation["rivals"]["theorem1"]


@pytest.mark.parametrize("policy", ["cpsr", "young", "daly", "theorem1"])
def test_every_policy_plans_a_running_job(policy: str, run_dir: Path) -> None:
    trained(run_dir, policy, 150)
    first, *later = plans(run_dir)
    assert first.explanation["bound"] == "minimum"
    assert later
    for plan in later:
        explanation = plan.explanation
        assert (plan.origin, explanation["policy"]) == (policy, policy)
        inputs, bounds = explanation["inputs"], explanation["bounds"]
        young = math.sqrt(2 * inputs["stall_seconds"] / inputs["failures_per_second"]) / inputs["iteration_seconds"]
        assert explanation["rivals"]["young"]["interval_iterations"] == pytest.approx(young, abs=1)
        if policy != "cpsr":
            chosen = explanation["rivals"][policy]["interval_iterations"]
            low, high = bounds["minimum_iterations"], bounds["maximum_iterations"]
            assert plan.interval_iterations == min(max(chosen, low), high)


def test_theorem_1_follows_the_predictor_and_never_leaps_by_chance(run_dir: Path) -> None:
    backtests = trained(run_dir, "theorem1", ITERATIONS)
    made = [plan for plan in plans(run_dir) if "rivals" in plan.explanation]
    for plan in made:
        phase = plan.explanation["inputs"]["phase"] or {}
        print(plan.from_iteration, plan.interval_iterations, theorems(plan), phase.get("tau1_per_checkpoint"))  # noqa: T201
    certainties = 0
    for before, plan in pairwise(made):
        phase, note = plan.explanation["inputs"]["phase"], theorems(plan)["note"]
        certain = phase is not None and phase["tau1_low_per_checkpoint"] > 0
        held = min(theorems(before)["interval_iterations"], LONGEST)
        if not certain:
            assert theorems(plan)["interval_iterations"] == held, note
            assert "stays as it is" in note
        certainties += certain
    assert certainties, "tau1 differed from 0 beyond chance at least once"
    for plan in made:  # it is measured where the job is, whatever the interval
        if plan.from_iteration + 3 * plan.interval_iterations < ITERATIONS:
            assert any(one["iteration"] > plan.from_iteration for one in backtests)
    with JournalReader(run_dir / "journal.db") as journal:
        assert "predictor" in {fit.kind for fit in journal.newest(FitRow, 99)}


def test_theorem_1_says_at_the_start_that_it_needs_the_predictor_to_learn(run_dir: Path) -> None:
    trained(run_dir, "theorem1", 20, learning={"budget_fraction": 0.0})
    with JournalReader(run_dir / "journal.db") as journal:
        (event,) = journal.events("theorem1 holds")
    assert "learning.budget_fraction" in event.message
    assert event.iteration in (None, 0)
