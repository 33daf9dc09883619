"""Under DeepSpeed: state beside the tensors, other hyperparameters, a foreign optimizer, SIGTERM of one stage."""

import json
import signal
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery
from cpsr.journal import JournalReader
from tests.situations.lives import Life, alone_and_cut, digest, live
from tests.situations.test_state_of_any_layout import Amax, Bank

WIDTH = 16


class Model(nn.Module):
    """Returns its loss; keeps extra state, and a buffer that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Amax(), Bank()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = self.first(rows) + self.second(rows)
        return functional.mse_loss(found, rows[:, :4])


def trained(life: Life) -> list[Any]:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    changed = life.options.get("changed", {}) if life.number else {}
    settings = {"stage": life.options["stage"], "clipping": 0.5, "warmup": 20, "betas": (0.9, 0.95)} | changed
    torch.manual_seed(0)
    model = Model()
    configuration = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": settings["clipping"],
        "zero_optimization": {"stage": settings["stage"]},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 0.05, "warmup_num_steps": settings["warmup"], "warmup_type": "linear"},
        },
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=settings["betas"])
    engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration)[0]
    other = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    rows = torch.randn(160, WIDTH)
    loader = DataLoader(TensorDataset(rows), batch_size=8, shuffle=True)
    with CPSRRecovery(engine, life.config()) as recovery:
        for (inputs,) in recovery.resume(loader, epochs=1):
            loss = engine(inputs)
            engine.backward(loss)
            engine.step()
            if life.options.get("other") and recovery.iteration == 7:
                other.step()
            life.step(recovery.iteration)
    return [digest(model), model.first.amax, engine.get_lr(), engine.gradient_clipping()]


def test_extra_state_and_buffers_that_grow(tmp_path: Path) -> None:
    alone, cut = alone_and_cut(trained, tmp_path, at=13, stage=2)
    assert cut.result == alone.result


def test_other_hyperparameters(tmp_path: Path) -> None:
    changed = {"clipping": 2.0, "warmup": 40, "betas": [0.8, 0.9]}
    alone, cut = alone_and_cut(trained, tmp_path, at=13, stage=1, changed=changed)
    assert cut.result == alone.result
    (line,) = [line for line in cut.output.splitlines() if "the script sets" in line]
    assert "warmup_num_steps 40 (the run: 20)" in line
    assert "clipping 2.0 (the run: 0.5)" in line
    assert "betas" in line


def test_an_optimizer_that_the_engine_does_not_have(tmp_path: Path) -> None:
    ended = live(trained, Life(tmp_path, options={"stage": 1, "other": True}))
    assert ended.statuses == [1], json.dumps(ended.results)
    assert "SGD steps, an optimizer of other parameters that CPSR does not follow" in ended.output


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
    assert left is not None
    assert CUT_AT < left <= CUT_AT + 6
    assert events["checked"] == (left + 2, "exact, checked over 2 repeated steps")
