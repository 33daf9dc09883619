"""One process: a byte-level GPT under `TorchAdapter`."""

from pathlib import Path

import torch
from torch.utils.data import DataLoader

from cpsr.benchmarks.overhead.blocks import Pair, configuration, measure_pairs
from cpsr.demo.model import GPT, GPTConfig, Windows, read_corpus
from cpsr.engines.torch import TorchAdapter
from cpsr.recovery import CPSRRecovery

__all__ = ["run"]

BATCH = 2  # windows; a step of a few tens of milliseconds on two cores


def run(run_dir: Path, pairs: int, device: str) -> list[Pair]:
    """Measure one run in this process."""
    torch.manual_seed(0)
    model = GPT(GPTConfig()).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    adapter = TorchAdapter(model, optimizer)
    text, _ = read_corpus()
    loader = DataLoader(Windows(text, GPTConfig().context), batch_size=BATCH, drop_last=True)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch.to(device)).backward()
        optimizer.step()

    with CPSRRecovery(adapter, configuration(run_dir)) as recovery:
        return measure_pairs(adapter, recovery, loader, step, pairs, device)
