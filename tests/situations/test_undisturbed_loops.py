"""The plainest loop of all comes back, so that a situation that does not is the situation's; and steps before it."""

import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from tests.situations.lives import Life, alone_and_cut, backward, digest, live


def plain(life: Life) -> str:
    torch.manual_seed(0)
    x = torch.randn(256, 16)
    loader = DataLoader(TensorDataset(x, x[:, :4]), batch_size=8, shuffle=True)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with CPSRRecovery(TorchAdapter(model, optimizer), life.config()) as recovery:
        for rate in torch.logspace(-4, -1, life.options.get("tried", 0)):  # a learning-rate finder
            optimizer.param_groups[0]["lr"] = float(rate)
            backward(model(x[:8]).square().mean())
            optimizer.step()
        for inputs, targets in recovery.resume(loader, epochs=1):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            life.step(recovery.iteration)
    return digest(model)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_plain_loop_comes_back_bit_for_bit(how: signal.Signals, tmp_path: Path) -> None:
    alone, cut = alone_and_cut(plain, tmp_path, at=13, how=how)
    assert cut.result == alone.result


@pytest.mark.parametrize("steps", [0, 7])
def test_a_run_that_takes_no_batch_from_resume_is_reported_once(steps: int, tmp_path: Path) -> None:
    with_steps = live(plain, Life(tmp_path, options={"tried": steps}))
    assert with_steps.result
    assert with_steps.output.count("no batch came from recovery.resume in the first 5 steps") == (steps > 0)


def test_steps_that_a_restart_takes_again_are_reported_by_the_repeated_steps(tmp_path: Path) -> None:
    _, cut = alone_and_cut(plain, tmp_path, at=13, tried=3)
    assert "this loop is not restored: in step 11" in cut.output
