"""Examples in pages: configurations and descriptions are accepted, fragments of programs run, queries have an answer.

Whole programs run in tests/test_readme.py, those of examples/ in tests/integrations.
"""

import gzip
import json
import re
import sqlite3
import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cpsr import CPSRConfig, CPSRRecovery, TorchAdapter
from cpsr.config import read_model
from cpsr.planner.description import PlanSpec

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[Any]:
    """The examples in a language."""
    return list(_blocks(language))


def _blocks(language: str) -> Iterator[Any]:
    for page in PAGES:
        for number, (named, text) in enumerate(BLOCK.findall(page.read_text(encoding="utf-8"))):
            if named == language:
                yield pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")


@pytest.mark.parametrize("text", [one for one in blocks("yaml") if "# simulation.yaml" not in one.values[0]])
def test_a_configuration_or_description_is_accepted(text: str, tmp_path: Path) -> None:
    content = yaml.safe_load(text)
    path = tmp_path / "example.yaml"
    path.write_text(text)
    if "iteration_seconds" in content:
        read_model(PlanSpec, path)
    elif content.keys() & CPSRConfig.model_fields.keys():
        assert CPSRConfig.load({"run_dir": "runs/gpt", **content})
    else:
        assert content.keys() & {"apiVersion", "command"}  # of Kubernetes


@pytest.mark.parametrize("text", blocks("json"))
def test_a_block_of_deepspeeds_configuration_is_accepted(text: str) -> None:
    assert CPSRConfig.load(json.loads(text))


@pytest.mark.parametrize("text", blocks("sql"))
def test_a_query_has_an_answer(text: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal.db"
    journal.write_bytes(gzip.decompress((ROOT / "docs" / "pictures" / "journal.db.gz").read_bytes()))
    with closing(sqlite3.connect(journal)) as connection:
        for query in filter(str.strip, text.split(";")):
            assert connection.execute(query).fetchall()


def names() -> dict[str, Any]:
    """What fragments take as given: a small loop, and names that the lines above them have imported."""
    model = torch.nn.Linear(4, 1)
    data = TensorDataset(torch.randn(16, 4))
    return {
        "torch": torch,
        "TorchAdapter": TorchAdapter,
        "CPSRRecovery": CPSRRecovery,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=1, rank=0)),
        "averaged": torch.optim.swa_utils.AveragedModel(model),
        "epochs": 2,
        "scheduler": None,
        "scaler": None,
    }


def engine_for_events(known: dict[str, Any]) -> dict[str, Any]:
    return {"engine": TorchAdapter(known["model"], known["optimizer"])}


def forward_and_backward(known: dict[str, Any]) -> dict[str, Any]:
    """In the place of `...` in a loop."""
    (batch,) = known["batch"]
    known["optimizer"].zero_grad()
    known["model"](batch).sum().backward()
    return {}


def mixture(known: dict[str, Any]) -> dict[str, Any]:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])
            self.counts = torch.zeros(2, dtype=torch.int64)

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Layer())
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


@pytest.mark.parametrize(
    ("page", "number", "given"),
    [
        ("README.md", 2, None),
        ("docs/events.md", 0, engine_for_events),
        ("docs/experts.md", 1, mixture),
        ("docs/loop_state.md", 0, None),
    ],
)
def test_a_fragment_runs(page: str, number: int, given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cpsr.yaml").write_text("{run_dir: run, mode: exact, checkpoint: {interval_iterations: 2}}")
    language, text = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))[number]
    assert language == "python"
    known = names()
    known |= {"given": forward_and_backward} if given is None else given(known)
    program = re.sub(r"^(\s+)\.\.\.$", r"\1'batch' in locals() and given(locals())", text, flags=re.MULTILINE)
    exec(compile(textwrap.dedent(program), page, "exec"), known)
    if "CPSRRecovery" in text:
        assert Path("run/run.json").is_file()
