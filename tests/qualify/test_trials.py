"""Which checks run, in which order, and why the others do not apply."""

import sys
from importlib.util import find_spec

import pytest
import torch

from cpsr.qualify.cells import Cell, cells_of
from cpsr.qualify.checks import CHECKS, Trial, trials_of
from cpsr.qualify.worker import without_kernel


def running(*arguments: str | int | bool) -> list[Trial]:
    return [one for one in trials_of(*arguments) if not one.reason]  # type: ignore[arg-type]


def test_every_place_of_the_table_is_a_check_or_has_a_reason() -> None:
    places = trials_of("cpu", "", 2, True, True)
    cells = list(cells_of("cpu", 2, True))
    assert {one.name for one in places} == {f"{cell.name}: {check.name}" for cell in cells for check in CHECKS}
    assert len(places) == len(cells) * len(CHECKS)
    absent = {one.cell for one in places if one.reason.startswith("torch ") or one.reason.endswith("not installed")}
    trials = [one for one in places if not one.reason]
    assert {one.cell for one in trials if one.check.name == "restart"} == set(cells) - absent
    assert {one.check.name for one in trials} == {check.name for check in CHECKS}
    assert find_spec("lion_pytorch") is None or Cell("torch", None, "fp32", "lion") not in absent


def test_a_single_rank_has_what_needs_no_other() -> None:
    trials = running("cpu", "", 1, True, True)
    assert {one.check.name for one in trials if one.cell.name == "torch fp32 adamw"} == {
        *("restart", "speed", "memory", "replay", "disk", "predict")
    }
    assert not any(one.check.name in ("dump", "side group") or one.cell.engine == "ddp" for one in trials)


def test_without_a_launcher_nothing_is_killed() -> None:
    places = trials_of("cpu", "", 2, True, False)
    assert not any(one.check.kills for one in places if not one.reason)
    assert any("cpsr run" in one.reason for one in places)


def test_without_a_kernel_its_checks_have_the_reason() -> None:
    places = trials_of("cuda", "", 2, True, True)
    left = without_kernel("FusedAdam", "MissingCUDAException: no nvcc", places)
    lost = [after for before, after in zip(places, left, strict=True) if before != after]
    assert {one.name for one in lost} == {
        one.name for one in places if one.cell.kernel == "FusedAdam" and not one.reason
    }
    assert {one.reason for one in lost} == {"no FusedAdam here: MissingCUDAException: no nvcc"}


def test_what_needs_a_package_that_is_not_here_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchdata", "lion_pytorch"):  # another test of this process may have imported it
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    places = trials_of("cpu", "restart", 2, True, True)
    reasons = {one.cell.name: one.reason for one in places if one.check.name == "restart"}
    assert reasons["torch fp32 lion"] == "lion_pytorch is not installed"
    assert reasons["ddp fp32 adamw torchdata loader"] == "torchdata is not installed"


def test_what_an_older_torch_lacks_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    monkeypatch.delattr(torch.cpu.Stream, "record_event", raising=False)
    places = trials_of("cpu", "", 2, True, True)
    assert not any(one.cell.engine == "fsdp2" for one in places if not one.reason)
    lost = {one.reason: one.cell.engine for one in places if one.reason.startswith("torch ")}
    assert {reason.removeprefix(f"torch {torch.__version__} "): engine for reason, engine in lost.items()} == {
        "has no Muon": "torch",
        "has no FSDP2 on processors": "fsdp2",
    }
    assert any(one.cell.engine == "fsdp2" for one in running("cuda", "", 2, True, True))


def test_only_selects_by_name() -> None:
    places = trials_of("cpu", "zero1 bf16 adamw: d", 2, True, True)
    assert [one.name for one in places if not one.reason] == [
        "deepspeed zero1 bf16 adamw: disk",
        "deepspeed zero1 bf16 adamw: dump",
    ]
    assert {one.cell.name for one in places} == {"deepspeed zero1 bf16 adamw"}
