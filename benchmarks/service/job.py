"""The training job that writes the journal meanwhile: a byte-level GPT in one process, until it is asked to end."""

from pathlib import Path

import torch
from torch.utils.data import DataLoader

from cpsr.demo.model import GPT, GPTConfig, Windows, read_corpus
from cpsr.engines.torch import TorchAdapter
from cpsr.recovery import CPSRRecovery

__all__ = ["main"]

BATCH = 2  # windows: a step of a few tens of milliseconds


def main(run_dir: Path) -> None:
    """Train in the run directory; SIGTERM ends it at a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(GPTConfig())
    optimizer = torch.optim.AdamW(model.parameters())
    text, _ = read_corpus()
    loader = DataLoader(Windows(text, GPTConfig().context), batch_size=BATCH, drop_last=True)
    configuration = {"run_dir": str(run_dir)}
    with CPSRRecovery(TorchAdapter(model, optimizer), configuration) as recovery:
        for batch in recovery.resume(loader, repeat=True):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
