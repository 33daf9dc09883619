"""Bytes of sparse snapshots, without any training."""

import json
from pathlib import Path

from cpsr.benchmarks.experts.run import IN_TURN, POLICIES, WINDOW, levels, main, rank_bytes, sizes
from cpsr.benchmarks.experts.shapes import moetion_shape, pec_shape


def test_snapshots_are_as_much_smaller_as_the_papers_say() -> None:
    found = {(size.shape, size.policy): size for size in sizes()}
    small, large = pec_shape().name, moetion_shape(64).name
    for policy in POLICIES:
        assert round(100 * found[small, policy].saved, 1) == 54.2
        assert found[large, policy].dense_bytes / found[large, policy].snapshot_bytes > 9
    assert found[small, IN_TURN].round_snapshots == 8
    assert found[large, IN_TURN].round_snapshots == 11  # 64 experts, six at a time
    window = found[small, WINDOW]
    assert window.fits
    assert window.snapshot_bytes <= found[small, IN_TURN].snapshot_bytes
    assert window.round_snapshots == 3
    # Two of ten bytes of every weight are frozen in each snapshot: alone more than six of 64 experts take.
    assert not found[large, WINDOW].fits


def test_shared_out_parts_leave_the_busiest_rank_as_much_less_as_the_paper_says() -> None:
    found = rank_bytes()
    assert round(100 * (1 - found["adaptive"] / found["every_rank_saves_all"]), 1) == 76.9
    assert found["adaptive"] < found["equal"]


def test_the_more_experts_a_snapshot_has_the_less_a_lost_machine_costs() -> None:
    found = levels()
    assert 1.0 == found[1] > found[2] > found[4] > found[8] == 0.5, "half of the experts come from the disk"


def test_the_figures_and_their_aims_are_left(tmp_path: Path) -> None:
    path = tmp_path / "experts.json"
    main(path)
    report = json.loads(path.read_text())
    assert {"date", "cpu_model", "load_before"} <= set(report["machine"])
    met = {aim.partition(":")[0]: met for aim, met in report["aims"].items()}
    assert met == {"GPT-2 small, 8 experts, in turn (PEC)": True, "GPT-1.6B, 64 experts, MOETION": True}
