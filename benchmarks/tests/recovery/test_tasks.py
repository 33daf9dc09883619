"""Data of the tasks: what the end of a training is judged on."""

import pytest
import torch

from cpsr.benchmarks.recovery.corpora import CORPORA
from cpsr.benchmarks.recovery.digits import DigitsTask
from cpsr.benchmarks.recovery.gpt import GPTTask
from cpsr.benchmarks.recovery.task import FINAL_CHUNKS, Task
from cpsr.demo.model import GPTConfig

SMALL = GPTConfig(layers=1, heads=1, width=8, context=16)


@pytest.mark.parametrize("name", [*CORPORA, "digits"])
def test_the_final_data_is_larger_and_the_same_every_time(name: str) -> None:
    task: Task = DigitsTask() if name == "digits" else GPTTask(SMALL, name)
    torch.manual_seed(0)
    model = task.model()
    with torch.no_grad():
        first, second = task.final_losses(model), task.final_losses(model)
        quick = task.validation_losses(model)
    assert first.shape == (FINAL_CHUNKS,)
    assert torch.equal(first, second)
    assert float(first.mean()) == pytest.approx(float(quick.mean()), rel=0.05)


def test_corpora_differ_and_hold_out_other_files() -> None:
    texts = [read() for read in CORPORA.values()]
    for training, held_out in texts:
        assert training.numel() > 10 * held_out.numel() > 10**5
    assert not torch.equal(texts[0][0][:1000], texts[1][0][:1000])
