"""Where one of DeepSpeed's kernels cannot be compiled, its checks do not apply."""

import threading
from pathlib import Path

import pytest
from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

from cpsr.qualify import worker
from cpsr.qualify.result import Records
from cpsr.qualify.worker import kernel_problem
from tests.device import cpu_only


@cpu_only("an operator that is compiled already needs no build tools")
def test_without_build_tools_the_reason_is_given_and_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = Records(tmp_path, 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = kernel_problem("FusedAdam", tmp_path, records)
    assert "fused_adam" in problem
    assert "\n" not in problem
    monkeypatch.undo()
    monkeypatch.setattr(FusedAdamBuilder, "load", lambda self: pytest.fail("a later life builds nothing"))
    assert kernel_problem("FusedAdam", tmp_path, records) == problem
    monkeypatch.setattr(CPUAdamBuilder, "load", lambda self: None)
    assert kernel_problem("DeepSpeedCPUAdam", tmp_path, records) == ""


def test_a_build_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(FusedAdamBuilder, "load", lambda self: ended.wait())
    monkeypatch.setattr(worker, "BUILD_SECONDS", 0.05)
    assert kernel_problem("FusedAdam", tmp_path, Records(tmp_path, 0)) == "it was not compiled within 0.05 s"
    ended.set()
