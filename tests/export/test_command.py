"""Real jobs of two ranks, exported, and taken over by DeepSpeed or plain torch without CPSR."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from cpsr.cli.main import app
from cpsr.errors import ConfigError
from cpsr.export.command import run_export
from tests.export.made import operator, shard, write_checkpoint, write_identity
from tests.export.model import Model
from tests.recovery.job import Job

SAVED = 4
# ZeRO stage and precision of the run, and the stage that its universal checkpoint is loaded at, on one rank.
ENGINES = {
    "zero 0": (0, "fp32", 1),
    "zero 1": (1, "fp32", 1),
    "zero 2": (2, "fp32", 3),
    "zero 3": (3, "fp32", 3),
    "bf16": (1, "bf16", 2),
}


@dataclass(frozen=True)
class Runs:
    """A run of each engine on two ranks, and what became of its universal checkpoint on one."""

    directory: Path
    trained: dict[str, Any]
    loaded: dict[str, Any]
    messages: dict[str, list[str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two launches for all engines: what costs time is starting processes."""
    directory = tmp_path_factory.mktemp("runs")
    engines = {name: (zero, precision) for name, (zero, precision, _) in ENGINES.items()}
    training = Job(directory)
    trained = training.launch(worker="tests.export.worker", engines=engines)
    assert trained.statuses == [0, 0], trained.output[0][-3000:]
    messages = {
        name: run_export(training.run_dir / name, directory / "universal" / name, "universal", "fp32", None)
        for name in ENGINES
    }
    engines = {name: (zero, precision) for name, (_, precision, zero) in ENGINES.items()}
    loaded = Job(directory / "loading").launch(
        worker="tests.export.worker", ranks=1, engines=engines, universal=directory / "universal"
    )
    assert loaded.statuses == [0], loaded.output[0][-3000:]
    return Runs(training.run_dir, trained.result(), loaded.result(), messages)


@pytest.mark.parametrize("engine", ENGINES)
def test_deepspeed_goes_on_from_a_universal_checkpoint(runs: Runs, engine: str) -> None:
    assert f"checkpoint {SAVED} of" in runs.messages[engine][0]
    loaded, trained = dict(runs.loaded[engine]), dict(runs.trained[engine])
    assert loaded.pop("steps") == SAVED
    trained.pop("module")
    assert loaded == trained  # weights, moments, buffers, rate, and the losses of the next steps: bit for bit


@pytest.mark.parametrize("engine", ENGINES)
def test_plain_torch_loads_the_state_dict(runs: Runs, tmp_path: Path, engine: str) -> None:
    run_export(runs.directory / engine, tmp_path / "model.safetensors", "safetensors", "trained", SAVED)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: digest(tensor) for name, tensor in tensors.items()} == runs.trained[engine]["module"]
    model = Model()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(tensors["layers.0.weight"].dtype)
    model.load_state_dict(tensors, strict=True)
    assert {name: digest(tensor) for name, tensor in model.state_dict().items()} == runs.trained[engine]["module"]


def test_fp32_is_the_master_copy(runs: Runs, tmp_path: Path) -> None:
    run_export(runs.directory / "bf16", tmp_path / "model.safetensors", "safetensors", "fp32", None)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    masters = {key[5:]: value for key, value in runs.trained["bf16"]["state"].items() if key.startswith("fp32 ")}
    assert {name: digest(tensors[name]) for name in masters} == masters
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_universal_checkpoint_holds_plain_data_alone(runs: Runs) -> None:
    files = sorted((runs.directory.parent / "universal" / "zero 1").rglob("*.pt"))
    assert files
    for file in files:
        torch.load(file, weights_only=True)


def test_plain_torch_goes_on_from_a_dcp_directory(tmp_path: Path) -> None:
    """A run of FSDP2 on two ranks, taken over on two and on one, whole or with a flattened optimizer."""
    worker, out = "tests.export.torch_worker", tmp_path / "dcp"
    training = Job(tmp_path)
    trained = training.launch(worker=worker)
    assert trained.statuses == [0, 0], trained.output[0][-3000:]
    run_export(training.run_dir, out, "dcp", "fp32", None)
    for ranks, flat in ((2, True), (1, False)):
        loaded = Job(tmp_path / str(ranks)).launch(worker=worker, ranks=ranks, exported=str(out), flat=flat)
        assert loaded.statuses == [0] * ranks, loaded.output[0][-3000:]
        assert loaded.result() == trained.result()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_identity(tmp_path / "run")
    write_checkpoint(tmp_path / "run", shard(operator("w", torch.ones(4), (4,)), seen=torch.ones(1)))
    return tmp_path / "run"


def test_nothing_is_overwritten_and_nothing_left_behind(run_dir: Path, tmp_path: Path) -> None:
    format_, out = "safetensors", tmp_path / "deep" / "out"
    assert run_export(run_dir, out, format_, "fp32", None)[0] == f"checkpoint 50 of {run_dir} (1 ranks, trained): {out}"
    before = {path: path.stat().st_mtime_ns for path in out.parent.rglob("*")}
    for taken in (out, tmp_path / "link"):
        if taken != out:
            taken.symlink_to(tmp_path / "nowhere")
        with pytest.raises(ConfigError, match="nothing is ever overwritten"):
            run_export(run_dir, taken, format_, "fp32", None)
    assert {path: path.stat().st_mtime_ns for path in out.parent.rglob("*")} == before
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_arguments_that_cannot_be_meant_are_refused(run_dir: Path, tmp_path: Path) -> None:
    for out, format_, dtype, message in (
        (tmp_path / "out", "onnx", "fp32", "unknown format 'onnx'; known are universal, dcp, safetensors"),
        (tmp_path / "out", "safetensors", "int8", "unknown dtype 'int8'; known are fp32 and trained"),
        (run_dir / "checkpoints" / "out", "universal", "fp32", "lies in the run's own directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_export(run_dir, out, format_, dtype, None)
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_exported(run_dir: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(run_dir), "--out", str(tmp_path / "out"), "--iteration", "50"])
    assert result.exit_code == 0, result.output
    first, *rest = result.stdout.splitlines()
    assert first == f"checkpoint 50 of {run_dir} (1 ranks, trained): {tmp_path / 'out'}"
    assert any("load_universal" in line for line in rest)


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(flat.numpy().tobytes()).hexdigest()}"
