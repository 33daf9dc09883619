"""Scripts with SIGTERM handlers of their own: CPSR commits the state, and their handlers are called."""

import os
import pickle
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.checkpoint.catalogue import scan
from tests.situations.lives import Life, backward, digest, live

AT, STEPS = 7, 12


class PreemptedError(Exception):
    """What some handlers raise."""


def loop(life: Life) -> Any:  # noqa: C901 - a script with all of its handlers
    """The handler of `life.options` is installed before the block, inside, or within the loop."""
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(8 * STEPS, 8)), batch_size=8, shuffle=True)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    calls = life.directory / "calls"
    stops = False

    def note() -> None:
        with calls.open("a") as file:
            file.write("called\n")

    def flags(number: int, frame: FrameType | None) -> None:
        nonlocal stops
        note()
        stops = True

    def tells(number: int, frame: FrameType | None) -> None:
        note()

    def exits(number: int, frame: FrameType | None) -> None:
        note()
        sys.exit(9)

    def raises(number: int, frame: FrameType | None) -> None:
        note()
        raise PreemptedError

    handlers: dict[str, Any] = {one.__name__: one for one in (flags, tells, exits, raises)}
    handlers |= {"default": signal.SIG_DFL, "ignores": signal.SIG_IGN}
    where = life.options["where"]
    handler = handlers[life.options["handler"]]

    def install(place: str) -> None:
        if place == where:
            signal.signal(signal.SIGTERM, handler)

    install("before")
    ending = "by itself"
    try:
        with CPSRRecovery(TorchAdapter(model, optimizer), life.config()) as recovery:
            install("block")
            for (batch,) in recovery.resume(loader, epochs=1):
                if recovery.iteration >= 2:
                    install("loop")
                loss = nn.functional.mse_loss(model(batch), batch)
                optimizer.zero_grad()
                backward(loss)
                optimizer.step()
                with torch.no_grad():
                    model.weight.clamp_(-0.2, 0.2)
                life.step(recovery.iteration)
                if stops:
                    break
    except PreemptedError:
        ending = "preempted"
    if where != "nowhere":
        assert signal.getsignal(signal.SIGTERM) is handler
    return [ending, recovery.iteration, digest(model)]


def committed(directory: Path) -> int:
    return scan(directory / "run" / "checkpoints").checkpoints[-1].iteration


def calls(directory: Path) -> int:
    path = directory / "calls"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """How the loop ends that nothing happens to."""
    return live(loop, Life(tmp_path_factory.mktemp("alone"), options={"where": "nowhere", "handler": "tells"})).result


@pytest.mark.parametrize(
    ("handler", "where", "status", "called"),
    [
        ("tells", "before", 143, 1),
        ("exits", "block", 9, 1),
        ("default", "loop", 143, 0),
    ],
)
def test_the_state_is_committed_and_the_handler_called(
    handler: str, where: str, status: int, called: int, tmp_path: Path, alone: Any
) -> None:
    options = {"handler": handler, "where": where}
    left = live(loop, Life(tmp_path / "cut", AT, signal.SIGTERM, options=options))
    assert left.statuses == [status], left.output
    assert calls(tmp_path / "cut") == called
    assert committed(tmp_path / "cut") == AT + 1
    assert "its state is committed" in left.output
    again = live(loop, Life(tmp_path / "cut", number=1, options=options))
    assert again.result == alone


@pytest.mark.parametrize(
    ("handler", "ending", "last", "where"),
    [("raises", "preempted", AT + 1, "before"), ("flags", "by itself", AT, "block")],
)
def test_the_code_of_the_script_after_its_handler_runs(
    handler: str, ending: str, last: int, where: str, tmp_path: Path, alone: Any
) -> None:
    options = {"handler": handler, "where": where}
    left = live(loop, Life(tmp_path / "cut", AT, signal.SIGTERM, options=options))
    assert left.result[:2] == [ending, last]
    assert calls(tmp_path / "cut") == 1
    assert committed(tmp_path / "cut") == last
    again = live(loop, Life(tmp_path / "cut", number=1, options=options))
    assert again.result == alone


def test_a_script_that_ignores_sigterm_is_not_left(tmp_path: Path) -> None:
    ended = live(loop, Life(tmp_path, AT, signal.SIGTERM, options={"handler": "ignores", "where": "loop"}))
    assert ended.result[:2] == ["by itself", STEPS]
    assert ended.output.count("this process ignores SIGTERM") == 1


def test_other_signals_may_ask_for_it(tmp_path: Path) -> None:
    """As scripts under Slurm do at SIGUSR1."""
    ended = live(asked_by_usr1, Life(tmp_path, AT, signal.SIGUSR1))
    assert ended.statuses == [143]
    assert committed(tmp_path) == AT + 1


def asked_by_usr1(life: Life) -> Any:
    signal.signal(signal.SIGUSR1, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    life.options = {"where": "nowhere", "handler": "tells"}
    return loop(life)


def in_the_middle_of_a_step(life: Life) -> list[int]:
    """The signal comes twice, as from a launcher and to each process; returns the steps that were trained."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(8 * STEPS, 8)), batch_size=8)
    recovery = CPSRRecovery(TorchAdapter(model, optimizer), life.config())

    def reach(moment: str) -> None:
        for _ in range(2 if moment == life.options["moment"] else 0):
            life.step(recovery.iteration)

    class Own:
        def __reduce__(self) -> Any:
            reach("save")
            return int, ()

    with recovery, (life.directory / f"{life.number}.steps").open("w") as steps:
        model.register_forward_hook(lambda *_: reach("forward"))
        for (batch,) in recovery.resume(loader, epochs=1):
            loss = model(batch).square().mean()
            loss.register_hook(lambda gradient: reach("backward"))
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps.write(f"{recovery.iteration}\n")
            pickle.dumps(Own())
    return [recovery.iteration]


@pytest.mark.parametrize("moment", ["forward", "backward", "save"])
def test_in_the_middle_of_a_step_nothing_is_lost_or_repeated(moment: str, tmp_path: Path) -> None:
    left = live(in_the_middle_of_a_step, Life(tmp_path, AT, signal.SIGTERM, options={"moment": moment}))
    assert left.statuses == [143], left.output
    at = committed(tmp_path)
    assert live(in_the_middle_of_a_step, Life(tmp_path, number=1, options={"moment": moment})).result == [STEPS]
    first, again = ([int(one) for one in (tmp_path / f"{life}.steps").read_text().split()] for life in range(2))
    assert first[:at] == list(range(1, at + 1))  # two more compare the steps
    assert again == list(range(at + 1, STEPS + 1))
