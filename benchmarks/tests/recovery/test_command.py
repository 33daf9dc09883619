"""`cpsr bench recovery`: every measurement by its option, and clear words where one cannot be."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cpsr.benchmarks.recovery import warm_up
from cpsr.benchmarks.recovery.gpt import SIZES, GPTTask
from cpsr.benchmarks.recovery.grid import FULL, selection
from cpsr.benchmarks.recovery.workload import WORKLOADS, find_workloads
from cpsr.benchmarks.tests.recovery.tiny import QUIET, one_thread
from cpsr.cli.main import app
from cpsr.errors import ConfigError
from tests.device import DEVICE


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(WORKLOADS, QUIET.name, QUIET)
    monkeypatch.setattr(warm_up, "PLACES", (150, 800))
    with one_thread():
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def call(cache: Path, path: Path, *options: str) -> Any:
    """The JSON that a call leaves; it must have left a plot too."""
    few = [
        "--workloads",
        QUIET.name,
        "--points",
        "1",
        "--seeds",
        "1",
        "--workers",
        "1",
        "--cache",
        str(cache),
        "--json",
        str(path),
    ]
    result = CliRunner().invoke(app, ["bench", "recovery", *few, *options])
    assert result.exit_code == 0, result.output
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return json.loads(path.read_text())


def test_failures(cache: Path, tmp_path: Path) -> None:
    report = call(cache, tmp_path / "out.json", "--failures", "3", "--methods", "line")
    assert report["selection"]["device"] == report["machine"]["device"]["kind"] == DEVICE
    assert [len(run["recoveries"]) for run in report["runs"]] == [3]


def test_warm_up(cache: Path, tmp_path: Path) -> None:
    report = call(cache, tmp_path / "out.json", "--warm-up", "--methods", "recompute,line,vitp")
    # At 142 there are two checkpoints: both recompute there.
    declined = {(place["method"], place["iteration"]): place["declined"] for place in report["places"]}
    assert declined == {("line", 142): 1, ("vitp", 142): 1, ("line", 792): 0, ("vitp", 792): 0}
    (scores,) = report["accuracy"]
    assert scores["method"] == "vitp"
    assert [score["iteration"] for score in scores["scores"]] == list(range(300, 751, 50))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--failures", "2", "--warm-up"], "exclude each other"),
        (["--quick", "--full"], "exclude each other"),
        (["--workloads", "gpt-350M", "--device", "cpu"], "needs a GPU"),
        (["--workloads", QUIET.name, "--failures", "40"], "leave no checkpoint between them"),
        (["--workloads", QUIET.name, "--intervals", "25"], "keeps its weights every 10 iterations"),
        (["--intervals", "50,many"], "--intervals 50,many"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "recovery", "--cache", str(tmp_path / "cache"), *options])
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "cache").exists()


def test_the_large_preset_has_the_papers_shape() -> None:
    with torch.device("meta"):
        model = GPTTask(SIZES["gpt-350M"]).model()
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(303.6e6, rel=1e-3)
    assert SIZES["gpt-350M"].layers == SIZES["gpt-350M"].heads + 8 == 24


def test_the_large_preset_is_only_taken_for_a_gpu() -> None:
    assert not any(WORKLOADS[name].needs_gpu for name in FULL.workloads)
    assert find_workloads("gpt-350M", "cuda") == ("gpt-350M-cosine",)
    chosen = selection(workloads="gpt-350M", device="cuda")
    assert (chosen.workloads, chosen.device) == (("gpt-350M-cosine",), "cuda")
    with pytest.raises(ConfigError, match="needs a GPU"):
        find_workloads("gpt-350M")


def test_a_device_does_not_change_the_name_of_a_selection() -> None:
    assert (selection().name, selection(device="cuda").name) == ("quick", "quick")
    assert selection(points=2, device="cuda").name == "quick, changed"
