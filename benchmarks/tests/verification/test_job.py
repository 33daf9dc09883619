"""A rank that computes wrongly is named, also one that is wrong in the same way each time."""

from pathlib import Path
from typing import Any

import pytest

from cpsr.benchmarks.harness.ranks import run_ranks
from cpsr.benchmarks.verification.faults import KINDS


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero3"])
def test_the_rank_that_is_wrong_is_named(layout: str, tmp_path: Path) -> None:
    """Also one that is wrong in the same way each time: its neighbors compute the same batches."""
    kinds = [*((kind, False) for kind in KINDS), ("gradient", True), ("activation", True)]
    (found,) = run_ranks("verification.job", tmp_path, 3, layout=layout, precision="bf16", kinds=kinds, clean=3, seed=3)
    assert [verdict["kind"] for verdict in found["sound"]] == ["verified"] * (3 + len(kinds))
    for row in found["rows"]:
        assert row["changes"], row
        assert is_named(row) or is_without_effect(row), row
    assert sum(map(is_named, found["rows"])) >= len(kinds) - 1


def is_named(row: dict[str, Any]) -> bool:
    verdict = row["verdict"]
    return bool(verdict["kind"] == "wrong" and list(verdict["ranks"]) == [row["fault"]["rank"]])


def is_without_effect(row: dict[str, Any]) -> bool:
    """All bits are as without it: a narrow number was rounded to the same one."""
    return row["verdict"]["kind"] == "verified" and not row["fault"]["persistent"]
