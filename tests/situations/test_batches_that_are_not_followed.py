"""Loops whose batches a checkpoint cannot follow: a line in the log names each kind, once."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from tests.situations.lives import Life, backward, live

STEPS = 12
Taken = Iterator[Any]  # what each of the steps is trained on, `(8, 4)` tensors


def one_ahead(batches: Taken) -> Taken:
    held = next(batches)
    for _ in range(STEPS):
        held, now = next(batches), held
        yield now


def two_a_step(batches: Taken) -> Taken:
    for _ in range(STEPS):
        yield torch.cat([next(batches), next(batches)])


def uneven(batches: Taken) -> Taken:
    for step in range(STEPS):
        yield torch.cat([next(batches) for _ in range(1 + step % 3)])


def steps_on_one(batches: Taken) -> Taken:
    for _ in range(2):
        yield from [next(batches)] * (STEPS // 2)


def of_a_thread(batches: Taken) -> Taken:
    for _ in range(STEPS):
        got: list[Any] = []
        thread = threading.Thread(target=lambda got=got: got.append(next(batches)))
        thread.start()
        thread.join()
        yield got[0]


def of_its_own(batches: Taken) -> Taken:
    for _ in range(STEPS):
        yield torch.randn(8, 4)


LOOPS: dict[str, Callable[[Taken], Taken]] = {one.__name__: one for one in (
    one_ahead, two_a_step, uneven, steps_on_one, of_a_thread, of_its_own
)}  # fmt: skip
PER_STEP = "batches for its first steps, and CPSR expects"
SAID = (
    PER_STEP,
    "no batch came from recovery.resume in the first 3 steps. If these steps train, checkpoints",
    "another thread takes the batches",
)


def training(life: Life) -> str:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(320, 4)), batch_size=8, shuffle=True)
    config = life.config(mode=life.options["mode"], checkpoint={"interval_iterations": 3})
    with CPSRRecovery(TorchAdapter(model, optimizer), config) as recovery:
        batches = (rows for (rows,) in recovery.resume(loader, epochs=1))
        for rows in LOOPS[life.options["loop"]](batches):
            optimizer.zero_grad()
            backward((model(rows) - rows).square().mean())
            optimizer.step()
    return "done"


@pytest.mark.parametrize(
    ("loop", "mode", "expected"),
    [
        ("one_ahead", "auto", None),
        ("two_a_step", "auto", "micro_batches_per_iteration=2)"),
        ("uneven", "auto", "the loop takes 1, 2, 3 batches for its first steps"),
        ("steps_on_one", "exact", None),
        ("of_a_thread", "auto", SAID[2]),
        ("of_its_own", "exact", SAID[1]),
    ],
)  # fmt: skip
def test_each_kind_is_said_once(loop: str, mode: str, expected: str | None, tmp_path: Path) -> None:
    ended = live(training, Life(tmp_path, options={"loop": loop, "mode": mode}))
    assert ended.result == "done"
    assert sum(ended.output.count(one) for one in SAID) == (expected is not None), ended.output
    assert expected is None or ended.output.count(expected) == 1
