"""Checks that fail or hang end neither the others nor the report; `broken_worker` has one of each."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cpsr.qualify.command import finish, follow
from tests.device import DEVICE
from tests.qualify import jobs

assert jobs  # marks this file: it starts ranks


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, dict[str, dict[str, Any]], Path]:
    """Exit status, what was printed, the results by check, and the work folder."""
    folder = tmp_path_factory.mktemp("broken")
    console = Console(file=io.StringIO(), width=200)
    follow(console, folder, DEVICE, 2, ["-m", "tests.qualify.broken_worker", str(folder), DEVICE])
    status = finish(console, folder, DEVICE, None)
    data = json.loads((folder / "qualify.json").read_text())
    assert isinstance(console.file, io.StringIO)
    return status, console.file.getvalue(), {one["check"]: one for one in data["checks"]}, folder


Broken = tuple[int, str, dict[str, dict[str, Any]], Path]


def test_the_others_are_carried_out(broken: Broken) -> None:
    status, _, checks, folder = broken
    assert {name: one["status"] for name, one in checks.items()} == {
        "first": "passed",
        "after a kill": "failed",
        "on one rank": "failed",
        "for ever": "failed",
        "last": "passed",
    }, (folder / "ranks.log").read_text()
    assert status == 1
    assert not json.loads((folder / "qualify.json").read_text())["passed"]


def test_each_failure_says_why_and_what_to_send(broken: Broken) -> None:
    _, printed, checks, folder = broken
    assert "weights differ by 0.25" in checks["on one rank"]["reason"]
    assert "hung for 1 s" in checks["for ever"]["reason"]
    assert "the training continued" in checks["after a kill"]["reason"], "the next life finds nothing"
    lines = printed.splitlines()
    assert len([line for line in lines if line.startswith("FAILED")]) == 3
    (to_send,) = (line for line in lines if line.startswith("Send us"))
    assert str(folder / "qualify.json") in to_send
    assert str(folder / "ranks.log") in to_send
    assert "2 checks passed, 3 failed" in printed
    assert "hangs" in (folder / "ranks.log").read_text(), "the log has the stack of what hung"


def test_each_life_leaves_its_result(broken: Broken) -> None:
    folder = broken[-1]
    left = [json.loads((folder / f"left-{life}").read_text()) for life in range(2)]
    found = [{one["check"]: (one["status"], one["reason"]) for one in data["checks"]} for data in left]
    assert not any(data["passed"] for data in left)
    assert found[0]["first"] == ("passed", "")
    assert "weights differ by 0.25" in found[0]["on one rank"][1]
    assert found[1]["for ever"] == ("failed", "the job ended in this check")
    assert found[1]["last"] == ("failed", "the job ended before this check")
