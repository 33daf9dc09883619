"""The checkpoints of a resumable function, where they are damaged."""

from pathlib import Path

import pytest

from cpsr.benchmarks.harness.checkpoint_files import small_state_file
from cpsr.checkpoint.manifest import step_name
from cpsr.hints.resumable_checkpoints import KeptCheckpoints
from tests.checkpoint.conftest import count_rank_manifests


def test_a_call_keeps_no_manifest_of_a_damaged_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = KeptCheckpoints(tmp_path, "count", {"arguments": 1})
    for total in (1, 2):
        call.save({"total": total, "function": "count"})
    for number in (1, 2):
        path = small_state_file(tmp_path / "checkpoints" / step_name(number))
        path.write_bytes(b"torn")
    counts = count_rank_manifests(monkeypatch)
    KeptCheckpoints(tmp_path, "count", {"arguments": 1})
    assert counts == [0, 0]
