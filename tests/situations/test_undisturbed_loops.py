"""The plainest loop of all comes back, so that a situation that does not is the situation's."""

import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from tests.situations.lives import Life, alone_and_cut, backward, digest


def plain(life: Life) -> str:
    torch.manual_seed(0)
    x = torch.randn(256, 16)
    loader = DataLoader(TensorDataset(x, x[:, :4]), batch_size=8, shuffle=True)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with CPSRRecovery(TorchAdapter(model, optimizer), life.config()) as recovery:
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
