"""A pipeline of two stages after SIGTERM: both commit one state, and a restart repeats two steps."""

import signal
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery
from cpsr.journal import JournalReader
from tests.situations.lives import Life, alone_and_cut, digest

CUT_AT = 13


def pipeline(life: Life) -> str:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")
    layers = [LayerSpec(nn.Linear, 12, 16), LayerSpec(nn.Dropout, 0.1), LayerSpec(nn.Linear, 16, 4)]
    module = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    batches = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
    engine: Any = deepspeed.initialize(model=module, optimizer=optimizer, config=batches)[0]
    loader = DataLoader(TensorDataset(torch.randn(160, 12), torch.randn(160, 4)), batch_size=8, shuffle=True)
    with CPSRRecovery(engine, life.config(**life.options.get("more", {}))) as recovery:
        data = recovery.resume(loader, repeat=True)
        while recovery.iteration < 24:
            engine.train_batch(data_iter=data)
            life.step(recovery.iteration)
    return digest(module)


@pytest.mark.parametrize("more", [{}, {"replay": {"enabled": True, "window_iterations": 2}}], ids=["plain", "windows"])
def test_sigterm_of_one_stage(more: dict[str, Any], tmp_path: Path) -> None:
    alone, cut = alone_and_cut(pipeline, tmp_path, at=CUT_AT, how=signal.SIGTERM, ranks=2, more=more)
    assert cut.results == alone.results
    with JournalReader(tmp_path / "cut" / "run" / "journal.db") as reader:
        events = {one.kind: (one.iteration, one.message) for one in reader.events()}
    left = events["sigterm"][0]
    assert left in (CUT_AT + 1, CUT_AT + 2)
    assert events["checked"] == (left + 2, "exact, checked over 2 repeated steps")
