"""A script that sets other hyperparameters than the run began with."""

import math
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from tests.situations.lives import Life, backward, digest, live

WIDTH = 16
AT = 13


def cosine(step: int, *, warmup: int, steps: int) -> float:
    """As the schedules of transformers are made: a partial function in a `LambdaLR`."""
    if step < warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def closed_over(steps: int) -> Callable[[int], float]:
    return lambda step: 1 - step / steps


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, int], Any]] = {
    "none": lambda optimizer, steps: None,
    "cosine": lambda optimizer, steps: lr_scheduler.CosineAnnealingLR(optimizer, steps),
    "warmup, then cosine": lambda optimizer, steps: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
            lr_scheduler.CosineAnnealingLR(optimizer, steps),
        ],
        milestones=[4],
    ),
    "partial": lambda optimizer, steps: lr_scheduler.LambdaLR(optimizer, partial(cosine, warmup=4, steps=steps)),
    "closure": lambda optimizer, steps: lr_scheduler.LambdaLR(optimizer, closed_over(steps)),
    "registered": lambda optimizer, steps: lr_scheduler.CosineAnnealingLR(optimizer, steps),
}


def trained(life: Life) -> dict[str, Any]:
    """A run of 24 steps, whose later lives are given `changed` settings; the rate before each step, and the end."""
    options = life.options
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "steps": 32}
    if life.number:
        settings |= options.get("changed", {})
    torch.manual_seed(0)
    module = nn.Linear(WIDTH, 4)
    steps = settings.pop("steps")
    optimizer = torch.optim.AdamW(module.parameters(), **settings)
    schedule = SCHEDULES[options["schedule"]](optimizer, int(steps))
    given = schedule if options["schedule"] != "registered" else None
    rows = torch.randn(192, WIDTH)
    loader = DataLoader(TensorDataset(rows, rows[:, :4]), batch_size=8, shuffle=True)
    config = life.config(restart={"hyperparameters": options.get("choice", "checkpoint")})
    rates = {}
    with CPSRRecovery(TorchAdapter(module, optimizer, given), config) as recovery:
        if options["schedule"] == "registered":
            recovery.register("schedule", schedule)
        for inputs, targets in recovery.resume(loader, epochs=1):
            rates[recovery.iteration] = optimizer.param_groups[0]["lr"]
            loss = functional.mse_loss(module(inputs), targets)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            if schedule is not None and (given is not None or recovery.iteration % 6 == 0):
                schedule.step()
            life.step(recovery.iteration)
    return {"digest": digest(module), "rates": rates, "decay": optimizer.param_groups[0]["weight_decay"]}


def lives(folder: Path, **options: Any) -> tuple[Any, Any, str]:
    """The end of the run alone, of the cut one, and what the second life printed."""
    plain = {key: value for key, value in options.items() if key == "schedule"}
    alone = live(trained, Life(folder / "alone", options=plain))
    live(trained, Life(folder / "cut", AT, signal.SIGTERM, options=options))
    again = live(trained, Life(folder / "cut", number=1, options=options))
    return alone.result, again.result, again.output


def test_nothing_is_said_if_nothing_differs(tmp_path: Path) -> None:
    alone, again, output = lives(tmp_path, schedule="registered")
    assert again["digest"] == alone["digest"]
    assert "the script sets" not in output


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        ("none", ""),
        ("warmup, then cosine", ", T_max 64 (the run: 32)"),
    ],
)
def test_the_runs_are_used_and_one_line_says_so(schedule: str, steps: str, tmp_path: Path) -> None:
    changed = {"weight_decay": 0.0, "steps": 64} | ({"lr": 0.001} if schedule == "none" else {})
    alone, again, output = lives(tmp_path, schedule=schedule, changed=changed)
    assert again["digest"] == alone["digest"]
    assert again["decay"] == 0.1
    (line,) = [line for line in output.splitlines() if "the script sets" in line]
    assert "weight_decay 0.0 (the run: 0.1)" in line
    assert steps in line
    assert "the run's are used" in line
    if schedule == "none":
        assert "lr 0.001 (the run: 0.01)" in line


def test_what_no_checkpoint_holds_is_named(tmp_path: Path) -> None:
    _, _, output = lives(tmp_path, schedule="closure", changed={"steps": 64})
    assert "The script's are used of steps 64 (the run: 32): no checkpoint can hold functions" in output


@pytest.mark.parametrize("schedule", ["partial", "registered"])
def test_the_scripts_are_used_if_asked_for(schedule: str, tmp_path: Path) -> None:
    changed = {"lr": 0.002, "weight_decay": 0.0, "steps": 64}
    alone, again, output = lives(tmp_path, schedule=schedule, changed=changed, choice="script")
    assert "the script's are used" in output
    assert again["decay"] == 0.0
    # As a run with these settings has them from its start on.
    other = live(trained, Life(tmp_path / "other", number=1, options={"schedule": schedule, "changed": changed}))
    for iteration, rate in again["rates"].items():
        assert rate == pytest.approx(other.result["rates"][iteration], rel=1e-9), iteration
    assert again["digest"] != alone["digest"]


def test_the_next_restart_says_nothing_more(tmp_path: Path) -> None:
    options = {"schedule": "cosine", "changed": {"steps": 64}, "choice": "script"}
    live(trained, Life(tmp_path, AT, signal.SIGTERM, options=options))
    live(trained, Life(tmp_path, 18, signal.SIGTERM, number=1, options=options))
    last = live(trained, Life(tmp_path, number=2, options=options))
    assert "the script sets" not in last.output
    assert "not restored" not in last.output
