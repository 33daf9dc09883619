"""Tiny real trainings with experts under DeepSpeed, on gloo ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cpsr.benchmarks.experts.costs import costs
from cpsr.benchmarks.experts.names import (
    ADAPTIVE,
    CATCH_UP,
    CATCH_UP_NOTHING,
    EACH,
    EQUAL,
    EVERYTHING,
    MADE_UP,
    MOETION,
    STALE,
    TURNS,
)
from cpsr.benchmarks.experts.policies import BY_LOAD, DYNAMIC_K, IN_TURN, IN_WINDOW
from cpsr.benchmarks.experts.run import main
from cpsr.benchmarks.experts.size import QUICK
from cpsr.benchmarks.experts.tasks import FailingTask, Failures, Mixture, WritesTask
from cpsr.benchmarks.harness.ranks import run_ranks
from cpsr.demo.model import GPTConfig

GPT = GPTConfig(layers=2, heads=2, width=16, context=16)
TINY = Mixture(experts=4, gpt=GPT)
SHARED = Mixture(experts=4, gpt=GPT, ranks=2, expert_parallel=2)
FAILURES = Failures(interval_iterations=2, at=(31, 41), end=60, fault_free_end=64, policies=(IN_TURN, MOETION))
CHOSEN = FAILURES.model_copy(
    update={"policies": (IN_TURN, BY_LOAD, DYNAMIC_K, MOETION, IN_WINDOW), "modes": (STALE, CATCH_UP)}
)
MODES = (STALE, MADE_UP, CATCH_UP, CATCH_UP_NOTHING)
PNG = b"\x89PNG"


def test_failures_bring_every_expert_back_to_its_newest_snapshot(tmp_path: Path) -> None:
    task = FailingTask(mixture=TINY, failures=FAILURES)
    (found,) = run_ranks("experts.job", tmp_path, TINY.ranks, task=task.model_dump(mode="json"))
    # One layer of experts, top-1.
    assert [sum(layer) for layer in found["tokens"]] == [8 * GPT.context * FAILURES.fault_free_end]
    runs = {(run["policy"], run["mode"]): run for run in found["runs"]}
    assert set(runs) == {(policy, mode) for policy in FAILURES.policies for mode in MODES}
    fault_free = dict(zip(found["fault_free"]["iterations"], found["fault_free"]["losses"], strict=True))
    for (policy, mode), run in runs.items():
        first, second = run["failures"]
        assert (first["curve"]["iterations"], second["curve"]["iterations"]) == ([30, 40], [40, 50, 60])
        # Stale experts are not the true ones.
        assert (first["curve"]["losses"][0] == fault_free[30]) == (mode == CATCH_UP_NOTHING)
        assert first["curve"]["losses"][-1] != fault_free[40]
        assert (first["saved_experts"], second["saved_experts"]) == ([1] * 15, [1] * 5)
        if policy == IN_TURN:
            # One of four experts every two iterations, then in turn again.
            assert sorted(first["ages"]) == sorted(second["ages"]) == [0, 2, 4, 6]
            # 2, 4 and 6 iterations of three experts in four, twice, in 60 iterations: about a tenth of all tokens.
            assert 0.05 < run["account"]["portion_lost"] < 0.15
    stale = runs[IN_TURN, STALE]
    made_up = runs[IN_TURN, MADE_UP]
    # Capacity is no matter of the weights that were put back, but of what is trained from there.
    assert made_up["failures"][0]["curve"]["losses"][0] == stale["failures"][0]["curve"]["losses"][0]
    assert made_up["failures"][0]["curve"]["losses"][1] != stale["failures"][0]["curve"]["losses"][1]
    caught_up = runs[IN_TURN, CATCH_UP]
    assert caught_up["failures"][0]["curve"]["losses"][0] == stale["failures"][0]["curve"]["losses"][0]
    assert caught_up["failures"][0]["curve"]["losses"][1] != stale["failures"][0]["curve"]["losses"][1]
    for cost in costs(task, found):  # too short for a lag
        assert cost.final_lag_iterations is None
        assert cost.iterations == (30, 40, 50, 60)


def test_policies_that_remember_go_their_own_way_in_every_run(tmp_path: Path) -> None:
    """The one checkpoint between the failures ends a window, which shows that every run goes on with its own."""
    policies, modes = CHOSEN.policies, CHOSEN.modes
    failures = CHOSEN.model_copy(update={"at": (31, 33)})
    task = FailingTask(mixture=TINY, failures=failures)
    (found,) = run_ranks("experts.job", tmp_path, TINY.ranks, task=task.model_dump(mode="json"))
    runs = {(run["policy"], run["mode"]): run["failures"] for run in found["runs"]}
    assert set(runs) == {(policy, mode) for policy in policies for mode in modes}
    for (policy, _), (first, second) in runs.items():
        assert first["saved_experts"] == [1] * 15
        # What the first failure took is over 5% of 30 iterations' tokens: K doubles, once in every run.
        assert second["saved_experts"] == [2 if policy == DYNAMIC_K else 1]
        assert second["ages"].count(0) == second["saved_experts"][0]
        if policy in (IN_TURN, IN_WINDOW):
            assert sorted(second["ages"]) == [0, 2, 4, 6]  # a round of four
    assert runs[DYNAMIC_K, STALE][0] == runs[BY_LOAD, STALE][0]  # the same until K grows


def test_ranks_that_share_write_less_each_and_the_same_together(tmp_path: Path) -> None:
    """Three experts of four layers are never as many on both ranks; what is beside them weighs less."""
    gpt = GPTConfig(layers=6, heads=2, width=16, context=16)
    task = WritesTask(mixture=Mixture(experts=4, gpt=gpt, ranks=2, expert_parallel=2), rounds=2)
    (found,) = run_ranks("experts.job", tmp_path, 2, task=task.model_dump(mode="json"))
    sizes = {way: [one["written_bytes"] for one in rounds] for way, rounds in found["rounds"].items()}
    assert set(sizes) == {EACH, EQUAL, ADAPTIVE}
    for each, equal, adaptive in zip(sizes[EACH], sizes[EQUAL], sizes[ADAPTIVE], strict=True):
        assert sum(equal) == pytest.approx(sum(adaptive), rel=0.02)  # headers
        headers = 8 * 4096  # of files that are written once less, in whole blocks
        assert sum(each) - sum(equal) == pytest.approx(found["non_expert_bytes"], abs=headers)
        assert max(adaptive) < max(equal) < max(each)
        assert max(adaptive) - min(adaptive) < max(equal) - min(equal)
    assert all(seconds > 0 for rounds in found["rounds"].values() for one in rounds for seconds in one["write_seconds"])
    assert not list(tmp_path.glob("**/*.safetensors"))


@pytest.mark.slow
def test_a_tiny_run_on_two_ranks_leaves_figures_samples_and_plots_and_cleans_up(tmp_path: Path) -> None:
    path, workdir = tmp_path / "experts.json", tmp_path / "work"
    size = replace(
        QUICK, seeds=2, failing=(SHARED,), failures=CHOSEN, stalling=(SHARED,), pairs=2, writing=(SHARED,), rounds=2
    )
    main(path, size, workdir=workdir, cache=tmp_path / "cache")
    report = json.loads(path.read_text())
    stalls = {one["way"]: one for one in report["result"]["stalls"]}
    assert set(stalls) == {EVERYTHING, TURNS}
    assert stalls[EVERYTHING]["snapshot_bytes"] == stalls[EVERYTHING]["state_bytes"]
    assert stalls[TURNS]["rounds"] >= 1
    runs = report["result"]["recovered"]
    assert [one["seeds"] for one in runs] == [0] * len(CHOSEN.policies) * len(CHOSEN.modes)  # too short for a lag
    assert {one["experts_per_checkpoint"] >= 2 for one in runs} == {True}  # one of each rank at the least
    assert set(report["result"]["skews"]) == {SHARED.label}
    assert {one["way"] for one in report["result"]["written"]} == {EACH, EQUAL, ADAPTIVE}
    for suffix in ("", "-stall", "-writes", "-failures"):
        assert (tmp_path / f"experts{suffix}.png").read_bytes().startswith(PNG)
    assert not list(workdir.iterdir())
