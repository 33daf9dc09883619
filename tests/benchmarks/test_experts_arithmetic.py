"""Bytes, tokens at risk and choosing, without any training."""

import json
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.benchmarks.experts.exposure import exposure, tokens_at_risk
from cpsr.benchmarks.experts.policies import IN_TURN, POLICIES
from cpsr.benchmarks.experts.routing import SKEWS, Trace, drawn_shares, synthetic_trace
from cpsr.benchmarks.experts.run import main
from cpsr.benchmarks.experts.scheduling import OPERATORS, RANKS, Scheduling, scheduling
from cpsr.benchmarks.experts.shapes import SPREAD_OF_64, moetion_shape, pec_shape
from cpsr.benchmarks.experts.sizes import EXPERTS, expert_sweep, holding, rank_bytes, sizes
from cpsr.errors import ConfigError
from cpsr.experts.budget import Budget

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
    for skew in (0.0, *SKEWS):
        assert points[1, skew].snapshot_bytes == points[1, skew].dense_bytes
        assert points[64, skew].saved_experts <= 64
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


def test_what_is_drawn_is_called_synthetic_and_has_its_skew() -> None:
    equal = synthetic_trace("equal", drawn_shares(0, 4, 2, seed=0), iterations=50, tokens=1000, seed=0)
    assert equal.source == "synthetic: equal"
    assert equal.tokens.shape == (50, 2, 4)
    assert (equal.tokens.sum(axis=2) == 1000).all()
    assert equal.skew < 0.01
    drawn = numpy.mean(
        [synthetic_trace("", drawn_shares(0.5, 8, 50, seed), 1, 10_000, seed).skew for seed in range(10)]
    )
    assert drawn == pytest.approx(0.5, abs=0.05)


def test_tokens_at_risk_by_hand() -> None:
    """One of two experts in turn: the other's tokens since its last snapshot are at risk."""
    trace = Trace("by hand", numpy.array([[[3, 1]]] * 4))
    layers = trace.layers()
    in_turn = tokens_at_risk(POLICIES[IN_TURN](layers), trace, Budget(experts_per_layer=1))
    assert in_turn == [1 / 4, 3 / 4, 1 / 4, 3 / 4]
    both = tokens_at_risk(POLICIES[IN_TURN](layers), trace, Budget(experts_per_layer=2))
    assert both == [0, 0, 0, 0]
    most = tokens_at_risk(POLICIES["MOETION"](layers), trace, Budget(experts_per_layer=1))
    assert most == [1 / 4, 2 / 4, 3 / 4, 1 / 4]  # of a tie in the third iteration the older one is saved


def test_by_popularity_at_most_half_is_at_risk_with_the_papers_spread() -> None:
    trace = synthetic_trace("paper", [numpy.asarray(SPREAD_OF_64) / 100] * 2, 100, 4096, seed=0)
    found = exposure(trace, 16)
    assert found.experts == 64
    assert set(found.against_turn) == set(POLICIES) - {IN_TURN}
    assert found.against_turn["MOETION"] <= 0.5


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
        "synthetic": True,  # 80% to 6 of 64
    }
    arithmetic = report["result"]["arithmetic"]
    assert all(one["source"].startswith("synthetic") for one in arithmetic["exposures"])
    assert report["result"]["stalls"] == report["result"]["recovered"] == []
    assert path.with_suffix(".png").read_bytes().startswith(PNG)
    assert "54.2%" in capsys.readouterr().out


@pytest.mark.parametrize("parts", [["arithmetic", "bytes"], []])
def test_parts_that_are_not_known_are_refused(parts: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--parts .* there are arithmetic, stall, writes, failures"):
        main(parts=parts)
