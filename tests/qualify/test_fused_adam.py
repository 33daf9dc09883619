"""Where DeepSpeed's FusedAdam cannot be compiled, its checks do not apply."""

import threading
from pathlib import Path

import pytest
from deepspeed.ops.op_builder import FusedAdamBuilder

from cpsr.qualify import fused_adam
from cpsr.qualify.fused_adam import fused_adam_problem
from cpsr.qualify.records import Records
from tests.device import cpu_only


@cpu_only("an operator that is compiled already needs no build tools")
def test_without_build_tools_the_reason_is_given_and_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = Records(tmp_path, 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = fused_adam_problem(tmp_path, records)
    assert "fused_adam" in problem
    assert "\n" not in problem
    monkeypatch.undo()
    monkeypatch.setattr(FusedAdamBuilder, "load", lambda self: pytest.fail("a later life builds nothing"))
    assert fused_adam_problem(tmp_path, records) == problem


def test_a_build_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(FusedAdamBuilder, "load", lambda self: ended.wait())
    monkeypatch.setattr(fused_adam, "BUILD_SECONDS", 0.05)
    assert fused_adam_problem(tmp_path, Records(tmp_path, 0)) == "it was not compiled within 0.05 s"
    ended.set()


def test_one_that_loads_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedAdamBuilder, "load", lambda self: None)
    assert fused_adam_problem(tmp_path, Records(tmp_path, 0)) == ""
