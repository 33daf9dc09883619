"""Which checks run, in which order, and why the others do not apply."""

import sys
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from cpsr.qualify.cells import cells_of
from cpsr.qualify.environment import no_kernel
from cpsr.qualify.trials import CHECKS, trials_of, without


def test_every_place_of_the_table_is_a_check_or_has_a_reason() -> None:
    trials, empty = trials_of("cpu", "", 2, True, True)
    cells = cells_of("cpu", 2, True)
    assert len(trials) + len(empty) == len(cells) * len(CHECKS)
    assert all(one.reason for one in empty)
    assert len({trial.name for trial in trials}) == len(trials)
    absent = {one.trial.cell for one in empty if one.reason.startswith("torch ")}  # in an older torch
    here = {cell for cell in cells if not cell.package or find_spec(cell.package)} - absent
    assert {trial.cell for trial in trials if trial.check.name == "restart"} == here
    assert {trial.check.name for trial in trials} == {check.name for check in CHECKS}


def test_a_single_rank_has_what_needs_no_other() -> None:
    trials, empty = trials_of("cpu", "", 1, True, True)
    assert {trial.check.name for trial in trials if trial.cell.name == "torch fp32 adamw"} == {
        "restart",
        "speed",
        "memory",
        "replay",
        "disk",
        "predict",
    }
    assert not any(trial.check.name in ("dump", "side group") for trial in trials)
    assert all(trial.cell.engine != "ddp" for trial in trials)
    assert empty


def test_without_a_launcher_nothing_is_killed() -> None:
    trials, empty = trials_of("cpu", "", 2, True, False)
    assert not any(trial.check.kills for trial in trials)
    assert any("cpsr run" in one.reason for one in empty)


def test_without_kernel_adam_its_checks_have_the_reason() -> None:
    trials, empty = trials_of("cuda", "", 2, True, True)
    left, more = without(trials, empty, partial(no_kernel, "FusedAdam", "MissingCUDAException: no nvcc"))
    lost = more[len(empty) :]
    assert {one.trial for one in lost} == {trial for trial in trials if trial.cell.kernel == "FusedAdam"}
    assert {one.reason for one in lost} == {"no FusedAdam here: MissingCUDAException: no nvcc"}
    assert left == [trial for trial in trials if trial.cell.kernel != "FusedAdam"]
    assert without(trials, empty, partial(no_kernel, "FusedAdam", "")) == (trials, empty)


def test_what_needs_a_package_that_is_not_here_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchdata", "lion_pytorch"):  # another test of this process may have imported it
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    _, empty = trials_of("cpu", "restart", 2, True, True)
    reasons = {one.trial.cell.name: one.reason for one in empty if one.trial.check.name == "restart"}
    assert reasons["torch fp32 lion"] == "lion_pytorch is not installed"
    assert reasons["ddp fp32 adamw torchdata loader"] == "torchdata is not installed"


def test_what_an_older_torch_lacks_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    monkeypatch.delattr(torch.cpu.Stream, "record_event", raising=False)
    trials, empty = trials_of("cpu", "", 2, True, True)
    assert {trial.cell for trial in trials if trial.cell.engine == "fsdp2"} == set()
    lost = {one.reason: one.trial.cell for one in empty if one.reason.startswith("torch ")}
    assert {reason.removeprefix(f"torch {torch.__version__} "): cell.engine for reason, cell in lost.items()} == {
        "has no Muon": "torch",
        "has no FSDP2 on processors": "fsdp2",
    }
    trials, _ = trials_of("cuda", "", 2, True, True)
    assert any(trial.cell.engine == "fsdp2" for trial in trials)


def test_only_selects_by_name() -> None:
    trials, empty = trials_of("cpu", "zero1 bf16 adamw: d", 2, True, True)
    assert [trial.name for trial in trials] == ["deepspeed zero1 bf16 adamw: disk", "deepspeed zero1 bf16 adamw: dump"]
    assert {one.trial.cell.name for one in empty} == {"deepspeed zero1 bf16 adamw"}
