"""Data that draws in workers, persistent or not: torch's draws undisturbed, and bit for bit after kills."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from cpsr import CPSRRecovery, TorchAdapter
from tests.situations.drawing import drawing_loader
from tests.situations.lives import Life, alone_and_cut, backward, digest, forked, live

PASSES = 4


def with_workers(life: Life) -> Any:
    """Four passes over data that draws in the workers of one loader, or of a new loader for every pass.

    From the second on each ends with a validation, whose loader has workers of its own.
    """
    torch.manual_seed(0)
    persistent, own, new = life.options["workers"]
    loader = drawing_loader(persistent=persistent, own_generator=own)
    validation = drawing_loader(persistent=persistent)
    model = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    followed = life.options["followed"]
    recovery: Any = CPSRRecovery(TorchAdapter(model, optimizer), life.config()) if followed else None
    with recovery or nullcontext():
        for number in range(recovery.epoch if followed else 0, PASSES):
            if new and number:
                loader = drawing_loader(persistent=persistent, own_generator=own)
            for inputs, targets in recovery.resume(loader) if followed else loader:
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                backward(loss)
                optimizer.step()
                losses.append(loss.item())
                if followed:
                    life.step(recovery.iteration)
            for _ in validation if number else ():
                pass
        restored = recovery.restored.restored_iteration if followed else 0
    return [digest(model), losses, restored]


# Every pair of the three: persistent workers, a generator of the loader's own, a new loader for every pass.
WORKERS = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
KILLS = (6, 16)  # iterations, of lives one after the other: inside a pass, and at the end of one


def all_of(life: Life) -> list[Any]:
    """Without CPSR, and the last of the lives with it, of which the others were killed."""
    options = {"workers": life.options["workers"]}
    lives = [
        Life(life.directory, at, number=number, options=options | {"followed": True})
        for number, at in enumerate((*KILLS, 0))
    ]
    without = Life(life.directory / "without", options=options | {"followed": False})
    return [forked(with_workers, [without])[0], forked(with_workers, lives)[-1]]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_workers_draw_what_they_draw_without_cpsr(workers: Any, tmp_path: Path) -> None:
    (expected, whole, _), (trained, losses, restored) = live(
        all_of, Life(tmp_path, options={"workers": workers})
    ).result
    assert restored > 0
    assert losses == whole[-len(losses) :]
    assert trained == expected


def again_and_again(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def over_a_generator(life: Life) -> Any:
    """The workers start when the first batch is asked for, and not when the loop begins."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with CPSRRecovery(TorchAdapter(model, optimizer), life.config()) as recovery:
        for inputs, targets in recovery.resume(again_and_again(drawing_loader(persistent=True))):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            life.step(recovery.iteration)
            if recovery.iteration == 8:
                break
    return [loss.item(), digest(model)]


def test_workers_behind_a_generator_draw_the_same_numbers_again(tmp_path: Path) -> None:
    alone, cut = alone_and_cut(over_a_generator, tmp_path, at=7)
    assert "continues at iteration" in cut.output
    assert cut.result == alone.result
