"""What a call changes of a module beside its state is refused by name."""

import random
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cpsr.errors import NotResumableError
from tests.hints.programs import InMemory, Program, module_of

CHANGES = {
    "note": "model.note = 1",
    "0.p": "model[0].p = 0.25",
    "table": "model.table['x'] = 1",
    "mask": "model.mask += 1",
    "draw": "model.draw.random()",
    "settings": "model.settings.inner.rate = 2",
    "_forward_hooks": "model.register_forward_hook(print)",
    "1._forward_pre_hooks": "model[1].register_forward_pre_hook(print)",
    "1.weight": "model.half()",
    "1.bias": "model[1].bias = torch.nn.Parameter(torch.zeros(2))",
    "2.running_mean": "model[2].running_mean = torch.zeros(3)",
    "_modules": "model.append(torch.nn.ReLU())",
    "2.__class__": "model[2].__class__ = torch.nn.BatchNorm2d",
    "1.weight by a hook": "model[1].weight.register_hook(print)",
    "forward": "model.forward = print",
}


class Inner:
    rate = 1


class Settings:
    def __init__(self) -> None:
        self.inner = Inner()


def model() -> Any:
    torch.manual_seed(1)
    made = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Flatten())
    made.table, made.mask, made.draw = {"y": [1.5]}, torch.zeros(2), random.Random(1)  # type: ignore[assignment]
    made.settings = Settings()  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_beside_the_state_is_refused_by_name(tmp_path: Path, name: str) -> None:
    text = f"def f(model):\n    hint()\n    {CHANGES[name]}\n    hint()\n"
    words = f"the argument 'model' cannot be saved: the call has changed '{name.split(' ')[0]}' of it"
    with pytest.raises(NotResumableError, match=words):
        Program(module_of(tmp_path, text).f).interrupted(lambda: {"model": model()})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("optimizer.register_step_post_hook(print)", "_optimizer_step_post_hooks"),
        ("optimizer.add_param_group({'params': [torch.nn.Parameter(torch.ones(1))]})", "param_groups"),
    ],
)
def test_a_change_of_an_optimizer_is_refused_by_name(tmp_path: Path, change: str, name: str) -> None:
    text = f"def f(optimizer):\n    hint()\n    {change}\n    hint()\n"
    with pytest.raises(NotResumableError, match=f"the call has changed '{name}' of it"):
        Program(module_of(tmp_path, text).f).interrupted(lambda: {"optimizer": torch.optim.Adam(model().parameters())})


def test_a_training_changes_nothing_beside_the_state(tmp_path: Path) -> None:
    text = """
    def f(model, optimizer, schedule):
        out = []
        for i in range(3):
            model.train(i != 1)
            loss = model(torch.randn(4, 5, 3))[0].square().mean() if model.training else None
            if loss is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                out.append(loss.item())
            del loss
            schedule.step()
            hint()
        return out
    """

    def given() -> dict[str, Any]:
        torch.manual_seed(1)
        made = nn.LSTM(3, 2, 2, dropout=0.1)
        optimizer = torch.optim.Adam(made.parameters())
        return {
            "model": made,
            "optimizer": optimizer,
            "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        }

    keeper = InMemory()
    Program(module_of(tmp_path, textwrap.dedent(text)).f).call(given(), keeper)
    assert keeper.count == 3
