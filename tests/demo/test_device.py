"""Which device the demo and the benchmarks take, and what is said where it is not there."""

from pathlib import Path

import pytest
import torch

from cpsr.demo.device import find_device
from cpsr.errors import ConfigError
from tests.cli.commands import cpsr

COMMANDS = (("demo",), ("bench", "stall"), ("bench", "overhead"), ("bench", "predictor"), ("bench", "recovery"))


@pytest.mark.parametrize(
    ("wanted", "gpu", "found"),
    [
        ("auto", True, "cuda"),
        ("auto", False, "cpu"),
        ("cpu", True, "cpu"),
        ("cpu", False, "cpu"),
        ("cuda", True, "cuda"),
    ],
)
def test_the_gpu_is_taken_unless_the_cpu_is_named(
    monkeypatch: pytest.MonkeyPatch, wanted: str, gpu: bool, found: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert find_device(wanted) == found


@pytest.mark.parametrize(("built_for", "obstacle"), [(None, "this build of torch has no CUDA"), ("13.0", "nvidia-smi")])
def test_a_gpu_that_is_named_and_not_there_is_an_error_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, obstacle: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(ConfigError, match=rf"--device cuda: .*{obstacle}.* --device cpu"):
        find_device("cuda")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_starts_without_the_gpu_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    code, _, errors = cpsr(*command, "--device", "cuda")
    assert code == 2
    assert errors.startswith("cpsr: --device cuda: ")
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
