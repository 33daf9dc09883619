"""Bytes and choosing, without any training."""

import json
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.benchmarks.experts.policies import IN_TURN, POLICIES
from cpsr.benchmarks.experts.routing import SKEWS, drawn_shares
from cpsr.benchmarks.experts.run import main
from cpsr.benchmarks.experts.scheduling import OPERATORS, RANKS, Scheduling, scheduling
from cpsr.benchmarks.experts.shapes import moetion_shape, pec_shape
from cpsr.benchmarks.experts.sizes import EXPERTS, expert_sweep, holding, rank_bytes, sizes
from cpsr.benchmarks.experts.skew import skew
from cpsr.errors import ConfigError

PNG = b"\x89PNG"
WINDOW = "MoEvement's window, as many bytes"


def test_snapshots_are_as_much_smaller_as_the_papers_say() -> None:
    found = {(size.shape, size.policy): size for size in sizes()}
    small, large = pec_shape().name, moetion_shape(64).name
    for policy in POLICIES:
        assert round(100 * found[small, policy].saved, 1) == 54.2
        assert found[large, policy].dense_bytes / found[large, policy].snapshot_bytes > 9
    assert found[small, IN_TURN].round_snapshots == 8
    assert found[large, IN_TURN].round_snapshots == 11  # 64 experts, six at a time
    assert found[small, "MOETION"].round_snapshots is None


def test_a_window_takes_no_more_than_the_others_where_the_frozen_weights_leave_room() -> None:
    found = {(size.shape, size.policy): size for size in sizes()}
    window, in_turn = found[pec_shape().name, WINDOW], found[pec_shape().name, IN_TURN]
    assert window.fits
    assert window.snapshot_bytes <= in_turn.snapshot_bytes
    assert window.round_snapshots == 4
    # Two of ten bytes of every weight are frozen in each snapshot: alone more than six of 64 experts take.
    assert not found[moetion_shape(64).name, WINDOW].fits


def test_shared_out_parts_leave_the_busiest_rank_as_much_less_as_the_paper_says() -> None:
    found = rank_bytes()
    assert round(100 * (1 - found.adaptive / found.every_rank_saves_all), 1) == 76.9
    assert found.adaptive < found.equal


def test_more_experts_and_more_skew_make_snapshots_relatively_smaller() -> None:
    points = {(point.experts, point.skew): point for point in expert_sweep()}
    assert set(points) == {(experts, skew) for experts in EXPERTS for skew in (0.0, *SKEWS)}
    for uneven in (0.0, *SKEWS):
        assert points[1, uneven].snapshot_bytes == points[1, uneven].dense_bytes
        assert points[64, uneven].saved_experts <= 64
    for experts in EXPERTS[2:]:
        taken = [points[experts, skew].snapshot_bytes for skew in (0.0, *SKEWS)]
        assert taken == sorted(taken, reverse=True)
    assert points[64, 0.0].saved_experts == 52  # 80% of 64, rounded up
    assert points[8, 0.0].saved_experts == 7


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=20), st.floats(0.01, 1.0))
def test_the_fewest_experts_that_hold_a_portion(weights: list[float], portion: float) -> None:
    shares = numpy.array(weights) / sum(weights)
    count = holding(shares, portion)
    largest = numpy.sort(shares)[::-1]
    assert largest[:count].sum() >= portion - 1e-6
    assert largest[: count - 1].sum() < portion


def test_drawn_shares_have_their_skew() -> None:
    assert skew(drawn_shares(0, 4, 2, seed=0)[0]) == 0
    drawn = [skew(share) for share in drawn_shares(0.5, 8, 500, seed=0)]
    assert numpy.mean(drawn) == pytest.approx(0.5, abs=0.05)


@pytest.fixture(scope="module")
def scheduled() -> dict[tuple[str, int], Scheduling]:
    return {(one.policy, one.ranks): one for one in scheduling()}


def test_every_policy_chooses_among_ten_thousand_operators(scheduled: dict[tuple[str, int], Scheduling]) -> None:
    found = scheduled
    assert OPERATORS == 10_000
    assert [found[policy, 1].chosen for policy in POLICIES] == [1000] * len(POLICIES)
    assert found["MoEvement's window", 1].chosen == 1200  # a tenth, and what their frozen weights leave
    assert all(one.seconds > 0 for one in found.values())


def test_choosing_is_timed_with_many_expert_parallel_ranks_too(scheduled: dict[tuple[str, int], Scheduling]) -> None:
    """Each rank works out what all of them save; one of 100 has a hundred times fewer experts of its own."""
    found = {key: one.chosen for key, one in scheduled.items()}
    assert {ranks for _, ranks in found} == {1, *RANKS}
    assert found == found | {(policy, ranks): 1000 for policy in (*POLICIES, "window") for ranks in RANKS}


def test_the_part_without_training_leaves_figures_a_plot_and_its_aim(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "experts.json"
    main(path, parts=["arithmetic"])
    report = json.loads(path.read_text())
    assert report["benchmark"] == "experts"
    assert {"date", "cpu_model", "load_before"} <= set(report["machine"])
    met = {aim.partition(":")[0]: met for aim, met in report["aims"].items()}
    assert met.pop("10,000 operators scheduled in 0.1 s") is not None  # a busy machine may take longer
    assert met == {
        "GPT-2 small, 8 experts, in turn (PEC)": True,
        "GPT-1.6B, 64 experts, MOETION": True,
    }
    assert report["result"]["stalls"] == report["result"]["recovered"] == []
    assert path.with_suffix(".png").read_bytes().startswith(PNG)
    assert "54.2%" in capsys.readouterr().out


@pytest.mark.parametrize("parts", [["arithmetic", "bytes"], []])
def test_parts_that_are_not_known_are_refused(parts: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--parts .* there are arithmetic, stall, writes, failures"):
        main(parts=parts)
