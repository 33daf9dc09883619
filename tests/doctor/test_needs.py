"""What a job is said to need is what the job takes."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.config import CPSRConfig
from cpsr.doctor.needs import BYTES_PER_PARAMETER, Launched, Needs
from cpsr.life.saver import disk_bytes
from tests.recovery.test_faults import Loop, config, train


@pytest.mark.parametrize(
    ("environment", "launched"),
    [
        ({}, Launched(1, 1, 1)),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, Launched(8, 8, 1)),
        ({"WORLD_SIZE": "20", "LOCAL_WORLD_SIZE": "8"}, Launched(20, 8, 3)),
        ({"WORLD_SIZE": "4"}, Launched(4, 4, 1)),
        ({"WORLD_SIZE": "many", "LOCAL_WORLD_SIZE": "0"}, Launched(1, 1, 1)),
    ],
)
def test_ranks_are_those_of_the_launcher(environment: dict[str, str], launched: Launched) -> None:
    assert Launched.of(environment) == launched


@given(st.integers(1, 64), st.integers(1, 64))
def test_there_are_machines_enough_for_all_ranks(ranks: int, local: int) -> None:
    found = Launched.of({"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(local)})
    assert found.local_ranks * (found.machines - 1) < found.ranks <= found.local_ranks * found.machines


def test_bytes_are_those_of_a_job_with_adam() -> None:
    module = torch.nn.Linear(1024, 1024, bias=False, device="cpu")
    shard = TorchAdapter(module, torch.optim.AdamW(module.parameters())).shard()
    for settings in ({}, {"mode": "exact"}, {"checkpoint": {"interval_iterations": 7, "target": "file:///x"}}):
        chosen = CPSRConfig.load({"run_dir": "run", **settings})
        needs = Needs(chosen, Launched(), BYTES_PER_PARAMETER * 1024 * 1024)
        most = disk_bytes(shard, chosen)
        assert needs.disk_bytes is not None
        assert list(needs.disk_bytes) == pytest.approx([most, most], rel=1e-3)
        assert needs.buffer_bytes == pytest.approx(SnapshotPool.required_bytes(shard), rel=1e-3)


def test_ranks_that_hold_the_same_write_it_once_unless_told_otherwise() -> None:
    chosen = CPSRConfig.load({"run_dir": "run"})
    needs = Needs(chosen, Launched(8, 4, 2), 3_000_000)
    assert needs.disk_bytes is not None
    least, most = needs.disk_bytes
    assert most == 8 * least
    each = CPSRConfig.load({"run_dir": "run", "checkpoint": {"replicated": "each"}})
    assert Needs(each, Launched(8, 4, 2), 3_000_000).disk_bytes == (most, most)
    assert needs.buffer_bytes == 3 * 4 * 3_000_000
    assert needs.replica_bytes == 2 * 1 * 4 * 3_000_000  # of one other machine, though two replicas are configured
    replayed = CPSRConfig.load({"run_dir": "run", "replay": {"enabled": True}})
    assert Needs(replayed, Launched(8, 4, 2), 3_000_000).buffer_bytes == needs.buffer_bytes
    assert Needs(replayed, Launched(8, 4, 2), 3_000_000).window_bytes == 3 * 4 * 3_000_000
    assert needs.window_bytes == 0


def test_without_a_size_nothing_is_said_of_bytes() -> None:
    needs = Needs(CPSRConfig.load({"run_dir": "run"}), Launched(8, 8))
    assert (needs.buffer_bytes, needs.disk_bytes, needs.replica_bytes) == (None, None, 0)
    assert needs.commit_seconds(1e9, 1e9) is None
    assert Needs(needs.config, Launched(8, 2), 10**9).commit_seconds(1e9, 2e9) == pytest.approx(3.0)


def test_a_run_has_no_more_files_than_was_said(tmp_path: Path) -> None:
    settings = config(tmp_path / "run", checkpoint={"interval_iterations": 1, "history_span_iterations": 8})
    loop, most = Loop(), 0
    with CPSRRecovery(loop.adapter, settings) as recovery:
        for until in range(1, 30):
            train(recovery, loop, until)
            recovery.life.saver.finish()
            recovery.life.saver.drain(10)
            most = max(most, len(list((tmp_path / "run").rglob("*"))))
    said = Needs(CPSRConfig.load(settings), Launched()).files
    assert said / 4 < most <= said
