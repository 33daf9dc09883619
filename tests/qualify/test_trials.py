"""Which checks run, and what became of each by the records of the ranks."""

from pathlib import Path

import pytest
import torch

from cpsr.qualify.cells import Cell, cells_of
from cpsr.qualify.checks import CHECKS, trials_of
from cpsr.qualify.command import result_of
from cpsr.qualify.ranks import read_records, record


def names(ranks: int = 2, only: str = "") -> list[str]:
    return [trial.name for trial in trials_of("cpu", only, ranks, True)]


def test_every_cell_restarts_and_every_check_has_a_cell() -> None:
    trials = trials_of("cpu", "", 2, True)
    assert {one.cell for one in trials if one.check.name == "restart"} == set(cells_of("cpu", 2, True))
    assert {one.check.name for one in trials} == {check.name for check in CHECKS}
    assert [one.check.kills for one in trials if one.cell.engine != "pipeline"] == sorted(
        one.check.kills for one in trials if one.cell.engine != "pipeline"
    )


def test_a_single_rank_has_what_needs_no_other() -> None:
    found = names(ranks=1)
    alone = {name.partition(": ")[2] for name in found if name.startswith("torch fp32 adamw")}
    assert alone == {"restart", "memory", "replay", "disk", "predict"}
    assert not any("dump" in name or name.startswith("ddp") for name in found)


def test_what_an_older_torch_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu.Stream, "record_event", raising=False)
    assert not any(name.startswith("fsdp2") for name in names())
    assert Cell("fsdp2", None, "bf16") in cells_of("cuda", 2, True)


def test_only_selects_by_name() -> None:
    assert names(only="zero1 bf16 adamw: d") == ["deepspeed zero1 bf16 adamw: disk", "deepspeed zero1 bf16 adamw: dump"]


def test_a_check_passes_where_every_rank_has_ended_it(tmp_path: Path) -> None:
    checks = ("whole", "one", "half", "none")
    record(tmp_path, 0, "planned", trials=[["a cell", check] for check in checks], ranks=2, backend="gloo")
    for check in ("whole", "one"):
        for rank in (0, 1):
            record(tmp_path, rank, "began", trial=f"a cell: {check}")
            error = "Traceback\nAssertionError: it differs" if (check, rank) == ("one", 1) else ""
            record(tmp_path, rank, "ended", trial=f"a cell: {check}", error=error)
    record(tmp_path, 0, "ended", trial="a cell: half", error="")
    with (tmp_path / "rank-00001.jsonl").open("a") as file:
        file.write('{"event": "end')  # a line that is being written
    result = result_of(read_records(tmp_path))
    reasons = {one["check"]: one["reason"] for one in result["checks"]}
    assert {one["check"]: one["status"] for one in result["checks"]} == {
        "whole": "passed",
        "one": "failed",
        "half": "failed",
        "none": "failed",
    }
    assert "it differs" in reasons["one"]
    assert (reasons["half"], reasons["none"]) == ("the job ended in this check", "the job ended before this check")
    assert not result["passed"]
    assert not result_of([])["passed"]
