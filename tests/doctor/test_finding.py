"""Findings as they are told and sent."""

import json

import pytest

from cpsr.doctor.finding import Finding, error, ok, size, warning, worst


def test_the_worst_level_counts() -> None:
    fine, bad, worse = ok("a", "it is"), warning("b", "it is slow", "do this"), error("c", "it is not there", "do that")
    assert worst([]) == worst([fine]) == "ok"
    assert worst([bad, fine]) == "warning"
    assert worst([fine, worse, bad]) == "error"


def test_a_finding_survives_the_way_between_ranks() -> None:
    found = warning("fsync", "it takes 200 ms", "take another disk", median_seconds=0.2, names=["a"])
    assert Finding.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert found.sentence == "it takes 200 ms: take another disk"
    assert ok("fsync", "it takes 1 ms").sentence == "it takes 1 ms"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (4.2e9, "4.2 GB"), (25.3e9, "25.3 GB"), (5e15, "5e+03 TB")],
)
def test_sizes_are_read_at_a_glance(count: float, text: str) -> None:
    assert size(count) == text
