"""What became of each check, from the records of the ranks, and how it is printed."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from cpsr.qualify.result import Records, print_result, read_records, result_of

MACHINE: Mapping[str, Any] = {
    "processor": "a processor",
    "cores": 2,
    "memory_bytes": 1 << 30,
    "device": {"kind": "cpu"},
}
CELL = {"engine": "deepspeed", "zero": 1, "precision": "bf16", "optimizer": "adamw", "feature": ""}
SPREAD = {"median": 1.25, "min": 1.0, "max": 2.0}


def found(folder: Path, ranks: int = 2) -> dict[str, Any]:
    """Two ranks: one check passed, one failed on rank 1, one ended on rank 0 alone, and one was never begun."""
    first, second = Records(folder, 0), Records(folder, 1)
    trials = [{"trial": name, "cell": CELL, "check": name, "reason": ""} for name in ("speed", "one", "half", "none")]
    trials.append({"trial": "dump", "cell": CELL, "check": "dump", "reason": "needs 3 ranks"})
    first.add(
        "planned",
        trials=trials,
        ranks=ranks,
        backend="gloo",
        device="cpu",
    )
    for name in ("speed", "one"):
        for rank, records in enumerate((first, second)):
            records.began(name)
            error = "Traceback\nAssertionError: it differs" if (name, rank) == ("one", 1) else ""
            figures = {"stall_ratio": SPREAD, "step_ratio": SPREAD, "copied_bytes": 10**7} if name == "speed" else {}
            records.ended(name, error, 1.0, figures)
    first.began("half")
    first.ended("half", "", 1.0, {})
    return result_of(read_records(folder), MACHINE, {"torch": "2"}, "the.log")


def test_a_check_passes_where_every_rank_has_ended_it(tmp_path: Path) -> None:
    result = found(tmp_path)
    assert [(one["check"], one["status"]) for one in result["checks"]] == [
        ("speed", "passed"),
        ("one", "failed"),
        ("half", "failed"),
        ("none", "failed"),
        ("dump", "not applicable"),
    ]
    assert not result["passed"]
    reasons = [one["reason"] for one in result["checks"]]
    assert "it differs" in reasons[1]
    assert reasons[2:] == ["the job ended in this check", "the job ended before this check", "needs 3 ranks"]


def test_nothing_at_all_is_no_success() -> None:
    assert not result_of([], MACHINE, {}, "the.log")["passed"]


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    Records(tmp_path, 0).began("restart")
    with (tmp_path / "rank-00000.jsonl").open("a") as file:
        file.write('{"event": "end')
    assert [line["event"] for line in read_records(tmp_path)] == ["began"]


def test_failures_are_printed_in_one_line_each(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    print_result(console, found(tmp_path), Path("result.json"))
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert (
        "FAILED deepspeed zero1 bf16 adamw, one: AssertionError: it differs | send us result.json and the.log"
        in printed
    )
    assert "1 checks passed, 3 failed; result.json" in printed
