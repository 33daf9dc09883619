"""A loop whose model returns no loss reports it itself; the journal then has the loss of each step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.journal import JournalReader
from tests.situations.lives import Life, backward, digest, live

STEPS = 32


class WithLoss(torch.nn.Linear):
    """Returns a loss, as a model of transformers does."""

    def forward(self, inputs: torch.Tensor) -> Any:
        outputs = super().forward(inputs)
        return {"loss": outputs.square().mean() * 100, "outputs": outputs}


def reporting(life: Life) -> Any:
    """One loss a step, or the two of its micro-batches; returns what was reported and a digest of the weights."""
    when, kind = life.options["when"], life.options.get("kind", "tensor")
    torch.manual_seed(0)
    x = torch.randn(STEPS * 8, 16)
    loader = DataLoader(TensorDataset(x, x[:, :4]), batch_size=8, shuffle=True)
    model = WithLoss(16, 4) if life.options.get("both") else torch.nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reported = {}
    with CPSRRecovery(TorchAdapter(model, optimizer), life.config()) as recovery:
        for inputs, targets in recovery.resume(loader, epochs=1):
            outputs = model(inputs)
            outputs = outputs["outputs"] if isinstance(outputs, dict) else outputs
            loss = torch.nn.functional.mse_loss(outputs, targets)
            optimizer.zero_grad()
            backward(loss)
            value = loss.item() if kind == "float" else loss
            if when == "before":
                recovery.log_loss(value)
            optimizer.step()
            reported[recovery.iteration] = loss.item()
            if when == "after":
                recovery.log_loss(value)
            life.step(recovery.iteration)
    return {"reported": reported, "weights": digest(model)}


def recorded(run_dir: Path) -> dict[int, float | None]:
    with JournalReader(run_dir / "journal.db") as journal:
        return {step.iteration: step.loss for step in journal.losses()}


def events(run_dir: Path, kind: str) -> list[str]:
    with JournalReader(run_dir / "journal.db") as journal:
        return [event.message for event in journal.events(kind)]


@pytest.mark.parametrize("options", [{"when": "before"}, {"when": "after", "kind": "float", "both": True}], ids=str)
def test_each_step_has_the_loss_that_the_script_reports(options: dict[str, Any], tmp_path: Path) -> None:
    ended = live(reporting, Life(tmp_path, options=options))
    expected = {int(at): value for at, value in ended.result["reported"].items()}
    found = recorded(tmp_path / "run")
    assert found.keys() == expected.keys()
    assert {at: value for at, value in found.items() if value is not None} == pytest.approx(expected)
    assert events(tmp_path / "run", "no loss") == []


def test_a_run_without_a_loss_says_so_once_in_a_life(tmp_path: Path) -> None:
    ended = live(reporting, Life(tmp_path, options={"when": "never"}))
    (message,) = events(tmp_path / "run", "no loss")
    assert "recovery.log_loss(loss)" in message
    assert "planner.policy theorem1 never moves the interval" in message
    assert ended.output.count(message) == 1
    assert set(recorded(tmp_path / "run").values()) == {None}
